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
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    mark, name = first_mark(marks, args), func.__name__
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
    if dim != mark.dim:
        return set_marks(func(*args, **kwargs), mark)
    size = -(-mark.whole_size // how) if name == "chunk" else how
    sizes = (
        [min(size, mark.whole_size - i) for i in range(0, mark.whole_size, size)]
        if isinstance(size, int)
        else list(size)
    )
    return tuple(
        _take_whole_parts(mode, args[0], mark, end - n, end)
        for n, end in zip(sizes, accumulate(sizes), strict=True)
    )


def narrow_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    mark = first_mark(marks, args)
    dim, start, count = (
        args[i] if len(args) > i else kwargs[k] for i, k in ((1, "dim"), (2, "start"), (3, "length"))
    )
    if dim % args[0].ndim != mark.dim:
        return set_mark(func(*args, **kwargs), mark)
    return _take_whole_parts(mode, args[0], mark, start, start + count)


def _take_whole_parts(
    mode: WholeShapeMode, tensor: torch.Tensor, mark: ShardMark, start: int, stop: int
) -> torch.Tensor:
    """Returns entries `start` to `stop` of the whole marked dim. Raises UnshardableCode unless they are whole
    parts."""
    if start == 0 and stop >= mark.whole_size:
        return tensor
    edges = [0, *accumulate(mark.parts)]
    if start not in edges or stop not in edges:
        raise UnshardableCode(
            UnsplitReason(UnsplitKind.TAKES_PIECE),
            mark.sources,
            split_fractions(mark, start, stop),
        )
    first, last = edges.index(start), edges.index(stop)
    offset = mode.local_length(mark.parts[:first])
    piece = tensor.narrow(mark.dim, offset, mode.local_length(mark.parts[first:last]))
    return set_mark(piece, mark.at_dim(mark.dim, mark.parts[first:last]))


def select_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    mark, dim = first_mark(marks, args), (args[1] if len(args) > 1 else kwargs["dim"]) % args[0].ndim
    _refuse_single_entry(mark, dim)
    return set_mark(func(*args, **kwargs), mark.at_dim(mark.dim - (dim < mark.dim)))


def unbind_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    mark, dim = first_mark(marks, args), (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % args[0].ndim
    _refuse_single_entry(mark, dim)
    return set_marks(func(*args, **kwargs), mark.at_dim(mark.dim - (dim < mark.dim)))


def _refuse_single_entry(mark: ShardMark, dim: int) -> None:
    """Raises UnshardableCode if single entries of the cut dim are taken. If the dim has only a few entries
    (kinds such as queries, keys and values), splitting each of them would help."""
    if dim == mark.dim:
        edges = split_fractions(mark, *range(mark.whole_size)) if mark.whole_size <= MAX_KINDS else ()
        raise UnshardableCode(UnsplitReason(UnsplitKind.TAKES_ENTRY), mark.sources, edges)


def getitem_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    tensor, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    mark = first_mark(marks, args)
    if any(isinstance(i, torch.Tensor | list) for i in index):
        raise UnshardableCode(UnsplitReason(UnsplitKind.INDEXED_BY_TENSOR), mark.sources)
    taken = sum(i is not None and i is not Ellipsis for i in index)
    full_slices = [slice(None)] * (tensor.ndim - taken)
    where = index.index(Ellipsis) if Ellipsis in index else len(index)
    index = (*index[:where], *full_slices, *index[where + 1 :])
    local, dim, place = list(index), 0, -1
    for position, i in enumerate(index):
        if i is None:
            continue
        if dim == mark.dim:
            place = position
        dim += 1
    own_index = index[place]
    if not isinstance(own_index, slice):
        _refuse_single_entry(mark, mark.dim)
    start, stop, step = own_index.indices(mark.whole_size)
    if step != 1:
        raise UnshardableCode(UnsplitReason(UnsplitKind.STRIDED), mark.sources)
    if stop <= start:
        raise UnshardableCode(UnsplitReason(UnsplitKind.EMPTY_SLICE), mark.sources)
    tensor = _take_whole_parts(mode, tensor, mark, start, stop)
    local[place] = slice(None)
    piece_mark = mark_of(tensor) or mark
    before = sum(not isinstance(i, int) for i in index[:place])
    return set_mark(tensor[tuple(local)], piece_mark.at_dim(before))


def cat_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    tensors = list(args[0] if args else kwargs["tensors"])
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % tensors[0].ndim
    first = marks[0]
    if dim == first.dim:
        if any(mark_of(t) is None or mark_of(t).dim != dim for t in tensors):  # pyright: ignore[reportOptionalMemberAccess]
            raise UnshardableCode(UnsplitReason(UnsplitKind.JOINED_WITH_WHOLE), sources_of(marks))
        return set_mark(
            torch.cat(tensors, dim),
            ShardMark(dim, tuple(p for m in marks for p in m.parts), sources_of(marks)),
        )
    tensors = [match_shard(mode, t, first) for t in tensors]
    return set_mark(torch.cat(tensors, dim), ShardMark(first.dim, first.parts, sources_of(marks)))


def stack_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    tensors, first = list(args[0] if args else kwargs["tensors"]), marks[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % (tensors[0].ndim + 1)
    out = torch.stack([match_shard(mode, t, first) for t in tensors], dim)
    return set_mark(out, ShardMark(first.dim + (dim <= first.dim), first.parts, sources_of(marks)))


def repeat_interleave_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    mark = first_mark(marks, args)
    times, dim = (args[i] if len(args) > i else kwargs.get(k) for i, k in ((1, "repeats"), (2, "dim")))
    if not isinstance(times, int) or not isinstance(dim, int):
        raise UnshardableCode(UnsplitReason(UnsplitKind.REPEATED), mark.sources)
    parts = [p * times for p in mark.parts] if dim % args[0].ndim == mark.dim else mark.parts
    return set_mark(func(*args, **kwargs), mark.at_dim(mark.dim, parts))
