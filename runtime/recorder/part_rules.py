"""Says what an op makes of one part of a tensor that is cut along a dim: the same part of a whole result, or
a summand of it. An op for which neither is known may mix parts.

`fold_parts` asks; the rules look at one node and at how its arguments are cut.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from secc.runtime.recorder.nested_values import take_at_path

aten = torch.ops.aten
_SUM_REDUCTION = 2
_LOSS_REDUCTIONS: dict[Any, int] = {  # losses of a prediction and a target: position of the reduction
    aten.nll_loss_forward.default: 3,
    aten.nll_loss2d_forward.default: 3,
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
}
_CLASS_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_ALONG_ONE_DIM: dict[Any, int] = {  # ops that keep all dims: position of the dim that they mix
    aten._log_softmax.default: 1,
    aten._softmax.default: 1,
    aten.gather.default: 1,
    aten.topk.default: 2,
    aten.sort.default: 1,
}
_REDUCTIONS = (  # (tensor, dims, keepdim)
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.logsumexp.default,
    aten.amax.default,
    aten.amin.default,
    aten.argmax.default,
    aten.max.dim,
    aten.min.dim,
)
_ROW_PRODUCTS: dict[Any, int] = {  # products: position of the operand that may be rows
    aten.mm.default: 0,
    aten.addmm.default: 1,
}
_SCALINGS = (aten.mul.Tensor, aten.div.Tensor)
_SIZED_OPS = (aten.reshape.default, aten.expand.default)


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut into parts: dim `dim` has `outer` runs of positions, each cut at `bounds`.

    outer is 1 until dims in front are merged into the cut one: a part [B, c] of [B, T] is one run of
    positions, and [B*c] of [B*T] is B of them. is_rows: the parts were cut along dim 0, where samples are.
    is_ragged: each part is a sequence of its own, of its own length, with positions that a block may mix.
    """

    dim: int
    bounds: tuple[int, ...]
    outer: int = 1
    is_rows: bool = False
    is_ragged: bool = False

    @property
    def whole_size(self) -> int:
        """The size of the whole dim."""
        return self.outer * self.bounds[-1]

    def part_size(self, index: int) -> int:
        """The size of that dim in a part."""
        return self.outer * (self.bounds[index + 1] - self.bounds[index])

    def has_parts(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether these are the shapes of all parts, in order."""
        first = tuple(shapes[0])
        return self.dim < len(first) and all(
            tuple(s) == (*first[: self.dim], self.part_size(i), *first[self.dim + 1 :])
            for i, s in enumerate(shapes)
        )

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole of a part of this shape; other shapes as they are."""
        if len(part) <= self.dim or part[self.dim] != self.part_size(0):
            return tuple(part)
        return (*part[: self.dim], self.whole_size, *part[self.dim + 1 :])


def adds_up_parts(node: fx.Node, cuts: Mapping[fx.Node, Cut]) -> bool:
    """Whether a node's results for all parts add up to its result for the whole."""
    if node.target in _LOSS_REDUCTIONS:
        return _reduction_of(node) == _SUM_REDUCTION and _has_aligned_labels(node, cuts)
    if node.target is aten.sum.dim_IntList:
        dims = _reduced_dims(node)
        return next(iter(cuts.values())).dim in dims
    return node.target is aten.sum.default


def scales_summand(node: fx.Node, summands: Callable[[Any], bool]) -> bool:
    """Whether a node is made of one summand such that results add up if the summands do: its negative, or a
    multiple of it by a factor that is no summand."""
    if node.target is operator.getitem:
        return bool(node.args[1] == 0)
    if node.target is aten.neg.default:
        return True
    factor = node.args[1] if len(node.args) == 2 else None
    given: Any = node.args[0] if node.args else None
    return (
        node.target in _SCALINGS
        and summands(given)
        and not summands(factor)
        and node.meta["shape"] == given.meta["shape"]
    )


def find_result_cuts(node: fx.Node, cuts: Mapping[fx.Node, Cut]) -> Sequence[Cut]:
    """Find how a node's result may be cut if each part of it is made of the same parts of its arguments, and
    of nothing else that is cut. `cuts` has those of its arguments that are parts, by node. Several are
    possible for a reshape of parts with one position; none if the op may mix parts."""
    target, args = node.target, node.args
    given = list(cuts.values())
    first = given[0]
    rank = len(next(iter(cuts)).meta.get("shape", ()))
    same_dim = all(c.dim == first.dim for c in given)
    if node.op == "call_module":
        # A block works on each row by itself, [samples, ...] or [rows, features], but may mix positions; the
        # rows of a sequence are positions.
        mixed = node.meta.get("mixed_dims")
        by_position = mixed is not None and first.dim < rank - mixed
        by_row = first.dim == 0 and not first.is_ragged and (first.is_rows or rank <= 2)
        return [first] if same_dim and (by_row or by_position) else []
    if target in (take_at_path, operator.getitem):
        return [first]
    if node.op != "call_function":
        return []
    if target in _LOSS_REDUCTIONS:
        kept = _reduction_of(node) == 0 and _has_aligned_labels(node, cuts)
        return [cuts[args[1]]] if kept else []  # type: ignore[index]
    if target in _ALONG_ONE_DIM:
        position = _ALONG_ONE_DIM[target]
        dim: Any = args[position] if len(args) > position else -1
        tensors = [a for a in node.all_input_nodes if a not in cuts]
        return [first] if same_dim and not tensors and dim % rank != first.dim else []
    if target in _REDUCTIONS:
        dims = _reduced_dims(node)
        keeps = len(args) > 2 and bool(args[2])
        gone = 0 if keeps else sum(d < first.dim for d in dims)
        return [] if first.dim in dims else [replace(first, dim=first.dim - gone)]
    if target in _ROW_PRODUCTS:
        rows = [i for i, a in enumerate(args) if a in cuts]
        return [first] if rows == [_ROW_PRODUCTS[target]] and first.dim == 0 else []
    if target is aten.embedding.default:
        return [first] if args[1] in cuts and args[0] not in cuts else []
    if target is aten.native_layer_norm.default:
        normalized: Any = args[1]
        return [first] if list(cuts) == [args[0]] and first.dim < rank - len(normalized) else []
    if (moved := _moved_dim(node, first.dim, rank)) is not None:
        return [replace(first, dim=moved)]
    if target is aten.slice.Tensor:
        return [first] if args[1] % rank != first.dim else []  # type: ignore[operator]
    if target is aten.reshape.default:
        return _reshaped_cuts(args[0].meta["shape"], node.meta["shape"], first)  # type: ignore[union-attr]
    if target is aten.expand.default:
        dim = len(node.meta["shape"]) - rank + first.dim
        return [replace(first, dim=dim)] if node.meta["shape"][dim] == first.part_size(0) else []
    return _pointwise_cuts(node, cuts)


def whole_arguments(node: fx.Node, cut: Cut) -> tuple[Any, ...]:
    """A node's arguments with sizes for a result that is not cut; other arguments as they are."""
    if node.target not in _SIZED_OPS:
        return node.args
    sizes: list[Any] = list(node.args[1])  # type: ignore[arg-type]
    if sizes[cut.dim] != -1:
        sizes[cut.dim] = cut.whole_size
    return (node.args[0], sizes, *node.args[2:])


def takes_sizes(node: fx.Node, argument: Any) -> bool:
    """Whether an argument of a node is the shape of its result."""
    return node.target in _SIZED_OPS and argument is node.args[1]


def _pointwise_cuts(node: fx.Node, cuts: Mapping[fx.Node, Cut]) -> Sequence[Cut]:
    tags = getattr(node.target, "tags", ())
    shape = node.meta.get("shape")
    if not shape or not (
        torch.Tag.pointwise in tags or node.target in (aten._to_copy.default, aten.clone.default)
    ):
        return []
    from_right = {len(a.meta["shape"]) - c.dim for a, c in cuts.items()}
    if len(from_right) != 1:
        return []
    (place,) = from_right
    # Another operand with as many positions would be a tensor that all parts share by chance.
    others = [a.meta["shape"] for a in node.all_input_nodes if a not in cuts]
    shared = all(len(s) < place or s[len(s) - place] == 1 for s in others)
    return [replace(next(iter(cuts.values())), dim=len(shape) - place)] if shared else []


def _moved_dim(node: fx.Node, dim: int, rank: int) -> int | None:
    """Where the cut dim is after an op that adds, drops or reorders dims; None for other ops, and if the op
    takes the cut dim itself."""
    args: Any = node.args
    match node.target:
        case aten.unsqueeze.default:
            return dim + (args[1] % (rank + 1) <= dim)
        case aten.squeeze.dim | aten.select.int:
            gone = args[1] % rank
            dropped = len(node.meta["shape"]) < rank
            return None if gone == dim else dim - (dropped and gone < dim)
        case aten.permute.default:
            return [d % rank for d in args[1]].index(dim)
        case aten.transpose.int:
            swapped = {args[1] % rank: args[2] % rank, args[2] % rank: args[1] % rank}
            return swapped.get(dim, dim)
        case aten.t.default:
            return rank - 1 - dim
        case _:
            return None


def _reshaped_cuts(given: Sequence[int], shape: Sequence[int], cut: Cut) -> Sequence[Cut]:
    """The cuts of a reshaped part: dims in front are merged into the cut one or leave it, and so do dims
    behind. Those in which nothing is merged come first."""
    runs = math.prod(given[: cut.dim]) * cut.outer
    behind = math.prod(given[cut.dim + 1 :])
    length = cut.part_size(0) // cut.outer
    found = list[Cut]()
    for dim, size in enumerate(shape):
        front, rest = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        if not front or not rest or runs % front or behind % rest:
            continue
        outer, inner = runs // front, behind // rest
        if size == outer * length * inner:
            found.append(replace(cut, dim=dim, bounds=tuple(b * inner for b in cut.bounds), outer=outer))
    return sorted(found, key=lambda c: (c.bounds != cut.bounds, c.outer))


def _reduction_of(node: fx.Node) -> int:
    position = _LOSS_REDUCTIONS[node.target]
    value: Any = node.args[position] if len(node.args) > position else node.kwargs.get("reduction", 1)
    return int(value)


def _has_aligned_labels(node: fx.Node, cuts: Mapping[fx.Node, Cut]) -> bool:
    """Whether prediction and target of a loss are cut alike, and nothing else is."""
    scores: Any = node.args[0]
    target: Any = node.args[1]
    if set(cuts) != {scores, target}:
        return False
    if node.target not in _CLASS_LOSSES:
        return cuts[scores].dim == cuts[target].dim
    behind_classes = cuts[target].dim > 0
    return cuts[scores].dim == cuts[target].dim + behind_classes


def _reduced_dims(node: fx.Node) -> set[int]:
    """The dims that a reduction leaves out; all without a list of them."""
    rank = len(node.args[0].meta["shape"])  # type: ignore[union-attr]
    dims: Any = node.args[1] if len(node.args) > 1 else None
    named = dims if isinstance(dims, (list, tuple)) else [dims] if isinstance(dims, int) else []
    return {d % rank for d in named} if named else set(range(rank))
