"""Reads torch.fx graphs as expressions: what is computed, whatever the ops are called and in whatever
dtype.

Equal expressions are one object. A cast is transparent: it has the expression of its input. An op that
`_READERS` does not know is a leaf. Each expression remembers the first node that computes it, before any
cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

Atom = float | str | None

_CAST_METHODS = frozenset({"to", "float", "half", "bfloat16", "double", "type_as", "type"})
_ELEMENTWISE_OPS = {
    "mul": "mul",
    "multiply": "mul",
    "add": "add",
    "sub": "sub",
    "subtract": "sub",
    "truediv": "div",
    "div": "div",
    "neg": "neg",
    "pow": "pow",
    "square": "square",
    "sqrt": "sqrt",
    "rsqrt": "rsqrt",
    "tanh": "tanh",
    "erf": "erf",
    "sigmoid": "sigmoid",
    "silu": "silu",
}
COMMUTATIVE_OPS = frozenset({"mul", "add"})


@dataclass(eq=False)
class GraphExpr:
    """An operation on expressions and atoms; `node` computes it. Leaves are the operations "node" and
    "parameter"."""

    op: str
    args: tuple[GraphExpr | Atom, ...]
    node: fx.Node

    def walk_expressions(self) -> Iterator[GraphExpr]:
        """Yields this expression and all expressions inside it; shared ones each time."""
        yield self
        for arg in self.args:
            if isinstance(arg, GraphExpr):
                yield from arg.walk_expressions()


@dataclass
class GraphAlgebra:
    """The expressions of one graph. `canonicalize` replaces a new expression by its canonical spelling."""

    canonicalize: Callable[[GraphAlgebra, GraphExpr], GraphExpr] = lambda _, e: e
    expression_by_node: dict[fx.Node, GraphExpr] = field(default_factory=dict[fx.Node, GraphExpr])
    _interned: dict[Any, GraphExpr] = field(default_factory=dict[Any, GraphExpr])

    def read_graph(self, graph: fx.Graph) -> None:
        """Gives every node of a graph its expression."""
        for node in graph.nodes:
            if node.op != "output":
                self.expression_by_node[node] = self._read_node(node)

    def make_expression(self, op: str, args: tuple[GraphExpr | Atom, ...], node: fx.Node) -> GraphExpr:
        """Returns the expression of an operation; `node` computes it if it is new."""
        key = op, tuple(id(a) if isinstance(a, GraphExpr) else ("atom", a) for a in args)
        if key not in self._interned:
            new = GraphExpr(op, args, node)
            self._interned[key] = new
            self._interned[key] = self.canonicalize(self, new)
        return self._interned[key]

    def is_cast(self, node: fx.Node) -> bool:
        """Whether a node only changes the dtype of its first argument."""
        return node.op == "call_method" and node.target in _CAST_METHODS and bool(node.args)

    def _read_node(self, node: fx.Node) -> GraphExpr:
        if node.op == "get_attr":
            return self.make_expression("parameter", (str(node.target),), node)
        if self.is_cast(node):
            return self.expression_by_node[node.args[0]]  # pyright: ignore[reportArgumentType]
        name = called_name(node)
        if name in _ELEMENTWISE_OPS and len(node.args) in (1, 2) and set(node.kwargs) <= {"exponent"}:
            args = tuple(self._read_argument(a) for a in (*node.args, *node.kwargs.values()))
            if _OPAQUE not in args:
                return self.make_expression(_ELEMENTWISE_OPS[name], args, node)
        reader = _READERS.get(name)
        found = reader(self, node) if reader is not None else None
        return (
            self.make_expression("node", (node.name,), node)
            if found is None
            else self.make_expression(*found, node)
        )

    def _read_argument(self, value: Any) -> GraphExpr | Atom:
        if isinstance(value, fx.Node):
            return self.expression_by_node[value]
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        return _OPAQUE

    def bind_arguments(self, node: fx.Node, *names: str) -> list[Any] | None:
        """Returns a call's arguments by position or name, None for those left out; None if there are
        others."""
        if len(node.args) > len(names) or not set(node.kwargs) <= set(names):
            return None
        found = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        return [found.get(n) for n in names]

    def read_argument(self, value: Any) -> GraphExpr | Atom:
        """Returns the expression or atom of a node's argument."""
        return self._read_argument(value)


_OPAQUE = "\0opaque"
ReadResult = tuple[str, tuple[GraphExpr | Atom, ...]] | None


