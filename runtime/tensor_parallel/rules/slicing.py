"""Rules for slices of parts, and for parts put together."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from secc.runtime.plan.unsplit_reason import UnsplitKind, UnsplitReason
from secc.runtime.tensor_parallel.rules.common import (
    FunctionArguments,
    first_mark,
    match_shard,
    set_marks,
    split_fractions,
)
from secc.runtime.tensor_parallel.rules.mark import ShardMark, UnshardableCode, mark_of, set_mark, sources_of
from secc.runtime.tensor_parallel.rules.views import MAX_KINDS

if TYPE_CHECKING:
    from secc.runtime.tensor_parallel.shape_mode import WholeShapeMode


def split_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], found: list[ShardMark]
) -> Any:
    own, name = first_mark(found, args), func.__name__
    how = (
        args[1]
        if len(args) > 1
        else next(
            kwargs[k]
            for k in ("split_size_or_sections", "split_size", "split_sizes", "chunks")
            if k in kwargs
        )
    )
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % args[0].ndim
    if dim != own.dim:
        return set_marks(func(*args, **kwargs), own)
    size = -(-own.whole_size // how) if name == "chunk" else how
    sizes = (
        [min(size, own.whole_size - i) for i in range(0, own.whole_size, size)]
        if isinstance(size, int)
        else list(size)
    )
    return tuple(
        _take_whole_parts(mode, args[0], own, end - n, end)
        for n, end in zip(sizes, accumulate(sizes), strict=True)
    )


def narrow_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], found: list[ShardMark]
) -> Any:
    own = first_mark(found, args)
    dim, start, count = (
        args[i] if len(args) > i else kwargs[k] for i, k in ((1, "dim"), (2, "start"), (3, "length"))
    )
    if dim % args[0].ndim != own.dim:
        return set_mark(func(*args, **kwargs), own)
    return _take_whole_parts(mode, args[0], own, start, start + count)


def _take_whole_parts(
    mode: WholeShapeMode, tensor: torch.Tensor, own: ShardMark, start: int, stop: int
) -> torch.Tensor:
    """Returns entries `start` to `stop` of the whole marked dim. Raises UnshardableCode unless they are whole
    parts."""
    if start == 0 and stop >= own.whole_size:
        return tensor
    edges = [0, *accumulate(own.parts)]
    if start not in edges or stop not in edges:
        raise UnshardableCode(
            UnsplitReason(UnsplitKind.TAKES_PIECE),
            own.sources,
            split_fractions(own, start, stop),
        )
    first, last = edges.index(start), edges.index(stop)
    offset = mode.local_length(own.parts[:first])
    piece = tensor.narrow(own.dim, offset, mode.local_length(own.parts[first:last]))
    return set_mark(piece, own.at_dim(own.dim, own.parts[first:last]))


def select_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], found: list[ShardMark]
) -> Any:
    own, dim = first_mark(found, args), (args[1] if len(args) > 1 else kwargs["dim"]) % args[0].ndim
    _refuse_single_entry(own, dim)
    return set_mark(func(*args, **kwargs), own.at_dim(own.dim - (dim < own.dim)))


def unbind_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], found: list[ShardMark]
) -> Any:
    own, dim = first_mark(found, args), (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % args[0].ndim
    _refuse_single_entry(own, dim)
    return set_marks(func(*args, **kwargs), own.at_dim(own.dim - (dim < own.dim)))


def _refuse_single_entry(own: ShardMark, dim: int) -> None:
    """Raises UnshardableCode if single entries of the cut dim are taken. If the dim has only a few entries
    (kinds such as queries, keys and values), splitting each of them would help."""
    if dim == own.dim:
        edges = split_fractions(own, *range(own.whole_size)) if own.whole_size <= MAX_KINDS else ()
        raise UnshardableCode(UnsplitReason(UnsplitKind.TAKES_ENTRY), own.sources, edges)


def getitem_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], found: list[ShardMark]
) -> Any:
    tensor, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    own = first_mark(found, args)
    if any(isinstance(i, torch.Tensor | list) for i in index):
        raise UnshardableCode(UnsplitReason(UnsplitKind.INDEXED_BY_TENSOR), own.sources)
    taken = sum(i is not None and i is not Ellipsis for i in index)
    rest = [slice(None)] * (tensor.ndim - taken)
    where = index.index(Ellipsis) if Ellipsis in index else len(index)
    index = (*index[:where], *rest, *index[where + 1 :])
    local, dim, place = list(index), 0, -1
    for position, i in enumerate(index):
        if i is None:
            continue
        if dim == own.dim:
            place = position
        dim += 1
    own_index = index[place]
    if not isinstance(own_index, slice):
        _refuse_single_entry(own, own.dim)
    start, stop, step = own_index.indices(own.whole_size)
    if step != 1:
        raise UnshardableCode(UnsplitReason(UnsplitKind.STRIDED), own.sources)
    if stop <= start:
        raise UnshardableCode(UnsplitReason(UnsplitKind.EMPTY_SLICE), own.sources)
    tensor = _take_whole_parts(mode, tensor, own, start, stop)
    local[place] = slice(None)
    kept = mark_of(tensor) or own
    before = sum(not isinstance(i, int) for i in index[:place])
    return set_mark(tensor[tuple(local)], kept.at_dim(before))


def cat_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], found: list[ShardMark]
) -> Any:
    tensors = list(args[0] if args else kwargs["tensors"])
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % tensors[0].ndim
    first = found[0]
    if dim == first.dim:
        if any(mark_of(t) is None or mark_of(t).dim != dim for t in tensors):  # pyright: ignore[reportOptionalMemberAccess]
            raise UnshardableCode(UnsplitReason(UnsplitKind.JOINED_WITH_WHOLE), sources_of(found))
        return set_mark(
            torch.cat(tensors, dim),
            ShardMark(dim, tuple(p for m in found for p in m.parts), sources_of(found)),
        )
    tensors = [match_shard(mode, t, first) for t in tensors]
    return set_mark(torch.cat(tensors, dim), ShardMark(first.dim, first.parts, sources_of(found)))


def stack_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], found: list[ShardMark]
) -> Any:
    tensors, first = list(args[0] if args else kwargs["tensors"]), found[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % (tensors[0].ndim + 1)
    out = torch.stack([match_shard(mode, t, first) for t in tensors], dim)
    return set_mark(out, ShardMark(first.dim + (dim <= first.dim), first.parts, sources_of(found)))


def repeat_interleave_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], found: list[ShardMark]
) -> Any:
    own = first_mark(found, args)
    times, dim = (args[i] if len(args) > i else kwargs.get(k) for i, k in ((1, "repeats"), (2, "dim")))
    if not isinstance(times, int) or not isinstance(dim, int):
        raise UnshardableCode(UnsplitReason(UnsplitKind.REPEATED), own.sources)
    parts = [p * times for p in own.parts] if dim % args[0].ndim == own.dim else own.parts
    return set_mark(func(*args, **kwargs), own.at_dim(own.dim, parts))
