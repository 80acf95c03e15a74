"""`canonicalize`: small rewrites of glue that change no value beyond rounding and no gradient, then common
subexpression elimination.

Rules are a table: a condition on an op, and the value that replaces its result. A replacement needs the
result's type, gradient included, so `detach` of something trainable stays.

xDSL's `cse` does not serve: it compares all properties, so equal ops on different lines of the user's code
would stay, and it merges all ops with the trait `Pure`, which glue that draws random numbers has, too. Its
pattern rewriter applies rules to a fixed point in an order of its own; here one pass in the order of the case
is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from secc.ir.analysis.dataflow import is_random_op
from secc.ir.analysis.shared_memory import reaches_block
from secc.ir.dialect import size_expr
from secc.ir.dialect.argument_template import OperandRef
from secc.ir.dialect.ops import (
    CaseOp,
    Computation,
    ConstOp,
    GlueOp,
    GraphOp,
    GuardOp,
    InputOp,
    ParamOp,
    graph_of,
)
from secc.ir.dialect.readable_names import WRITTEN_ATTRIBUTE
from secc.ir.dialect.tensor_type import tensor_type

_VIEW_OPS = ("view", "_unsafe_view", "reshape")
_OPPOSITE_COMPARISON = {"eq": "ne", "ne": "eq"}
_NORMS = {"aten.linalg_vector_norm.default": "ord", "aten.norm.ScalarOpt_dim": "p"}  # and their order's name
_FILLED_LIKE_OPS = tuple(
    name for kind in ("empty", "zeros", "ones", "full") for name in (f"{kind}_like", f"new_{kind}")
)
_DIM_SWAPS = ("transpose", "t", "permute", "numpy_T")


def _first_operand(op: GlueOp) -> SSAValue | None:
    return op.operands[0] if op.operands else None


def _producer_of_first(op: GlueOp) -> GlueOp | None:
    """The glue op that makes operand 0, run in the same grad mode and section."""
    owner = op.operands[0].owner if op.operands else None
    if not isinstance(owner, GlueOp):
        return None
    same = all(owner.properties.get(k) == op.properties.get(k) for k in ("no_grad", "section"))
    return owner if same else None


def _scalar_argument(op: GlueOp) -> object:
    """The second argument of an op on one tensor."""
    arguments = op.arguments
    return (
        arguments.args[1]
        if len(op.operands) == 1 and len(arguments.args) == 2 and not arguments.kwargs
        else None
    )


def _permutation(op: GlueOp) -> list[int] | None:
    """The operand's dim of each dim of the result, for ops that permute dims; None for any other."""
    rank = len(tensor_type(op.operands[0]).dims)
    dims, rest = list(range(rank)), op.arguments.args[1:]
    match op.base_name:
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


def _cancel_swap(op: GlueOp) -> SSAValue | None:
    """The value before two permutations that cancel each other."""
    inner = _producer_of_first(op)
    if inner is None or inner.base_name not in _DIM_SWAPS:
        return None
    now, before = _permutation(op), _permutation(inner)
    same = now is not None and before is not None and [before[d] for d in now] == list(range(len(now)))
    return inner.operands[0] if same else None


def _before_expand(op: GlueOp) -> SSAValue | None:
    """The tensor that an expand repeats, if `op` selects from the expand's result; else None."""
    inner = _producer_of_first(op)
    return inner.operands[0] if inner is not None and inner.base_name == "expand" else None


def _merge_views(op: GlueOp) -> SSAValue | None:
    """A view of a view, as a view of the first tensor."""
    inner = _producer_of_first(op)
    if inner is None or inner.base_name != op.base_name:
        return None
    return _insert_before(
        op,
        GlueOp.create(
            operands=[inner.operands[0]],
            result_types=[tensor_type(op.results[0])],
            properties=dict(op.properties),
        ),
    )


def _negate_comparison(op: GlueOp) -> SSAValue | None:
    """`not (a == b)` as `a != b`, and the other way round."""
    inner = _producer_of_first(op)
    if inner is None or inner.base_name not in _OPPOSITE_COMPARISON:
        return None
    target = StringAttr(
        inner.target.data.replace(f".{inner.base_name}.", f".{_OPPOSITE_COMPARISON[inner.base_name]}.")
    )
    properties = dict(inner.properties) | {"target": target}
    return _insert_before(
        op,
        GlueOp.create(
            operands=list(inner.operands), result_types=[tensor_type(op.results[0])], properties=properties
        ),
    )


