"""`annotate-patterns`: finds the optional inputs that a sample needs for a block to run, from the cases that
call the block.

A predicate is a set of optional keys. A sample needs at least one of them; the empty set means always. A
block that runs under another kind of condition (two keys together, or the absence of one) gets the smallest
predicate that holds whenever it runs, and a `note` that says so: the block then also runs for samples that do
not reach it, which costs time and no exactness.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import Operation
from xdsl.passes import ModulePass

from secc.ir.dialect.ops import CallOp, InputOp, graph_of, strings_attr, strings_of

InputPattern = frozenset[str]


@dataclass(frozen=True)
class AnnotatePatterns(ModulePass):
    name = "annotate-patterns"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph = graph_of(op)
        optional = strings_of(graph.optional)
        every = {frozenset(strings_of(case.when)) for case in graph.cases}
        for path, block in graph.blocks.items():
            calls = [
                c for case in graph.cases for c in case.ops if isinstance(c, CallOp) and c.target.data == path
            ]
            with_block = {
                frozenset(strings_of(case.when)) for case in graph.cases if any(c in calls for c in case.ops)
            }
            needed = _batch_keys_behind(calls)
            order = sorted(optional, key=lambda key: key not in needed)
            when, exact = find_predicate(with_block, every - with_block, order)
            block.when = strings_attr(sorted(when, key=optional.index))
            if not exact and with_block:
                block.attributes["note"] = StringAttr(
                    f"runs for samples with {_format_patterns(with_block)} only"
                )


def find_predicate(
    active: set[InputPattern], inactive: set[InputPattern], keys: Iterable[str]
) -> tuple[InputPattern, bool]:
    """The smallest set of keys that meets every active pattern, and whether it meets no inactive one; earlier
    keys are preferred.

    Among the sets of one size that meet all active patterns, the one that meets the fewest inactive patterns
    is taken.
    """
    if not active or not inactive:
        return frozenset(), True
    if frozenset() in active:
        return frozenset(), False
    known = [key for key in keys if any(key in p for p in active)]
    wrong: dict[str, int] = {key: sum(key in p for p in inactive) for key in known}
    good = [key for key in known if not wrong[key]]
    for choice in (good, known):
        for size in range(1, len(choice) + 1):
            covers = [c for c in combinations(choice, size) if all(p & set(c) for p in active)]
            if covers:
                best = min(covers, key=lambda c: sum(bool(p & set(c)) for p in inactive))
                return frozenset(best), choice is good
    raise AssertionError("every active pattern has a key, so all keys together meet each")


def _batch_keys_behind(calls: Iterable[Operation]) -> set[str]:
    """The batch keys that calls depend on, without the paths behind nested ones."""
    found: set[str] = set()
    seen: set[Operation] = set()
    stack = list(calls)
    while stack:
        op = stack.pop()
        if op in seen:
            continue
        seen.add(op)
        if isinstance(op, InputOp):
            found.add(op.key.data.partition("[")[0])
        stack.extend(o.owner for o in op.operands if isinstance(o.owner, Operation))
    return found


def _format_patterns(patterns: set[InputPattern]) -> str:
    return " or ".join(sorted("{" + ", ".join(sorted(p)) + "}" for p in patterns))
