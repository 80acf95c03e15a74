"""`annotate-patterns`: finds the optional inputs that a sample needs for a block to run, from the cases that
call the block.

A predicate (`secc.runtime.plan.sample_predicates`) holds for the patterns of the cases that call the block,
and for the pattern of no other case. It lists single optional inputs, and a sample needs one of them; where
no such list does, it has terms such as `a&b` or `!a&!b`. For patterns without a case it may say either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation
from xdsl.passes import ModulePass

from secc.ir.dialect.ops import CallOp, InputOp, graph_of, strings_attr, strings_of
from secc.runtime.plan.sample_predicates import format_term, term_holds

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
            block.when = strings_attr(find_predicate(with_block, every - with_block, order))


def find_predicate(
    active: set[InputPattern], inactive: set[InputPattern], keys: Sequence[str]
) -> tuple[str, ...]:
    """A predicate that holds for every active pattern and for no inactive one: the smallest set of single
    inputs if there is one, else a short term for each active pattern; earlier keys are preferred."""
    if not active or not inactive:
        return ()
    good = [k for k in keys if any(k in p for p in active) and not any(k in p for p in inactive)]
    for size in range(1, len(good) + 1):
        if found := next((c for c in combinations(good, size) if all(p & set(c) for p in active)), None):
            return tuple(sorted(found))
    terms = list[str]()
    for pattern in sorted(active, key=sorted):
        if not any(term_holds(term, pattern) for term in terms):
            terms.append(_find_term(pattern, inactive, keys))
    return tuple(terms)


def _find_term(pattern: InputPattern, inactive: set[InputPattern], keys: Sequence[str]) -> str:
    """A term that holds for a pattern and for no inactive one. From the term that asks about all keys, each
    key is dropped in turn if the rest suffices: first those that the pattern lacks, later ones first."""
    kept = list(keys)
    for key in sorted(reversed(keys), key=lambda k: k in pattern):
        fewer = [k for k in kept if k != key]
        if all(any((k in p) != (k in pattern) for k in fewer) for p in inactive):
            kept = fewer
    return format_term([k for k in kept if k in pattern], [k for k in kept if k not in pattern])


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
