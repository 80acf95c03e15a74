"""`canonicalize`: small rewrites of glue that change no value and no gradient, and one op where equal ops
stand.

The rules are a table, each a pattern beside its replacement: a condition on an op, and the value that takes
the place of its result. A value keeps its gradient or its lack of one: an op whose result carries another
type than the replacement is left alone, so `detach` of something trainable stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from secc.ir.analysis.dataflow import is_random
from secc.ir.dialect.ops import CaseOp, ConstOp, GlueOp, GuardOp, InputOp, ParamOp, graph_of
from secc.ir.dialect.tensor_type import tensor

_VIEWS = ("view", "_unsafe_view", "reshape")
_OPPOSITE = {"eq": "ne", "ne": "eq"}
_SWAPS = ("transpose", "t", "permute", "numpy_T")


def _first(op: GlueOp) -> SSAValue | None:
    return op.operands[0] if op.operands else None


def _of_first(op: GlueOp) -> GlueOp | None:
    """The glue op that makes operand 0, run in the same grad mode and section."""
    owner = op.operands[0].owner if op.operands else None
    if not isinstance(owner, GlueOp):
        return None
    same = all(owner.properties.get(k) == op.properties.get(k) for k in ("no_grad", "section"))
    return owner if same else None


def _number(op: GlueOp) -> object:
    """The second argument of an op on one tensor."""
    arguments = op.arguments
    return (
        arguments.args[1]
        if len(op.operands) == 1 and len(arguments.args) == 2 and not arguments.kwargs
        else None
    )


def _permutation(op: GlueOp) -> list[int] | None:
    """Where each dim of the result comes from, for ops that swap dims."""
    rank = len(tensor(op.operands[0]).dims)
    dims, rest = list(range(rank)), op.arguments.args[1:]
    match op.base:
        case "t" | "numpy_T":
            return dims[::-1]
        case "transpose" if len(rest) == 2 and rank:
            a, b = (cast(int, d) % rank for d in rest)
            dims[a], dims[b] = dims[b], dims[a]
            return dims
        case "permute" if len(rest) == 1 and isinstance(rest[0], list):
            return [cast(int, d) % rank for d in rest[0]]
        case _:
            return None


def _swapped_back(op: GlueOp) -> SSAValue | None:
    """What a swap that undoes the swap before it gives."""
    inner = _of_first(op)
    if inner is None or inner.base not in _SWAPS:
        return None
    now, before = _permutation(op), _permutation(inner)
    same = now is not None and before is not None and [before[d] for d in now] == list(range(len(now)))
    return inner.operands[0] if same else None


def _view_of_view(op: GlueOp) -> SSAValue | None:
    """A view of a view, as a view of the first tensor."""
    inner = _of_first(op)
    if inner is None or inner.base != op.base:
        return None
    return _made_before(
        op,
        GlueOp.create(
            operands=[inner.operands[0]], result_types=[tensor(op.results[0])], properties=dict(op.properties)
        ),
    )


def _other_comparison(op: GlueOp) -> SSAValue | None:
    """`not (a == b)` as `a != b`, and the other way round."""
    inner = _of_first(op)
    if inner is None or inner.base not in _OPPOSITE:
        return None
    target = StringAttr(inner.target.data.replace(f".{inner.base}.", f".{_OPPOSITE[inner.base]}."))
    properties = dict(inner.properties) | {"target": target}
    return _made_before(
        op,
        GlueOp.create(
            operands=list(inner.operands), result_types=[tensor(op.results[0])], properties=properties
        ),
    )


def _made_before(op: GlueOp, new: GlueOp) -> SSAValue:
    block = op.parent_block()
    assert block is not None
    block.insert_op_before(new, op)
    return new.results[0]


@dataclass(frozen=True)
class Rule:
    """For ops of these base names: where `when` holds, `value` takes the place of the result."""

    ops: tuple[str, ...]
    when: Callable[[GlueOp], bool]
    value: Callable[[GlueOp], SSAValue | None]


def _always(op: GlueOp) -> bool:
    return True


RULES = (
    Rule(
        ("_to_copy", "to"), lambda op: "memory_format" not in op.arguments.kwargs, _first
    ),  # a cast to the dtype that it has
    Rule(
        (*_VIEWS, "expand", "squeeze", "alias", "lift_fresh", "lift_fresh_copy", "positive"), _always, _first
    ),
    Rule(("detach",), _always, _first),  # of what carries no gradient: else the types differ
    Rule(("slice",), lambda op: len(op.arguments.args) < 5, _first),  # all of a dim: else the shapes differ
    Rule(("add", "sub"), lambda op: _number(op) == 0, _first),
    Rule(("mul", "div"), lambda op: _number(op) == 1, _first),
    Rule(_SWAPS, _always, _swapped_back),
    Rule(
        ("neg",),
        _always,
        lambda op: (
            inner.operands[0] if (inner := _of_first(op)) is not None and inner.base == "neg" else None
        ),
    ),
    Rule(_VIEWS, _always, _view_of_view),
    Rule(("bitwise_not", "logical_not"), _always, _other_comparison),
)


@dataclass(frozen=True)
class Canonicalize(ModulePass):
    name = "canonicalize"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for case in graph_of(op).cases:
            _simplify(case)
            _share(case)


def _simplify(case: CaseOp) -> None:
    for op in case.ops:
        while isinstance(op, GlueOp) and len(op.results) == 1 and op.parent is not None:
            new = _replacement(op)
            if new is None:
                break
            _replace(op, [new])
            op = new.owner


def _replacement(op: GlueOp) -> SSAValue | None:
    """The value that the first rule which fits gives."""
    for rule in RULES:
        if op.base in rule.ops and rule.when(op):
            value = rule.value(op)
            if value is not None and value.type == op.results[0].type:
                return value
    return None


def _share(case: CaseOp) -> None:
    """One op in the place of ops that compute the same from the same values, in the same grad mode and
    section."""
    seen: dict[tuple[object, ...], Operation] = {}
    for op in case.ops:
        if not isinstance(op, GlueOp | GuardOp | InputOp | ParamOp | ConstOp) or is_random(op):
            continue
        kept = tuple(sorted((k, str(v)) for k, v in op.properties.items() if k != "where"))
        key = (op.name, kept, tuple(op.operands), tuple(op.result_types))
        first = seen.setdefault(key, op)
        if first is not op:
            _replace(op, list(first.results))


def _replace(op: Operation, values: list[SSAValue]) -> None:
    for result, value in zip(op.results, values, strict=True):
        result.replace_all_uses_with(value)
    op.detach()
    op.erase()
