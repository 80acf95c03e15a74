"""Rules for reading the sizes of parts, and for the same entries in other shapes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from secc.runtime.plan.unsplit_reason import UnsplitKind, UnsplitReason
from secc.runtime.tensor_parallel.rules.common import FunctionArguments, first_mark, split_fractions
from secc.runtime.tensor_parallel.rules.elementwise import elementwise_rule
from secc.runtime.tensor_parallel.rules.mark import ShardMark, UnshardableCode, set_mark

if TYPE_CHECKING:
    from secc.runtime.tensor_parallel.shape_mode import WholeShapeMode

MAX_KINDS = 4  # a dim with at most 4 entries holds kinds (queries, keys, values), not heads


def shape_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    return torch.Size(mode.whole_shape(args[0]))


def size_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    whole, dim = torch.Size(mode.whole_shape(args[0])), args[1] if len(args) > 1 else kwargs.get("dim")
    return whole if dim is None else whole[dim]


def numel_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    return prod(mode.whole_shape(args[0]))


def len_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    return mode.whole_shape(args[0])[0]


def unchanged_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    """Functions that do not depend on sizes."""
    return func(*args, **kwargs)


def view_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    tensor = args[0]
    sizes: Sequence[Any] = args[1:] or [kwargs[k] for k in ("size", "shape", "dtype") if k in kwargs]
    if isinstance(sizes[0], torch.dtype):
        return elementwise_rule(mode, func, args, kwargs, marks)
    wanted = [int(s) for s in (sizes[0] if isinstance(sizes[0], tuple | list) else sizes)]
    return _view_shard(mode, tensor, wanted, first_mark(marks, args))


def view_as_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    return _view_shard(mode, args[0], mode.whole_shape(args[1]), first_mark(marks, args))


def flatten_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    mark, whole = first_mark(marks, args), mode.whole_shape(args[0])
    start = (args[1] if len(args) > 1 else kwargs.get("start_dim", 0)) % len(whole)
    end = (args[2] if len(args) > 2 else kwargs.get("end_dim", -1)) % len(whole)
    return _view_shard(mode, args[0], [*whole[:start], prod(whole[start : end + 1]), *whole[end + 1 :]], mark)


def unflatten_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    mark, whole = first_mark(marks, args), mode.whole_shape(args[0])
    dim = (args[1] if len(args) > 1 else kwargs["dim"]) % len(whole)
    sizes = list(args[2] if len(args) > 2 else kwargs["sizes"])
    if -1 in sizes:
        sizes[sizes.index(-1)] = whole[dim] // -prod(sizes)
    return _view_shard(mode, args[0], [*whole[:dim], *sizes, *whole[dim + 1 :]], mark)


def _view_shard(
    mode: WholeShapeMode, tensor: torch.Tensor, wanted: list[int], mark: ShardMark
) -> torch.Tensor:
    """Views a part as its part of the whole tensor viewed as `wanted`."""
    whole = mode.whole_shape(tensor)
    if -1 in wanted:
        others = prod(s for s in wanted if s != -1)
        wanted[wanted.index(-1)] = prod(whole) // others if others else 0
    if prod(wanted) != prod(whole):
        raise UnshardableCode(UnsplitReason(UnsplitKind.UNCLEAR_VIEW, str(wanted)), mark.sources)
    dim, parts = _locate_dim(mode, whole, wanted, mark)
    wanted[dim] = mode.local_length(parts)
    return set_mark(tensor.reshape(wanted), mark.at_dim(dim, parts))


def _locate_dim(
    mode: WholeShapeMode, whole: list[int], wanted: list[int], mark: ShardMark
) -> tuple[int, tuple[int, ...]]:
    """Returns (the cut dim in another view of the tensor, its parts there)."""
    before, dim = prod(whole[: mark.dim]), 0
    products = [1, *accumulate(wanted, int.__mul__)]
    while dim < len(wanted) and not (products[dim] == before and wanted[dim] > 1):
        dim += 1
    if dim == len(wanted):
        raise UnshardableCode(UnsplitReason(UnsplitKind.MERGED), mark.sources)
    return _locate_in_split(mode, wanted, dim, mark.parts, mark)


def _locate_in_split(
    mode: WholeShapeMode, wanted: list[int], dim: int, parts: tuple[int, ...], mark: ShardMark
) -> tuple[int, tuple[int, ...]]:
    """Returns (the cut dim, its parts) where a dim with `parts` becomes the dims of `wanted` from `dim` on.
    Parts must not be divided by the new dims, so that each rank's entries stay contiguous."""
    total = sum(parts)
    # The dim stays, or is merged with the ones after it: each part grows by the same factor.
    if wanted[dim] >= total:
        if wanted[dim] % total:
            raise UnshardableCode(UnsplitReason(UnsplitKind.MERGED_WITH_PIECE), mark.sources)
        return dim, tuple(part * (wanted[dim] // total) for part in parts)
    if total % wanted[dim]:
        raise UnshardableCode(UnsplitReason(UnsplitKind.SPLIT_UNEVENLY), mark.sources)
    inner = total // wanted[dim]
    # [3 * width] viewed as [3, width, ...]: the new dim counts kinds side by side (queries, keys, values);
    # each kind is cut along the dim after it.
    if len(parts) == wanted[dim] and set(parts) == {inner} and inner > 1:
        after = next(d for d in range(dim + 1, len(wanted)) if wanted[d] > 1)
        return _locate_in_split(mode, wanted, after, (inner,), mark)
    if any(part % inner for part in parts):
        raise UnshardableCode(UnsplitReason(UnsplitKind.SPLIT_ACROSS_EDGES), mark.sources)
    # [heads * size] viewed as [heads, size]: the heads are cut, if their number is divisible by tp.
    outer = tuple(part // inner for part in parts)
    if any(part % mode.count for part in outer):
        if wanted[dim] <= MAX_KINDS and len(parts) == 1:
            raise UnshardableCode(
                _uneven_heads_reason(mode, outer),
                mark.sources,
                split_fractions(mark, *(mark.whole_size * i // wanted[dim] for i in range(wanted[dim]))),
            )
        raise UnshardableCode(_uneven_heads_reason(mode, outer), mark.sources)
    mode.head_counts |= {*outer}
    return dim, outer


def _uneven_heads_reason(mode: WholeShapeMode, parts: Sequence[int]) -> UnsplitReason:
    heads = next(p for p in parts if p % mode.count)
    return UnsplitReason(UnsplitKind.UNEVEN_HEADS, size=heads, tp=mode.count)


def permute_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    """Functions that only move dims. Where the marked dim goes is found by applying the function to a meta
    tensor with distinct sizes."""
    mark, out = first_mark(marks, args), func(*args, **kwargs)
    moved = func(torch.empty([d + 2 for d in range(args[0].ndim)], device="meta"), *args[1:], **kwargs)
    return set_mark(out, mark.at_dim(list(moved.shape).index(mark.dim + 2)))


def squeeze_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    mark, shape = first_mark(marks, args), args[0].shape
    if shape[mark.dim] == 1:
        raise UnshardableCode(UnsplitReason(UnsplitKind.SQUEEZED), mark.sources)
    sizes = [1 if s == 1 else d + 2 for d, s in enumerate(shape)]
    moved = func(torch.empty(sizes, device="meta"), *args[1:], **kwargs)
    return set_mark(func(*args, **kwargs), mark.at_dim(list(moved.shape).index(mark.dim + 2)))


def expand_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    mark = first_mark(marks, args)
    sizes = list(args[1] if isinstance(args[1], tuple | list) else args[1:])
    dim = mark.dim + len(sizes) - args[0].ndim
    if sizes[dim] not in (-1, mark.whole_size):
        raise UnshardableCode(UnsplitReason(UnsplitKind.EXPANDED), mark.sources)
    sizes[dim] = -1
    return set_mark(args[0].expand(sizes), mark.at_dim(dim))


def expand_as_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    return expand_rule(mode, func, (args[0], tuple(mode.whole_shape(args[1]))), {}, marks)
