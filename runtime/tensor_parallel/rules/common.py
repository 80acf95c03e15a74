"""What rules share: their signature, the mark of the first argument, and how whole operands yield
their part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from secc.runtime.plan.unsplit_reason import UnsplitKind, UnsplitReason
from secc.runtime.tensor_parallel.rules.mark import ShardMark, UnshardableCode, mark_of, set_mark, sources_of

if TYPE_CHECKING:
    from secc.runtime.tensor_parallel.shape_mode import WholeShapeMode

FunctionArguments = Sequence[Any]
FunctionRule = Callable[["WholeShapeMode", Any, FunctionArguments, dict[str, Any], list[ShardMark]], Any]


def first_mark(marks: list[ShardMark], args: FunctionArguments) -> ShardMark:
    """Returns the mark of the first argument. Raises UnshardableCode if it is whole while another one
    is not."""
    first = mark_of(args[0])
    if first is None:
        raise UnshardableCode(UnsplitReason(UnsplitKind.WRITES_INTO_WHOLE), sources_of(marks))
    return first


def split_fractions(mark: ShardMark, *entries: int) -> tuple[tuple[int, int], ...]:
    """Returns entries of the marked dim as fractions of it, without its ends."""
    return tuple((entry, mark.whole_size) for entry in entries if 0 < entry < mark.whole_size)


def set_marks(tensors: Any, mark: ShardMark) -> Any:
    """Sets the same mark on all tensors."""
    return tuple(set_mark(t, mark) for t in tensors)


def copy_whole_operands(mode: WholeShapeMode, values: Any) -> Any:
    """Prepares whole operands for use with parts, so that their gradients are summed."""
    return tree_map(
        lambda t: mode.copy_to_shards(t) if isinstance(t, torch.Tensor) and mark_of(t) is None else t, values
    )


def match_shard(
    mode: WholeShapeMode, tensor: torch.Tensor, common: ShardMark | None, ndim: int | None = None
) -> torch.Tensor:
    """Returns an operand's part that matches the other operands: itself if it has the mark `common`, or its
    part taken from a whole operand. The dim of `common` belongs to a tensor of `ndim` dims; dims are aligned
    from the right, as in broadcasting."""
    assert common is not None
    dim = common.dim - ((ndim or tensor.ndim) - tensor.ndim)
    mark = mark_of(tensor)
    if mark is not None:
        if mark.dim != dim or mark.parts != common.parts:
            raise UnshardableCode(UnsplitReason(UnsplitKind.DIFFERENT_PARTS), mark.sources | common.sources)
        return tensor
    if dim < 0 or tensor.shape[dim] == 1:
        return mode.copy_to_shards(tensor)
    if tensor.shape[dim] != common.whole_size:
        raise UnshardableCode(UnsplitReason(UnsplitKind.OTHER_SIZE), common.sources)
    return mode.take_shard(mode.copy_to_shards(tensor), dim, common.parts)