def called_name(node: fx.Node) -> str:
    """Returns the short name of what a node calls: `silu`, `mean`, `getitem`."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _is_last_dim(value: Any) -> bool:
    return value == -1 or (isinstance(value, list | tuple) and list(value) == [-1])


def _reduction_reader(op: str) -> Callable[[GraphAlgebra, fx.Node], ReadResult]:
    def read(algebra: GraphAlgebra, node: fx.Node) -> ReadResult:
        """Over the last dim, which is kept; a variance without Bessel's correction."""
        known = {"var": ("input", "dim", "unbiased", "keepdim"), "mean": ("input", "dim", "keepdim")}[op]
        extra = node.kwargs.get("correction") if op == "var" else None
        trimmed = {k: v for k, v in node.kwargs.items() if k not in ("correction", "dtype")}
        if len(node.args) > len(known) or not set(trimmed) <= set(known):
            return None
        given = dict(zip(known, node.args, strict=False)) | trimmed
        biased = op == "mean" or given.get("unbiased") is False or extra == 0
        return (
            (op, (algebra.read_argument(given["input"]),))
            if _is_last_dim(given.get("dim")) and given.get("keepdim") is True and biased
            else None
        )

    return read


def _read_gelu(algebra: GraphAlgebra, node: fx.Node) -> ReadResult:
    given = algebra.bind_arguments(node, "input", "approximate")
    if given is None or given[1] not in (None, "none", "tanh"):
        return None
    return "gelu_tanh" if given[1] == "tanh" else "gelu", (algebra.read_argument(given[0]),)


def _read_silu(algebra: GraphAlgebra, node: fx.Node) -> ReadResult:
    given = algebra.bind_arguments(node, "input", "inplace")
    return None if given is None or given[1] else ("silu", (algebra.read_argument(given[0]),))


def _norm_reader(op: str) -> Callable[[GraphAlgebra, fx.Node], ReadResult]:
    def read(algebra: GraphAlgebra, node: fx.Node) -> ReadResult:
        """torch's own norm over one dim; its eps must be given."""
        names = (
            ("input", "shape", "weight", "bias", "eps")
            if op == "layer_norm"
            else ("input", "shape", "weight", "eps")
        )
        given = algebra.bind_arguments(
            node, *names, *(("normalized_shape",) if "normalized_shape" in node.kwargs else ())
        )
        if given is None:
            return None
        shape = node.kwargs.get("normalized_shape", given[1])
        args = [algebra.read_argument(v) for v in (given[0], *given[2 : len(names)])]
        return (
            (op, tuple(args))
            if isinstance(shape, list | tuple) and len(shape) == 1 and args[-1] is not None
            else None
        )

    return read


def _read_cat(algebra: GraphAlgebra, node: fx.Node) -> ReadResult:
    """Reads the concatenation of two tensors along the last dim."""
    given = algebra.bind_arguments(node, "tensors", "dim")
    if given is None or not isinstance(given[0], list | tuple) or len(given[0]) != 2 or given[1] != -1:
        return None
    return "cat", tuple(algebra.read_argument(t) for t in given[0])


def _read_half(algebra: GraphAlgebra, node: fx.Node) -> ReadResult:
    """Reads halves of the last dim, by slices or by chunks."""
    source, index = node.args
    if not isinstance(source, fx.Node):
        return None
    if isinstance(index, int) and index in (0, 1) and called_name(source) == "chunk":
        given = algebra.bind_arguments(source, "input", "chunks", "dim")
        return (
            None
            if given is None or given[1:] != [2, -1]
            else ("high" if index else "low", (algebra.read_argument(given[0]),))
        )
    if (
        isinstance(index, tuple)
        and len(index) == 2
        and index[0] is Ellipsis
        and isinstance(index[1], slice)
        and index[1].step is None
    ):
        start, stop = index[1].start, index[1].stop
        if start is None and _is_half_width(stop, source):
            return "low", (algebra.read_argument(source),)
        if stop is None and _is_half_width(start, source):
            return "high", (algebra.read_argument(source),)
    return None


def _is_half_width(value: Any, of: fx.Node) -> bool:
    """Whether a value is `of.shape[-1] // 2`."""
    if not isinstance(value, fx.Node) or called_name(value) != "floordiv" or value.args[1] != 2:
        return False
    width = value.args[0]
    if not isinstance(width, fx.Node):
        return False
    if called_name(width) == "size":
        return width.args == (of, -1)
    shape = width.args[0] if called_name(width) == "getitem" and width.args[1] == -1 else None
    return isinstance(shape, fx.Node) and called_name(shape) == "getattr" and shape.args == (of, "shape")


_READERS: dict[str, Callable[[GraphAlgebra, fx.Node], ReadResult]] = {
    "mean": _reduction_reader("mean"),
    "var": _reduction_reader("var"),
    "gelu": _read_gelu,
    "silu": _read_silu,
    "layer_norm": _norm_reader("layer_norm"),
    "rms_norm": _norm_reader("rms_norm"),
    "cat": _read_cat,
    "concat": _read_cat,
    "concatenate": _read_cat,
    "getitem": _read_half,
}
