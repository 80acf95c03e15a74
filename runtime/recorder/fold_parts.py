"""Folds loops over the parts of tensors that are cut along dim 0: a loss over `hidden.chunk(4)`, a module
that is called for `images[k : k + 1]`, one image at a time.

Such a loop has one op per part, and parts of a flat batch do not end where samples end. If each part passes
through the same ops, no op mixes rows, and all results are joined or added up, the loop computes what one
pass over all rows computes. That pass takes its place, and looks the same at every size.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from secc.runtime.recorder.finalize import is_needed
from secc.runtime.recorder.nested_values import take_at_path
from secc.runtime.recorder.recording import Recording

aten = torch.ops.aten
_SPLIT_OPS = (aten.split.Tensor, aten.split_with_sizes.default)
_SUM_REDUCTION = 2
_NLL_REDUCTION_ARGUMENT = 3
_DIM_ARGUMENTS: dict[Any, int] = {  # ops along one dim: position of that dim among the arguments
    aten._log_softmax.default: 1,
    aten._softmax.default: 1,
    aten.logsumexp.default: 1,
    aten.sum.dim_IntList: 1,
    aten.mean.dim: 1,
    aten.gather.default: 1,
    aten.unsqueeze.default: 1,
    aten.squeeze.dim: 1,
    aten.select.int: 1,
}
_ROW_PRODUCTS: dict[Any, int] = {  # products: position of the operand that may be rows
    aten.mm.default: 0,
    aten.addmm.default: 1,
    aten.embedding.default: 1,
}
_SCALINGS = (aten.mul.Tensor, aten.div.Tensor)


@dataclass(frozen=True)
class _Part:
    """A node is part `index` of `whole`, which is cut along dim 0 at `bounds`. Without bounds it is one of
    `count` summands of the scalar `whole`."""

    whole: fx.Node
    index: int
    count: int
    bounds: tuple[int, ...] = ()


def fold_parts(recording: Recording) -> Recording:
    """Return the recording with such loops folded; the recording itself if there are none."""
    if not any(map(_is_cut, recording.graph.nodes)):
        return recording
    nodes = dict[fx.Node, fx.Node]()
    graph = fx.Graph()
    graph.output(graph.graph_copy(recording.graph, nodes))  # type: ignore[arg-type]
    output = recording.graph.output_node()
    graph.output_node().meta = copy.copy(output.meta)
    for old, new in nodes.items():
        new.meta = dict(old.meta)
    folder = _PartFolder(graph)
    if not folder.run():
        return recording
    graph.lint()
    inputs = {str(n.target): n for n in graph.nodes if n.op == "placeholder"}
    return replace(recording, graph=graph, inputs=inputs)


class _PartFolder:
    """Folds the loops of one graph in place."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._parts = dict[fx.Node, _Part]()
        self._node_of_part = dict[tuple[fx.Node, int], fx.Node]()
        self._lifted_calls = list[tuple[fx.Node, list[fx.Node]]]()

    def run(self) -> bool:
        """Fold what can be folded. False if a block would be called twice: the graph is then of no use."""
        self._find_cuts()
        if not self._parts:
            return False
        joined = False
        for node in list(self._graph.nodes):
            if node in self._parts or node.op in ("placeholder", "get_attr", "output"):
                continue
            if self._join(node):
                joined = True
            elif any(p is not None and p.index == 0 for p in map(self._parts.get, node.all_input_nodes)):
                self._lift(node)
        self._graph.eliminate_dead_code(is_needed)
        alive = set(self._graph.nodes)
        return joined and not any(
            whole in alive and not alive.isdisjoint(calls) for whole, calls in self._lifted_calls
        )

    def _find_cuts(self) -> None:
        """Find tensors that are cut along dim 0 into two parts or more that cover it."""
        slices = dict[fx.Node, dict[int, list[fx.Node]]]()
        for node in self._graph.nodes:
            if node.target in _SPLIT_OPS and _dim_of_split(node) == 0:
                items = [u for u in node.users if u.target is operator.getitem]
                self._add_cut(node.args[0], sorted(items, key=lambda n: n.args[1]))  # type: ignore[arg-type]
            elif node.target is aten.slice.Tensor and _is_row_slice(node):
                slices.setdefault(node.args[0], {}).setdefault(node.args[2], []).append(node)  # type: ignore[arg-type]
        for source, by_start in slices.items():
            self._add_cut(source, [by_start[start][0] for start in sorted(by_start)])
            for same in by_start.values():
                for again in same[1:]:
                    if same[0] in self._parts:
                        again.replace_all_uses_with(same[0])

    def _add_cut(self, source: fx.Node, items: Sequence[fx.Node]) -> None:
        bounds = [0]
        for item in items:
            start = bounds[-1] if item.target is operator.getitem else item.args[2]
            if start != bounds[-1]:
                return
            bounds.append(bounds[-1] + item.meta["shape"][0])
        if len(items) > 1 and bounds[-1] == source.meta["shape"][0]:
            for i, item in enumerate(items):
                self._add_part(item, _Part(source, i, len(items), tuple(bounds)))

    def _add_part(self, node: fx.Node, part: _Part) -> None:
        self._parts[node] = part
        self._node_of_part[part.whole, part.index] = node

    # -- one op for all parts ------------------------------------------------------------------------------

    def _lift(self, first: fx.Node) -> None:
        """Add the op that computes all rows at once, if `first` is the first of one op per part."""
        kind = self._kind_of_parts(first)
        if kind is None or "draw" in first.meta:
            return
        siblings = self._siblings(first, kind[0])
        if siblings is None:
            return
        bounds = self._result_bounds(first, siblings, kind[1])
        if bounds is None:
            return
        whole = self._write_whole(first, bounds, kind[1])
        for i, node in enumerate(siblings):
            self._add_part(node, _Part(whole, i, len(siblings), bounds))
        if first.op == "call_module":
            self._lifted_calls.append((whole, siblings))

    def _kind_of_parts(self, node: fx.Node) -> tuple[int, tuple[int, ...]] | None:
        """The number of parts that a node's arguments are the first of, and their bounds; None if arguments
        are parts of several kinds."""
        parts = [p for a in node.all_input_nodes if (p := self._parts.get(a)) is not None]
        kinds = {(p.index, p.count, p.bounds) for p in parts}
        if len(kinds) != 1:
            return None
        ((index, count, bounds),) = kinds
        return (count, bounds) if index == 0 else None

    def _siblings(self, first: fx.Node, count: int) -> list[fx.Node] | None:
        """The nodes that do for the other parts what `first` does for the first one; None if one is
        missing."""
        found = [first]
        sample = next(a for a in first.all_input_nodes if a in self._parts)
        whole = self._parts[sample].whole
        for index in range(1, count):
            source = self._node_of_part.get((whole, index))
            same = [u for u in source.users if self._does_same(first, u, index)] if source is not None else []
            free = [u for u in same if u not in self._parts]
            if not free:
                return None
            found.append(free[0])
        return found

    def _does_same(self, first: fx.Node, other: fx.Node, index: int) -> bool:
        modes = ("grad", "autocast")
        return (
            other.op == first.op
            and other.target == first.target
            and all(first.meta.get(m) == other.meta.get(m) for m in modes)
            and "draw" not in other.meta
            and self._same_argument(first.args, other.args, index, first)
            and self._same_argument(first.kwargs, other.kwargs, index, first)
        )

    def _same_argument(self, a: Any, b: Any, index: int, first: fx.Node) -> bool:
        match a:
            case fx.Node():
                if (part := self._parts.get(a)) is None:
                    return a is b
                other = self._parts.get(b) if isinstance(b, fx.Node) else None
                return other is not None and (other.whole, other.index) == (part.whole, index)
            case list() | tuple():
                sizes = first.target in (aten.reshape.default, aten.expand.default) and a is first.args[1]
                return (
                    isinstance(b, (list, tuple))
                    and len(a) == len(b)
                    and all(
                        (sizes and i == 0) or self._same_argument(x, y, index, first)
                        for i, (x, y) in enumerate(zip(a, b, strict=True))
                    )
                )
            case dict():
                return a.keys() == b.keys() and all(
                    self._same_argument(v, b[k], index, first) for k, v in a.items()
                )
            case _:
                return type(a) is type(b) and a == b

    def _result_bounds(
        self, first: fx.Node, siblings: Sequence[fx.Node], bounds: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        """Where the results' rows end; () for summands of a scalar, None if the op may mix rows."""
        if not bounds:
            return () if self._scales_summand(first) else None
        if _adds_up_rows(first):
            return ()
        if first.op == "call_module" or _is_loss_of_rows(first):
            return bounds
        if not self._keeps_rows(first, bounds):
            return None
        rows = [n.meta["shape"][0] for n in siblings]
        given = [b - a for a, b in itertools.pairwise(bounds)]
        ratio = rows[0] // given[0] if given[0] else 1
        if rows != [n * ratio for n in given]:
            return None
        return tuple(b * ratio for b in bounds)

    def _scales_summand(self, node: fx.Node) -> bool:
        """Whether a node is a summand, or a multiple of one by a factor that is no summand."""
        if node.target is operator.getitem:
            return bool(node.args[1] == 0)
        factor = node.args[1] if len(node.args) == 2 else None
        return (
            node.target in _SCALINGS
            and node.meta["shape"] == ()
            and self._parts.get(node.args[0]) is not None  # type: ignore[arg-type]
            and self._parts.get(factor) is None  # type: ignore[arg-type]
        )

    def _keeps_rows(self, node: fx.Node, bounds: tuple[int, ...]) -> bool:
        """Whether each row of an op's result is made of the same row of its parts, and of nothing else that
        has rows."""
        shape, first = node.meta.get("shape"), bounds[1]
        if node.op != "call_function" or not shape:
            return False
        target, args = node.target, node.args
        if target is take_at_path:
            return shape[0] == first
        if target in _DIM_ARGUMENTS:
            dims = args[_DIM_ARGUMENTS[target]]
            rank = max(len(args[0].meta["shape"]), len(shape))  # type: ignore[union-attr]
            named: Any = dims if isinstance(dims, (list, tuple)) else [dims]
            return shape[0] == first and bool(named) and all(d % rank != 0 for d in named)
        if target is aten.slice.Tensor:
            return args[1] % len(shape) != 0 and shape[0] == first  # type: ignore[operator]
        if target in _ROW_PRODUCTS:
            rows = {i for i, a in enumerate(args) if a in self._parts}
            return rows == {_ROW_PRODUCTS[target]} and shape[0] == first
        if target in (aten.reshape.default, aten.expand.default):
            given = args[0].meta["shape"]  # type: ignore[union-attr]
            if target is aten.expand.default:
                return given[0] == shape[0] == first and len(given) == len(shape)
            return given[0] == first and (shape[0] == first or _merges_front(given, shape))
        tags = getattr(target, "tags", ())
        pointwise = torch.Tag.pointwise in tags or target in (aten._to_copy.default, aten.clone.default)
        # Another operand with as many rows would be a tensor that all parts share by chance.
        others = [a for a in node.all_input_nodes if a not in self._parts]
        return (
            pointwise
            and shape[0] == first
            and all(len(a.meta["shape"]) < len(shape) or a.meta["shape"][0] == 1 for a in others)
            and all(len(a.meta["shape"]) == len(shape) for a in node.all_input_nodes if a in self._parts)
        )

    def _write_whole(self, first: fx.Node, bounds: tuple[int, ...], given: tuple[int, ...]) -> fx.Node:
        """Write the op that computes all rows in front of the op of the first part. The whole tensors that it
        takes already stand before that place."""

        def whole_of(node: fx.Node) -> fx.Node:
            return self._parts[node].whole if node in self._parts else node

        args: Any = map_arg(first.args, whole_of)
        kwargs: Any = map_arg(first.kwargs, whole_of)
        if first.target in (aten.reshape.default, aten.expand.default):
            args = (args[0], [bounds[-1], *args[1][1:]])
        with self._graph.inserting_before(first):
            whole = self._graph.create_node(first.op, first.target, args, kwargs)  # type: ignore[arg-type]
        whole.meta = dict(first.meta)
        rows, old = (bounds or given or (0,))[-1], given[1] if given else None
        if "shape" in whole.meta and whole.meta["shape"] and bounds:
            whole.meta["shape"] = (bounds[-1], *whole.meta["shape"][1:])
        if "stride" in whole.meta:
            whole.meta["stride"] = tuple(torch.empty(whole.meta["shape"], device="meta").stride())
        if "results" in whole.meta:
            whole.meta["results"] = [
                r | {"shape": (rows, *r["shape"][1:])} if r["shape"][:1] == (old,) else r
                for r in whole.meta["results"]
            ]
        return whole

    # -- what joins all parts again ------------------------------------------------------------------------

    def _join(self, node: fx.Node) -> bool:
        """Let a node that joins or adds up all parts take the whole; whether it did."""
        args: Any = node.args
        if node.target is aten.cat.default and (len(args) < 2 or args[1] == 0):
            found = self._complete(args[0], rows=True)
            if found is not None:
                node.replace_all_uses_with(found)
            return found is not None
        if node.target is aten.sum.default and args[0].target is aten.stack.default:
            found = self._complete(args[0].args[0], rows=False)
            if found is not None:
                node.replace_all_uses_with(found)
            return found is not None
        is_last = _is_sum(node) and not any(map(_is_sum, node.users))
        return is_last and self._join_sum(node)

    def _complete(self, items: Any, rows: bool) -> fx.Node | None:
        """The whole that these nodes are all parts of, in order."""
        parts = [self._parts.get(n) for n in items] if isinstance(items, (list, tuple)) else []
        first = parts[0] if parts else None
        if first is None or bool(first.bounds) != rows or len(parts) != first.count:
            return None
        same = all(p is not None and (p.whole, p.index) == (first.whole, i) for i, p in enumerate(parts))
        return first.whole if same else None

    def _join_sum(self, root: fx.Node) -> bool:
        """Replace, in a chain of additions, all summands of a scalar by the scalar."""
        summands = list(_iter_summands(root, root))
        indices = dict[fx.Node, list[int]]()
        for part in (self._parts.get(s) for s in summands if isinstance(s, fx.Node)):
            if part is not None and not part.bounds:
                indices.setdefault(part.whole, []).append(part.index)
        counts = {p.whole: p.count for p in self._parts.values()}
        complete = [w for w, found in indices.items() if sorted(found) == list(range(counts[w]))]
        if not complete:
            return False
        others = [
            s
            for s in summands
            if s != 0
            and not (isinstance(s, fx.Node) and s in self._parts and self._parts[s].whole in complete)
        ]
        total: Any = None
        with self._graph.inserting_before(root):
            for summand in (*complete, *others):
                if total is None:
                    total = summand
                    continue
                total = self._graph.call_function(aten.add.Tensor, (total, summand))
                total.meta = {k: v for k, v in root.meta.items() if k != "log"}
        if "log" in root.meta:
            total.meta["log"] = root.meta["log"]
        root.meta.pop("log", None)
        root.replace_all_uses_with(total)
        return True


def _is_cut(node: fx.Node) -> bool:
    return (node.target in _SPLIT_OPS and _dim_of_split(node) == 0) or (
        node.target is aten.slice.Tensor and _is_row_slice(node)
    )


def _dim_of_split(node: fx.Node) -> int:
    dim: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    return int(dim) % len(node.args[0].meta["shape"])  # type: ignore[union-attr]


def _is_row_slice(node: fx.Node) -> bool:
    args: Any = node.args
    return (
        len(args) == 4
        and args[1] % len(args[0].meta["shape"]) == 0
        and node.meta["shape"][0] < args[0].meta["shape"][0]
    )


def _adds_up_rows(node: fx.Node) -> bool:
    """Whether a node adds up a tensor, or the losses of its rows."""
    if node.target is aten.nll_loss_forward.default:
        return bool(node.args[_NLL_REDUCTION_ARGUMENT] == _SUM_REDUCTION)
    return node.target is aten.sum.default


def _is_loss_of_rows(node: fx.Node) -> bool:
    """Whether a node gives the losses of a tensor's rows, one by one."""
    maker: Any = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else node
    return maker.target is aten.nll_loss_forward.default and maker.args[_NLL_REDUCTION_ARGUMENT] == 0


def _merges_front(given: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a reshape merges dim 0 with those behind it, and leaves the others as they are."""
    merged = len(given) - len(shape) + 1
    front = 1
    for size in given[:merged]:
        front *= size
    return merged > 1 and front == shape[0] and tuple(given[merged:]) == tuple(shape[1:])


def _is_sum(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and node.meta.get("shape") == () and not node.kwargs


def _iter_summands(node: Any, root: fx.Node) -> Iterator[Any]:
    """Iterate over what a chain of additions adds: nodes and numbers."""
    if isinstance(node, fx.Node) and _is_sum(node) and (node is root or len(node.users) == 1):
        for arg in node.args:
            yield from _iter_summands(arg, root)
    else:
        yield node
