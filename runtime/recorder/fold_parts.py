"""Folds loops over the parts of tensors that are cut along a dim: a loss over `hidden.chunk(4)` or over
`hidden[:, k : k + 512]`, a module that is called for `images[k : k + 1]`, one image at a time.

Such a loop has one op per part, and the longer a batch, the more parts. If each part passes through the same
ops, no op mixes parts, and all results are joined or added up, the loop computes what one pass over the whole
computes. That pass takes its place, and looks the same at every size.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from secc.runtime.plan.schema import EACH_SUFFIX
from secc.runtime.recorder.finalize import is_needed
from secc.runtime.recorder.part_rules import (
    Cut,
    adds_up_parts,
    find_result_cuts,
    scales_summand,
    takes_sizes,
    whole_arguments,
)
from secc.runtime.recorder.recording import Recording

aten = torch.ops.aten
_VIEW_OPS = (aten.reshape.default, aten.slice.Tensor, aten.transpose.int, aten.permute.default)
_SPLIT_OPS = (aten.split.Tensor, aten.split_with_sizes.default)


@dataclass(frozen=True)
class _Part:
    """A node is part `index` of `count` parts of `whole`, which is cut as `cut` says; without a cut, it is
    one of the summands that add up to `whole`."""

    whole: fx.Node
    index: int
    count: int
    cut: Cut | None


def fold_parts(recording: Recording, loops: Collection[str] = ()) -> Recording:
    """Return the recording with such loops folded; the recording itself if there are none.

    `loops` are lines ("file:line") that cut tensors into several parts, or add up what is made of them, in
    other recordings. A slice there that takes a whole tensor is the only part of it, and a sum that starts at
    0 has a single summand, so that short batches look like long ones.
    """
    _drop_zero_summands(recording, loops)
    if not any(_is_cut(n, loops) for n in recording.graph.nodes):
        return recording
    copied = recording.copy()
    folder = _PartFolder(copied.graph, loops)
    if not folder.run():
        return recording
    copied.graph.lint()
    inputs = {str(n.target): n for n in copied.graph.nodes if n.op == "placeholder"}
    return replace(copied, inputs=inputs, folded_loops=recording.folded_loops | folder.lines)


def _drop_zero_summands(recording: Recording, loops: Collection[str]) -> None:
    """Replace, in place, sums of a tensor and the number 0 at these lines by the tensor."""
    for node in list(recording.graph.nodes) if loops else ():
        if not (_is_sum(node) and node.meta.get("where") in loops and "log" not in node.meta):
            continue
        tensors = [a for a in node.args if a != 0]
        only: Any = tensors[0] if len(tensors) == 1 else None
        if isinstance(only, fx.Node) and only.meta.get("dtype") == node.meta.get("dtype"):
            node.replace_all_uses_with(only)
            recording.graph.erase_node(node)


class _PartFolder:
    """Folds the loops of one graph in place. `lines` has the lines that cut tensors and that add up what is
    made of the parts."""

    def __init__(self, graph: fx.Graph, loops: Collection[str]) -> None:
        self._graph, self._loops = graph, loops
        self._parts = dict[fx.Node, _Part]()
        self._node_of_part = dict[tuple[fx.Node, int], fx.Node]()
        self._lifted_calls = list[tuple[fx.Node, list[fx.Node]]]()
        self.lines = frozenset[str]()

    def run(self) -> bool:
        """Fold what can be folded. False if a block would be called twice: the graph is then of no use."""
        self._merge_equal_views()
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

    def _merge_equal_views(self) -> None:
        """Let equal views of one tensor be one node: loops slice `labels.flatten()` once per part."""
        known = dict[Any, fx.Node]()
        for node in list(self._graph.nodes):
            if node.target in _VIEW_OPS and not node.kwargs and not is_needed(node):
                key = node.target, repr(node.args), node.meta["grad"]
                if known.setdefault(key, node) is not node:
                    node.replace_all_uses_with(known[key])
                    self._graph.erase_node(node)

    def _find_cuts(self) -> None:
        """Find tensors that ops take apart along a dim, into two parts or more that follow each other."""
        slices = dict[tuple[fx.Node, int], list[fx.Node]]()
        for node in self._graph.nodes:
            source = node.args[0] if node.args else None
            if not _is_cut(node, self._loops):
                continue
            if node.target in _SPLIT_OPS:
                items = [u for u in node.users if u.target is operator.getitem]
                items.sort(key=lambda n: n.args[1])  # type: ignore[arg-type, return-value]
                if len(items) == len(node.meta.get("results", items)):
                    self._add_cut(source, items, _dim_of_split(node))  # type: ignore[arg-type]
            else:
                dim = int(node.args[1]) % len(node.meta["shape"])
                slices.setdefault((source, dim), []).append(node)  # type: ignore[arg-type]
        for (source, dim), nodes in slices.items():
            self._add_slices(source, nodes, dim)

    def _add_slices(self, source: fx.Node, nodes: Sequence[fx.Node], dim: int) -> None:
        """Add the cuts that slices of one tensor along one dim make: runs of slices that follow each other,
        the shortest at each place. Empty slices, which a loop of a fixed number of parts makes of a short
        batch, end the run if there is one only."""
        by_start = dict[int, dict[int, fx.Node]]()
        empty = list[fx.Node]()
        for node in nodes:
            start, end = _bounds_of_slice(node, dim)
            if start < end:
                by_start.setdefault(start, {})[end] = node
            else:
                empty.append(node)
        ends = {end for by_end in by_start.values() for end in by_end}
        first_places = [s for s in sorted(by_start) if s not in ends]
        for start in first_places:
            items, place = list[fx.Node](), start
            while place in by_start:
                end = min(by_start[place])
                items.append(by_start[place][end])
                place = end
            self._add_cut(source, items + (empty if len(first_places) == 1 else []), dim, start)

    def _add_cut(self, source: fx.Node, items: Sequence[fx.Node], dim: int, start: int = 0) -> None:
        """Let `items` be the parts of `source` from position `start` of dim `dim` on."""
        bounds = [0]
        for item in items:
            bounds.append(bounds[-1] + item.meta["shape"][dim])
        is_only_part = len(items) == 1 and items[0].meta["where"] in self._loops
        if len(items) < 2 and not is_only_part:
            return
        whole = source
        if start or bounds[-1] != source.meta["shape"][dim]:
            if is_only_part:
                return
            with self._graph.inserting_before(items[0]):
                whole = self._graph.call_function(aten.slice.Tensor, (source, dim, start, start + bounds[-1]))
            shape = list(source.meta["shape"])
            shape[dim] = bounds[-1]
            whole.meta = items[0].meta | {"shape": tuple(shape)}
        is_ragged = dim == 0 and _is_ragged(source, bounds)
        cut = Cut(dim, tuple(bounds), is_rows=dim == 0, is_ragged=is_ragged)
        for i, item in enumerate(items):
            self._add_part(item, _Part(whole, i, len(items), cut))
            self.lines |= {item.meta["where"]}

    def _add_part(self, node: fx.Node, part: _Part) -> None:
        self._parts[node] = part
        self._node_of_part[part.whole, part.index] = node

    # -- one op for all parts ------------------------------------------------------------------------------

    def _lift(self, first: fx.Node) -> None:
        """Add the op that computes the whole at once, if `first` is the first of one op per part."""
        count = self._count_parts(first)
        if count is None or "draw" in first.meta:
            return
        siblings = self._siblings(first, count)
        if siblings is None:
            return
        cuts = {a: p.cut for a in first.all_input_nodes if (p := self._parts.get(a)) and p.cut is not None}
        if not cuts:
            if not scales_summand(first, lambda n: isinstance(n, fx.Node) and n in self._parts):
                return
            cut = None
        elif adds_up_parts(first, cuts):
            cut = None
        else:
            shapes = [n.meta.get("shape") for n in siblings]
            found = find_result_cuts(first, cuts)
            if None not in shapes:
                found = [c for c in found if c.has_parts(shapes)]  # type: ignore[arg-type]
            if not found:
                return
            cut = found[0]
        whole = self._write_whole(first, cut)
        for i, node in enumerate(siblings):
            self._add_part(node, _Part(whole, i, count, cut))
        if first.op == "call_module":
            self._lifted_calls.append((whole, siblings))

    def _count_parts(self, node: fx.Node) -> int | None:
        """The number of parts that a node's arguments are the first of; None if arguments are parts of
        several kinds."""
        parts = [p for a in node.all_input_nodes if (p := self._parts.get(a)) is not None]
        kinds = {(p.index, p.count, p.cut and (p.cut.bounds, p.cut.outer)) for p in parts}
        if len(kinds) != 1:
            return None
        ((index, count, _),) = kinds
        return count if index == 0 else None

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
                return (
                    isinstance(b, (list, tuple))
                    and len(a) == len(b)
                    and (
                        takes_sizes(first, a)  # the shapes of the results are compared
                        or all(self._same_argument(x, y, index, first) for x, y in zip(a, b, strict=True))
                    )
                )
            case dict():
                return a.keys() == b.keys() and all(
                    self._same_argument(v, b[k], index, first) for k, v in a.items()
                )
            case _:
                return type(a) is type(b) and a == b

    def _write_whole(self, first: fx.Node, cut: Cut | None) -> fx.Node:
        """Write the op that computes the whole in front of the op of the first part. The whole tensors that
        it takes already stand before that place."""

        def whole_of(node: fx.Node) -> fx.Node:
            return self._parts[node].whole if node in self._parts else node

        given = first.args if cut is None else whole_arguments(first, cut)
        args: Any = map_arg(given, whole_of)
        kwargs: Any = map_arg(first.kwargs, whole_of)
        with self._graph.inserting_before(first):
            whole = self._graph.create_node(first.op, first.target, args, kwargs)  # type: ignore[arg-type]
        whole.meta = dict(first.meta)
        if cut is None:
            return whole
        if "shape" in whole.meta:
            whole.meta["shape"] = cut.whole_shape(whole.meta["shape"])
        if "stride" in whole.meta:
            whole.meta["stride"] = tuple(torch.empty(whole.meta["shape"], device="meta").stride())
        if "results" in whole.meta:
            whole.meta["results"] = [
                r | {"shape": cut.whole_shape(r["shape"])} for r in whole.meta["results"]
            ]
        return whole

    # -- what joins all parts again ------------------------------------------------------------------------

    def _join(self, node: fx.Node) -> bool:
        """Let a node that joins or adds up all parts take the whole; whether it did."""
        args: Any = node.args
        if node.target is aten.cat.default:
            found = self._complete(args[0], args[1] % len(node.meta["shape"]) if len(args) > 1 else 0)
            if found is not None:
                node.replace_all_uses_with(found)
            return found is not None
        if node.target is aten.sum.default and args[0].target is aten.stack.default:
            found = self._complete(args[0].args[0], None)
            if found is not None:
                node.replace_all_uses_with(found)
            return found is not None
        is_last = _is_sum(node) and not any(map(_is_sum, node.users))
        return is_last and self._join_sum(node)

    def _complete(self, items: Any, dim: int | None) -> fx.Node | None:
        """The whole that these nodes are all parts of, in order, if it is cut along `dim`; without a dim, the
        one that they are all summands of."""
        parts = [self._parts.get(n) for n in items] if isinstance(items, (list, tuple)) else []
        first = parts[0] if parts else None
        if first is None or len(parts) != first.count:
            return None
        if (first.cut and first.cut.dim) != dim or (first.cut is not None and first.cut.outer != 1):
            return None
        same = all(p is not None and (p.whole, p.index) == (first.whole, i) for i, p in enumerate(parts))
        return first.whole if same else None

    def _join_sum(self, root: fx.Node) -> bool:
        """Replace, in a chain of additions, all summands of a tensor by that tensor."""
        summands = list(_iter_summands(root, root))
        indices = dict[fx.Node, list[int]]()
        for part in (self._parts.get(s) for s in summands if isinstance(s, fx.Node)):
            if part is not None and part.cut is None:
                indices.setdefault(part.whole, []).append(part.index)
        counts = {p.whole: p.count for p in self._parts.values()}
        complete = [w for w, found in indices.items() if sorted(found) == list(range(counts[w]))]
        if not complete:
            return False
        self.lines |= {root.meta["where"]}
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


def _is_cut(node: fx.Node, loops: Collection[str]) -> bool:
    """Whether a node takes a tensor apart along a dim, or takes a part of it; at the lines in `loops`, the
    part may be the whole tensor."""
    if node.target in _SPLIT_OPS:
        return True
    args: Any = node.args
    if node.target is not aten.slice.Tensor or len(args) != 4:
        return False
    dim = args[1] % len(args[0].meta["shape"])
    part, whole = node.meta["shape"][dim], args[0].meta["shape"][dim]
    return part < whole or (part == whole and node.meta["where"] in loops)


def _is_ragged(source: fx.Node, bounds: Sequence[int]) -> bool:
    """Whether parts of rows [positions, features] are sequences of their own: entries of a list in the batch,
    or cut at other lengths than those of chunks."""
    sizes = [end - start for start, end in pairwise(bounds)]
    if len(source.meta["shape"]) > 2 or max(sizes) <= 1:
        return False
    is_list = source.op == "placeholder" and EACH_SUFFIX in str(source.target)
    full = [size for size in sizes if size][:-1]  # the last chunk may be shorter, and some may be empty
    are_chunks = sizes == sorted(sizes, reverse=True) and max(full, default=0) - min(full, default=0) <= 1
    return is_list or not are_chunks


def _dim_of_split(node: fx.Node) -> int:
    dim: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    return int(dim) % len(node.args[0].meta["shape"])  # type: ignore[union-attr]


def _bounds_of_slice(node: fx.Node, dim: int) -> tuple[int, int]:
    """First position of a slice in its tensor, and the one after its last."""
    args: Any = node.args
    size = args[0].meta["shape"][dim]
    start = max(0, args[2] + size) if args[2] < 0 else args[2]
    return start, start + node.meta["shape"][dim]


def _is_sum(node: fx.Node) -> bool:
    """Whether a node adds two tensors of its own shape, or a number to one."""
    shape = node.meta.get("shape")
    return (
        node.target is aten.add.Tensor
        and not node.kwargs
        and all(a.meta.get("shape") == shape for a in node.all_input_nodes)
    )


def _iter_summands(node: Any, root: fx.Node) -> Iterator[Any]:
    """Iterate over what a chain of additions adds: nodes and numbers."""
    if isinstance(node, fx.Node) and _is_sum(node) and (node is root or len(node.users) == 1):
        for arg in node.args:
            yield from _iter_summands(arg, root)
    else:
        yield node
