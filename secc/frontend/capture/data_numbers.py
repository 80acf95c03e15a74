"""Turns numbers in the glue that values of the inputs decide into tensors: the rows that a mask selects,
or what Python read with `item()`.

As a number, it would be that of one micro-batch; but a loss divided by it needs that of the whole global
batch. So the number is replaced by the tensor it came from, and passes see how the inputs make it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import sympy
import torch
from torch import fx

from secc.ir.dialect.size_expr import Expr, symbol_names

aten = torch.ops.aten
_TENSOR_OR_NUMBER_OPS = (
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.add.Tensor,
    aten.sub.Tensor,
)  # what takes a number or a tensor as its second argument
# What makes a filled tensor -> the places of its sizes and of its value, or the value, in the arguments.
_FILLED_OPS = {
    aten.zeros.default: (0, None, 0),
    aten.ones.default: (0, None, 1),
    aten.full.default: (0, 1, None),
    aten.new_zeros.default: (1, None, 0),
    aten.new_ones.default: (1, None, 1),
    aten.new_full.default: (1, 2, None),
}


@dataclass(frozen=True)
class NumberSource:
    """Where a symbol's number comes from: the size of `dim` of the node's tensor, or the tensor's own
    value if `dim` is None."""

    node: fx.Node
    dim: int | None


class DataNumbers:
    """The symbols that values of the inputs decide, by name, with their sources."""

    def __init__(self) -> None:
        self.sources: dict[str, NumberSource] = {}

    def accepts_tensor(self, node: fx.Node, args: Sequence[Any]) -> bool:
        """Whether a tensor can stand for such a symbol in an op's arguments."""
        return self._find_filled_rows(node, args) is not None or (
            node.target in _TENSOR_OR_NUMBER_OPS
            and not node.kwargs
            and not _uses_sources(self, args[0])
            and not any(_uses_sources(self, a) for a in args[2:])
        )

    def _find_filled_rows(self, node: fx.Node, args: Sequence[Any]) -> tuple[NumberSource, Any] | None:
        """Returns the source of the number of entries of a filled 1-D tensor, and its value, such as class 0
        for all rows that a mask selects. None for other ops, and for a number that is no count of rows."""
        if (places := _FILLED_OPS.get(cast(Any, node.target))) is None:
            return None
        sizes_at, value_at, value = places
        sizes = args[sizes_at]
        source = self.sources.get(str(sizes[0])) if len(sizes) == 1 else None
        if source is None or source.dim is None:
            return None
        return source, value if value_at is None else args[value_at]

    def replace_number(self, node: fx.Node) -> None:
        """Replaces the number in a node's arguments by a tensor, if values of the inputs decide it."""
        args: Any = node.meta.get("args", ())
        if args and (filled := self._find_filled_rows(node, args)) is not None:
            source, value = filled
            with node.graph.inserting_before(node):
                rows = _ExpressionEmitter(node, self.sources).emit_rows(source)
            node.target, node.args = aten.full_like.default, (rows, value)
            node.kwargs = {"dtype": node.meta["dtype"]}
            node.meta |= {"args": node.args, "kwargs": node.kwargs}
            return
        if node.target not in _TENSOR_OR_NUMBER_OPS or len(args) < 2 or not _uses_sources(self, args[1]):
            return
        with node.graph.inserting_before(node):
            made = _ExpressionEmitter(node, self.sources).emit(args[1])
        node.meta["args"] = (args[0], made, *args[2:])
        node.args = (node.args[0], made, *node.args[2:])


def _uses_sources(counts: DataNumbers, value: Any) -> bool:
    return isinstance(value, sympy.Expr) and bool(symbol_names(value) & counts.sources.keys())


