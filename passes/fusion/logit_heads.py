"""Linear heads: calls of `nn.Linear` blocks, and products that compute logits from a weight (usually a tied
embedding's)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy
from xdsl.ir import SSAValue

from secc.ir.dialect.argument_template import OperandRef
from secc.ir.dialect.ops import CallOp, Computation, GlueOp, GraphOp, strings_of
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.passes.fusion.formula import (
    KIND_ENTRIES,
    BlockParameter,
    Formula,
    HeadLogits,
    LinearHead,
    PlainLogit,
    RowSource,
)

WEIGHT_ATTRIBUTE, BIAS_ATTRIBUTE = (
    "weight",
    "bias",
)  # attributes of a block that is a plain nn.Linear: the types of its parameters


def find_head(graph: GraphOp, op: Computation) -> LinearHead | None:
    """The linear head that an op computes, None if it computes none."""
    if isinstance(op, CallOp):
        return _head_of_block(graph, op)
    return _head_of_product(op) if op.base_name in {"mm", "addmm", "linear"} else None


def head_logits(head: LinearHead, fixed: bool) -> HeadLogits:
    return HeadLogits(head, head.tokens, fixed=fixed)


def _head_of_block(graph: GraphOp, op: CallOp) -> LinearHead | None:
    path = op.target.data
    weight = graph.blocks[path].attributes.get(WEIGHT_ATTRIBUTE)
    if not isinstance(weight, TensorType) or op.args.data != "$0" or strings_of(op.outs) != ("",):
        return None
    tokens, width = (int(d) for d in weight.shape)
    bias = (
        BlockParameter(f"{path}.{BIAS_ATTRIBUTE}")
        if BIAS_ATTRIBUTE in graph.blocks[path].attributes
        else None
    )
    return LinearHead(
        op.results[0], op.operands[0], BlockParameter(f"{path}.{WEIGHT_ATTRIBUTE}"), bias, tokens, width
    )


def _head_of_product(op: Computation) -> LinearHead | None:
    """`mm(hidden, weight.t())`, `addmm(bias, hidden, weight.t())` and `linear(hidden, weight, bias)`."""
    refs = op.arguments.args
    if not all(isinstance(r, OperandRef) for r in refs) or op.arguments.kwargs:
        return None
    values = [op.operands[r.index] for r in refs]
    if op.base_name == "linear":
        hidden, weight, bias = values[0], values[1], values[2] if len(values) > 2 else None
        straight = True
    else:
        hidden, product = values[-2:]
        bias = values[0] if op.base_name == "addmm" else None
        weight, straight = _strip_transpose(product)
    dims = tensor_type(weight).shape
    if (
        len(dims) != 2
        or not all(d.is_Integer for d in dims)
        or (bias is not None and tensor_type(bias).shape != (dims[not straight],))
    ):
        return None
    tokens, width = (int(d) for d in (dims if straight else dims[::-1]))
    return LinearHead(op.results[0], hidden, weight, bias, tokens, width, not straight)


def _strip_transpose(value: SSAValue) -> tuple[SSAValue, bool]:
    """([V, H], True) where a value is the transpose of that, else ([H, V], False)."""
    owner = value.owner
    swaps = isinstance(owner, GlueOp) and (
        owner.base_name in {"t", "numpy_T"}
        or owner.args.data in {"$0, 0, 1", "$0, 1, 0", "$0, -1, -2", "$0, -2, -1", "$0, [1, 0]"}
    )
    if isinstance(owner, GlueOp) and swaps and owner.base_name in {"t", "numpy_T", "transpose", "permute"}:
        return owner.operands[0], True
    return value, False


def adds_bias(op: Computation, formula: Formula | None) -> bool:
    """Whether an op adds a bias to plain logits."""
    plain = formula.single_factor() if formula is not None and formula.kind == KIND_ENTRIES else None
    if (
        not isinstance(plain, PlainLogit)
        or op.base_name != "add"
        or len(op.operands) != 2
        or op.arguments.kwargs
    ):
        return False
    untouched = (
        plain.of.scale == 1
        and not plain.of.softcap
        and plain.of.head.bias is None
        and plain.of.tokens == plain.of.head.tokens
    )
    last = formula is not None and formula.axis == len(tensor_type(op.operands[0]).dims) - 1
    return untouched and last and tensor_type(op.operands[1]).shape == (sympy.Integer(plain.of.tokens),)


def add_bias(op: Computation, formula: Formula) -> Formula:
    """The logits with the bias that an op adds."""

    def set_bias(value: Any) -> Any:
        return (
            value
            if isinstance(value, RowSource)
            else replace(value, head=replace(value.head, bias=op.operands[1]))
        )

    return formula.map_sources(set_bias)
