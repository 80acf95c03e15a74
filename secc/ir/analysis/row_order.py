"""Which values have rows in another order than the samples: `cat([chosen, rejected])` has the first rows of
all samples before all second ones. An edge takes each sample's rows to be adjacent, so it cannot carry such
values.

A dim that is a single symbol of rows is in order: ops that move rows among samples are refused when the loss
is normalised. A block's results are taken to be in the order of its arguments.
"""

from __future__ import annotations

import sympy
from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation, OpResult, SSAValue

from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import CallOp, CaseOp, GlueOp, GraphOp, section_of
from secc.ir.dialect.tensor_type import TensorType, tensor_type

_JOINING_OPS = frozenset({"cat", "repeat"})
_RESHAPING_OPS = frozenset({"view", "reshape", "_unsafe_view", "flatten"})
_UNSTACKING_ATTRIBUTE = "apart"  # attribute of the reshapes that `insert_unstacking` inserts


class RowOrder:
    """Finds the values of a case with rows out of order: `out_of_order`."""

    def __init__(self, graph: GraphOp, case: CaseOp) -> None:
        self._rows = {name for name, s in graph.symbols.items() if s.kind.data == "rows"}
        self.out_of_order: set[SSAValue] = set()
        for op in case.ops:
            inherits = any(o in self.out_of_order for o in op.operands)
            for result in (
                op.results
                if inherits or (isinstance(op, GlueOp) and op.base_name in _JOINING_OPS | _RESHAPING_OPS)
                else ()
            ):
                if self._composite_row_dim(tensor_type(result)) is not None and (
                    inherits or self._mixes_rows(op, tensor_type(result))
                ):
                    self.out_of_order.add(result)

    def _composite_row_dim(self, kind: TensorType) -> int | None:
        """The dim that counts rows, where it is not just a symbol of rows; None if there is none."""
        found = [i for i, d in enumerate(kind.shape) if size_expr.symbol_names(d) & self._rows]
        return next((i for i in found if not isinstance(kind.shape[i], sympy.Symbol)), None)

    def _mixes_rows(self, op: Operation, result: TensorType) -> bool:
        """Whether an op puts rows out of order."""
        assert isinstance(op, GlueOp)
        dim, inner = self._composite_row_dim(result), [tensor_type(o) for o in op.operands]
        if op.base_name == "cat":
            along = op.arguments.get(1, "dim", 0) % len(result.dims)
            return (
                along == dim
                and sum(
                    bool(size_expr.symbol_names(t.shape[along]) & self._rows)
                    for t in inner
                    if len(t.dims) > along
                )
                > 1
            )
        if op.base_name == "repeat":
            before = list(inner[0].shape)[::-1][len(result.dims) - 1 - (dim or 0) :][:1]
            return (
                bool(before)
                and bool(size_expr.symbol_names(before[0]) & self._rows)
                and before[0] != result.shape[dim or 0]
            )
        return op.base_name in _RESHAPING_OPS and self._entries_before_rows(inner[0]) not in (
            None,
            self._entries_before_rows(result),
        )

    def _entries_before_rows(self, kind: TensorType) -> sympy.Expr | None:
        """The product of the dims in front of the rows, None where no dim counts rows."""
        dim = next((i for i, d in enumerate(kind.shape) if size_expr.symbol_names(d) & self._rows), None)
        return None if dim is None else sympy.expand(sympy.Mul(*kind.shape[:dim]))


def insert_unstacking(graph: GraphOp) -> None:
    """After each block's result of `k*B` rows that are out of order, reshapes it to `[k, B, ...]` and back:
    an edge can carry the tensor in between.

    `remove_unstacking` removes the pairs that no boundary came between.
    """
    for case in graph.cases:
        order = RowOrder(graph, case)
        for op in [op for op in case.ops if isinstance(op, CallOp)]:
            for result in op.results:
                if (
                    result in order.out_of_order
                    and (times := _stack_factor(tensor_type(result))) is not None
                    and result.uses
                ):
                    _reshape_and_back(op, result, times)


def _stack_factor(kind: TensorType) -> int | None:
    """k of a tensor `[k*B, ...]`."""
    if not kind.shape:
        return None
    times, rows = kind.shape[0].as_coeff_Mul()
    return int(times) if isinstance(rows, sympy.Symbol) and times.is_Integer and times > 1 else None


def _reshape_and_back(op: CallOp, result: OpResult, times: int) -> None:
    kind = tensor_type(result)
    rows = kind.shape[0] / times
    apart = _make_reshape(
        op,
        result,
        TensorType.from_dims(
            [sympy.Integer(times), rows, *kind.shape[1:]], kind.dtype.data, kind.requires_grad
        ),
    )
    back = _make_reshape(op, apart.results[0], kind)
    block = op.parent_block()
    assert block is not None
    block.insert_ops_after([apart, back], op)
    result.replace_uses_with_if(back.results[0], lambda use: use.operation is not apart)


def _make_reshape(op: CallOp, value: SSAValue, kind: TensorType) -> GlueOp:
    sizes = ", ".join(size_expr.format_expr(d) for d in kind.shape)
    made = GlueOp.create_call(
        "aten.reshape.default",
        [value],
        f"$0, [{sizes}]",
        [kind],
        no_grad=op.no_grad,
        where=op.properties.get("where"),
    )
    made.attributes[_UNSTACKING_ATTRIBUTE] = StringAttr("")
    assert isinstance(made, GlueOp)
    return made


def remove_unstacking(graph: GraphOp) -> None:
    """Removes the reshapes of `insert_unstacking` where the section that computes a result uses it itself."""
    for case in graph.cases:
        for back in [
            op for op in case.ops if isinstance(op, GlueOp) and _UNSTACKING_ATTRIBUTE in op.attributes
        ]:
            apart = back.operands[0].owner
            if (
                isinstance(apart, GlueOp)
                and _UNSTACKING_ATTRIBUTE in apart.attributes
                and section_of(apart) == section_of(back)
            ):
                back.results[0].replace_all_uses_with(apart.operands[0])
                back.parent_block().erase_op(back)  # pyright: ignore[reportOptionalMemberAccess]
    for case in graph.cases:
        for op in [
            op for op in case.ops if isinstance(op, GlueOp) and _UNSTACKING_ATTRIBUTE in op.attributes
        ]:
            if not op.results[0].uses:
                op.parent_block().erase_op(op)  # pyright: ignore[reportOptionalMemberAccess]
            else:
                del op.attributes[_UNSTACKING_ATTRIBUTE]