def _norm_of_difference(op: GlueOp) -> SSAValue | None:
    """`torch.dist` of two tensors of one shape and dtype as the norm of their difference."""
    types = [tensor_type(o) for o in op.operands]
    if op.arguments.args[:2] != [OperandRef(0), OperandRef(1)] or len({(t.dims, t.dtype) for t in types}) > 1:
        return None
    place = {k: v for k, v in op.properties.items() if k not in ("target", "args")}
    type, order = max(types, key=lambda t: t.requires_grad), op.arguments.get(2, "p", 2)
    difference = GlueOp.create_call("aten.sub.Tensor", list(op.operands), "$0, $1", [type])
    difference.properties |= place
    norm = GlueOp.create_call(
        "aten.linalg_vector_norm.default",
        [_insert_before(op, difference)],
        f"$0, {order}",
        [tensor_type(op.results[0])],
    )
    norm.properties |= place
    return _insert_before(op, norm)


def _square_of_norm(op: GlueOp) -> SSAValue | None:
    """The square of a Euclidean norm as a sum of squares, which adds up over samples."""
    inner = _producer_of_first(op)
    if inner is None or inner.target.data not in _NORMS or len(op.operands) != 1:
        return None
    given, (x,) = inner.arguments, inner.operands
    squared = _scalar_argument(op) == 2 if op.base_name == "pow" else _is_product_with_itself(op)
    real = tensor_type(x).dtype.data in ("f16", "bf16", "f32", "f64")
    if (
        not squared
        or not real
        or given.get(1, _NORMS[inner.target.data], 2) != 2
        or given.get(4, "dtype") is not None
    ):
        return None
    dims, kept = given.get(2, "dim"), given.get(3, "keepdim", False)
    place = {k: v for k, v in op.properties.items() if k not in ("target", "args")}
    square = GlueOp.create_call("aten.mul.Tensor", [x], "$0, $0", [tensor_type(x)])
    square.properties |= place
    target, args = "aten.sum.default", "$0"
    if dims is not None:
        target, args = "aten.sum.dim_IntList", f"$0, {dims}, {kept}"
    total = GlueOp.create_call(target, [_insert_before(op, square)], args, [tensor_type(op.results[0])])
    total.properties |= place
    return _insert_before(op, total)


def _draw_of_size(op: GlueOp) -> SSAValue | None:
    """Random numbers in the size of a tensor as numbers of that size: they do not depend on the tensor's
    values, so a mask made of them may count what the loss is divided by."""
    return _make_of_size(op, op.base_name.removesuffix("_like"))


def _fill_of_size(op: GlueOp) -> SSAValue | None:
    """What takes the size of a tensor and is filled by random ops only, as a tensor of that size."""
    if not all(is_random_op(use.operation) for use in op.results[0].uses):
        return None
    name = op.base_name.removeprefix("new_").removesuffix("_like")
    value = op.arguments.args[-1] if name == "full" else int(name == "ones")
    return _make_of_size(op, "full", value) if isinstance(value, (int, float)) else None


def _make_of_size(op: GlueOp, name: str, *values: float) -> SSAValue | None:
    """A tensor like the result of `op`, made by a factory; None if values of inputs decide its size."""
    kind, case = tensor_type(op.results[0]), op.parent_op()
    assert isinstance(case, CaseOp)
    graph = case.parent_op()
    assert isinstance(graph, GraphOp)
    decided_by_values = {name for name, symbol in graph.symbols.items() if symbol.kind.data == "data"}
    if any(size_expr.symbol_names(size) & decided_by_values for size in kind.shape):
        return None
    sizes = f"[{', '.join(map(size_expr.format_expr, kind.shape))}]"
    given = ", ".join((sizes, *map(str, values), f"dtype=torch.{kind.torch_dtype}"))
    made = GlueOp.create_call(f"aten.{name}.default", [], f"{given}, device=device, pin_memory=False", [kind])
    made.properties |= {k: v for k, v in op.properties.items() if k not in ("target", "args")}
    made.attributes |= op.attributes
    return _insert_before(op, made)


def _is_product_with_itself(op: GlueOp) -> bool:
    return op.arguments.args == [OperandRef(0), OperandRef(0)] and not op.arguments.kwargs


def _insert_before(op: GlueOp, new: Computation) -> SSAValue:
    block = op.parent_block()
    assert block is not None
    block.insert_op_before(new, op)
    return new.results[0]