class _ExpressionEmitter:
    """Emits nodes that compute an expression, before the node that uses it."""

    def __init__(self, user: fx.Node, sources: dict[str, NumberSource]) -> None:
        self._user, self._sources = user, sources

    def emit(self, expr: Expr) -> fx.Node:
        """Returns the node of an expression in which some symbol has a source."""
        if isinstance(expr, sympy.Symbol):
            return self._emit_source(self._sources[str(expr)])
        if isinstance(expr, sympy.Max):
            parts = [cast(Expr, part) for part in expr.args]
            (moving,), (least,) = (
                [p for p in parts if self._has_source(p) == moves] for moves in (True, False)
            )
            inner = self.emit(moving)
            return self._add_node(aten.clamp_min.default, (inner, least), inner.meta["dtype"])
        if isinstance(expr, sympy.Add):
            return self._emit_chain(aten.add.Tensor, expr.args)
        above, below = sympy.fraction(expr)
        if below == 1:
            factors = [base for f in sympy.Mul.make_args(expr) for base in _expand_power(f)]
            return self._emit_chain(aten.mul.Tensor, factors)
        if not self._has_source(below):
            return self._add_node(aten.div.Tensor, (self.emit(above), below), torch.float32)
        bottom = self.emit(below)
        if self._has_source(above):
            return self._add_node(aten.div.Tensor, (self.emit(above), bottom), torch.float32)
        return self._add_node(
            aten.mul.Tensor,
            (self._add_node(aten.reciprocal.default, (bottom,), torch.float32), above),
            torch.float32,
        )

    def _emit_chain(self, target: Any, parts: Sequence[Expr]) -> fx.Node:
        """Emits the sum or product of parts, tensors first."""
        moving = [self.emit(p) for p in parts if self._has_source(p)]
        found = moving[0]
        for other in [*moving[1:], *(p for p in parts if not self._has_source(p))]:
            whole = found.meta["dtype"] is torch.int64 and (
                isinstance(other, fx.Node) or bool(other.is_integer)
            )
            found = self._add_node(target, (found, other), torch.int64 if whole else torch.float32)
        return found

    def _has_source(self, expr: Expr) -> bool:
        return bool(symbol_names(expr) & self._sources.keys())

    def _emit_source(self, source: NumberSource) -> fx.Node:
        """Emits a symbol's number as a 0-dim tensor."""
        node = source.node
        if source.dim is None:
            return (
                node
                if not node.meta["shape"]
                else self._add_node(aten.reshape.default, (node, []), node.meta["dtype"])
            )
        if (mask := _find_mask(node)) is not None:
            return self._add_node(aten.sum.default, (mask,), torch.int64)
        line = self.emit_rows(source)
        kwargs = {"dtype": torch.int64}
        ones = self._add_node(aten.ones_like.default, (line,), torch.int64, line.meta["shape"], kwargs)
        return self._add_node(aten.sum.default, (ones,), torch.int64)

    def emit_rows(self, source: NumberSource) -> fx.Node:
        """Emits a tensor with one entry for each row that a symbol counts: of the mask that selects them, so
        that nothing else decides their number."""
        line, shape = source.node, list(source.node.meta["shape"])
        if (mask := _find_mask(line)) is not None:
            rows = (shape[cast(int, source.dim)],)
            return self._add_node(aten.index.Tensor, (mask, [mask]), torch.bool, rows)
        for dim in reversed([d for d in range(len(shape)) if d != source.dim]):
            del shape[dim]
            line = self._add_node(aten.select.int, (line, dim, 0), line.meta["dtype"], tuple(shape))
        return line

    def _add_node(
        self, target: Any, args: tuple[Any, ...], dtype: torch.dtype, shape: Any = (), kwargs: Any = None
    ) -> fx.Node:
        node = self._user.graph.call_function(target, tuple(a for a in args), kwargs or {})
        place = {key: self._user.meta[key] for key in ("where", "module")}
        node.meta = place | {
            "grad": False,
            "autocast": "",
            "requires_grad": False,
            "shape": shape,
            "dtype": dtype,
        }
        node.meta |= {"args": args, "kwargs": kwargs or {}}
        return node


def _find_mask(node: fx.Node) -> fx.Node | None:
    """Returns the mask that selects the rows of an indexing's result; None without one."""
    if node.target is aten.masked_select.default:
        x: Any = node.args[0]
        mask: Any = node.args[1]
        return mask if x.meta["shape"] == mask.meta["shape"] else None
    indices: Any = node.args[1] if node.target is aten.index.Tensor else ()
    masks = [i for i in indices if isinstance(i, fx.Node) and i.meta["dtype"] is torch.bool]
    return masks[0] if len(masks) == 1 else None


def _expand_power(factor: Expr) -> list[Expr]:
    """Returns a factor repeated as often as its power says."""
    base, power = factor.as_base_exp()
    return [base] * int(power) if power.is_Integer and power > 0 else [factor]
