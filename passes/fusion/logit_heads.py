"""Linear heads: calls of `nn.Linear` blocks, and products by which glue computes logits from a weight (a tied
embedding's, mostly)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy
from xdsl.ir import SSAValue

from secc.ir.dialect.argument_template import Ref
from secc.ir.dialect.ops import CallOp, Computation, GlueOp, GraphOp, strings
from secc.ir.dialect.tensor_type import TensorType, tensor
from secc.passes.fusion.formula import ENTRIES, Formula, Head, Logits, Parameter, Plain, Source

WEIGHT, BIAS = (
    "weight",
    "bias",
)  # attributes of a block that is a plain nn.Linear: the types of its parameters


def head(graph: GraphOp, op: Computation) -> Head | None:
    """The head that an op is, if it is one."""
    if isinstance(op, CallOp):
        return _block(graph, op)
    return _product(op) if op.base in {"mm", "addmm", "linear"} else None


def logits(head: Head, fixed: bool) -> Logits:
    return Logits(head, head.tokens, fixed=fixed)


def _block(graph: GraphOp, op: CallOp) -> Head | None:
    path = op.target.data
    weight = graph.blocks[path].attributes.get(WEIGHT)
    if not isinstance(weight, TensorType) or op.args.data != "$0" or strings(op.outs) != ("",):
        return None
    tokens, width = (int(d) for d in weight.shape)
    bias = Parameter(f"{path}.{BIAS}") if BIAS in graph.blocks[path].attributes else None
    return Head(op.results[0], op.operands[0], Parameter(f"{path}.{WEIGHT}"), bias, tokens, width)


def _product(op: Computation) -> Head | None:
    """`mm(hidden, weight.t())`, `addmm(bias, hidden, weight.t())` and `linear(hidden, weight, bias)`."""
    refs = op.arguments.args
    if not all(isinstance(r, Ref) for r in refs) or op.arguments.kwargs:
        return None
    values = [op.operands[r.index] for r in refs]
    if op.base == "linear":
        hidden, weight, bias = values[0], values[1], values[2] if len(values) > 2 else None
        straight = True
    else:
        hidden, product = values[-2:]
        bias = values[0] if op.base == "addmm" else None
        weight, straight = _untransposed(product)
    dims = tensor(weight).shape
    if (
        len(dims) != 2
        or not all(d.is_Integer for d in dims)
        or (bias is not None and tensor(bias).shape != (dims[not straight],))
    ):
        return None
    tokens, width = (int(d) for d in (dims if straight else dims[::-1]))
    return Head(op.results[0], hidden, weight, bias, tokens, width, not straight)


def _untransposed(value: SSAValue) -> tuple[SSAValue, bool]:
    """([V, H], True) where a value is the transpose of that, else ([H, V], False)."""
    owner = value.owner
    swaps = isinstance(owner, GlueOp) and (
        owner.base in {"t", "numpy_T"}
        or owner.args.data in {"$0, 0, 1", "$0, 1, 0", "$0, -1, -2", "$0, -2, -1", "$0, [1, 0]"}
    )
    if isinstance(owner, GlueOp) and swaps and owner.base in {"t", "numpy_T", "transpose", "permute"}:
        return owner.operands[0], True
    return value, False


def adds_bias(op: Computation, formula: Formula | None) -> bool:
    """Whether an op adds a bias to plain logits."""
    plain = formula.single() if formula is not None and formula.kind == ENTRIES else None
    if not isinstance(plain, Plain) or op.base != "add" or len(op.operands) != 2 or op.arguments.kwargs:
        return False
    untouched = (
        plain.of.scale == 1
        and not plain.of.softcap
        and plain.of.head.bias is None
        and plain.of.tokens == plain.of.head.tokens
    )
    last = formula is not None and formula.axis == len(tensor(op.operands[0]).dims) - 1
    return untouched and last and tensor(op.operands[1]).shape == (sympy.Integer(plain.of.tokens),)


def with_bias(op: Computation, formula: Formula) -> Formula:
    """The logits with the bias that an op adds."""

    def change(value: Any) -> Any:
        return (
            value
            if isinstance(value, Source)
            else replace(value, head=replace(value.head, bias=op.operands[1]))
        )

    return formula.mapped(change)