@dataclass(frozen=True)
class RewriteRule:
    """For ops with one of the base names `ops`: where `when` holds, `value` replaces the result."""

    ops: tuple[str, ...]
    when: Callable[[GlueOp], bool]
    value: Callable[[GlueOp], SSAValue | None]


def _is_any_op(op: GlueOp) -> bool:
    return True


def _is_needed_copy(op: GlueOp) -> bool:
    """Whether an op that only copies its operand keeps two tensors apart, one of which a block may write into
    or read by its strides."""
    return any(reaches_block(value) for value in (*op.operands, *op.results))


REWRITE_RULES = (
    RewriteRule(
        ("_to_copy", "to"),
        lambda op: "memory_format" not in op.arguments.kwargs and not _is_needed_copy(op),
        _first_operand,
    ),  # a cast to the dtype that it has
    RewriteRule(
        (*_VIEW_OPS, "expand", "squeeze", "alias", "lift_fresh", "lift_fresh_copy", "positive"),
        _is_any_op,
        _first_operand,
    ),
    RewriteRule(
        ("detach",), _is_any_op, _first_operand
    ),  # of what carries no gradient: else the types differ
    RewriteRule(
        ("slice",), lambda op: len(op.arguments.args) < 5, _first_operand
    ),  # all of a dim: else the shapes differ
    RewriteRule(("slice",), lambda op: len(op.arguments.args) < 5, _before_expand),  # one of equal rows
    RewriteRule(
        ("add", "sub"), lambda op: _scalar_argument(op) == 0 and not _is_needed_copy(op), _first_operand
    ),
    RewriteRule(
        ("mul", "div"), lambda op: _scalar_argument(op) == 1 and not _is_needed_copy(op), _first_operand
    ),
    RewriteRule(_DIM_SWAPS, _is_any_op, _cancel_swap),
    RewriteRule(
        ("neg",),
        _is_any_op,
        lambda op: (
            inner.operands[0]
            if (inner := _producer_of_first(op)) is not None and inner.base_name == "neg"
            else None
        ),
    ),
    RewriteRule(_VIEW_OPS, _is_any_op, _merge_views),
    RewriteRule(("bitwise_not", "logical_not"), _is_any_op, _negate_comparison),
    RewriteRule(("rand_like", "randn_like"), _is_any_op, _draw_of_size),
    RewriteRule(_FILLED_LIKE_OPS, _is_any_op, _fill_of_size),
    RewriteRule(("dist",), _is_any_op, _norm_of_difference),
    RewriteRule(("pow", "mul"), _is_any_op, _square_of_norm),
)


@dataclass(frozen=True)
class Canonicalize(ModulePass):
    name = "canonicalize"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for case in graph_of(op).cases:
            _apply_rules(case)
            _share_equal_ops(case)


def _apply_rules(case: CaseOp) -> None:
    for op in case.ops:
        while isinstance(op, GlueOp) and len(op.results) == 1 and op.parent is not None:
            new = _find_replacement(op)
            if new is None:
                break
            _replace_op(op, [new])
            op = new.owner


def _find_replacement(op: GlueOp) -> SSAValue | None:
    """The value that the first rule which fits gives."""
    for rule in REWRITE_RULES:
        if op.base_name in rule.ops and rule.when(op):
            value = rule.value(op)
            if value is not None and value.type == op.results[0].type:
                return value
    return None


def _share_equal_ops(case: CaseOp) -> None:
    """One op in the place of ops that compute the same from the same values, in the same grad mode and
    section. What a block writes to stays by itself."""
    seen: dict[tuple[object, ...], Operation] = {}
    for op in case.ops:
        if not isinstance(op, GlueOp | GuardOp | InputOp | ParamOp | ConstOp) or is_random_op(op):
            continue
        if WRITTEN_ATTRIBUTE in op.attributes:
            continue
        kept = tuple(sorted((k, str(v)) for k, v in op.properties.items() if k != "where"))
        key = (op.name, kept, tuple(op.operands), tuple(op.result_types))
        first = seen.setdefault(key, op)
        if first is not op:
            _replace_op(op, list(first.results))


def _replace_op(op: Operation, values: list[SSAValue]) -> None:
    for result, value in zip(op.results, values, strict=True):
        result.replace_all_uses_with(value)
    op.detach()
    op.erase()
