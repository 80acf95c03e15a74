"""Rules for functions that work entry by entry, or along dims that must be whole."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from secc.runtime.plan.unsplit_reason import UnsplitKind, UnsplitReason
from secc.runtime.tensor_parallel.rules.common import (
    FunctionArguments,
    copy_whole_operands,
    first_mark,
    match_shard,
)
from secc.runtime.tensor_parallel.rules.mark import ShardMark, UnshardableCode, mark_of, set_mark, sources_of

if TYPE_CHECKING:
    from secc.runtime.tensor_parallel.shape_mode import WholeShapeMode


def along_dim_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    """Functions that mix or reduce along dims, given as the second argument or as `dim`."""
    mark, names = first_mark(marks, args), ("dim", "axis")
    given = next((kwargs[n] for n in names if n in kwargs), args[1] if len(args) > 1 else None)
    dims = [given] if isinstance(given, int) else list(given) if isinstance(given, tuple | list) else None
    if dims is None or mark.dim in [d % args[0].ndim for d in dims]:
        raise UnshardableCode(UnsplitReason(UnsplitKind.MIXES_ENTRIES, func.__name__), sources_of(marks))
    out = func(*args, **kwargs)
    gone = sum(d % args[0].ndim < mark.dim for d in dims)

    def mark_result(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        return set_mark(t, mark if t.ndim == args[0].ndim else mark.at_dim(mark.dim - gone))

    return tree_map(mark_result, out)


def normalization_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    """layer_norm and rms_norm, which mix the last dims."""
    mark, shape = first_mark(marks, args), args[1] if len(args) > 1 else kwargs["normalized_shape"]
    if mark.dim >= args[0].ndim - len(shape):
        raise UnshardableCode(UnsplitReason(UnsplitKind.MIXES_ENTRIES, func.__name__), sources_of(marks))
    return set_mark(func(*copy_whole_operands(mode, args), **copy_whole_operands(mode, kwargs)), mark)


def dropout_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    """Dropout draws the rank's part of the whole tensor's random numbers."""
    mark = first_mark(marks, args)
    p, training = (
        args[i] if len(args) > i else kwargs.get(k, d) for i, k, d in ((1, "p", 0.5), (2, "training", True))
    )
    with mode.draw_shard(mark) if p and training else nullcontext():
        out = func(*args, **kwargs)
    return set_mark(out, mark)


def refusing_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    """Functions that cannot run on parts."""
    raise UnshardableCode(UnsplitReason(UnsplitKind.NO_RULE, func.__name__), sources_of(marks))


def elementwise_rule(
    mode: WholeShapeMode, func: Any, args: FunctionArguments, kwargs: dict[str, Any], marks: list[ShardMark]
) -> Any:
    """Functions that work entry by entry on operands broadcast from the right; whole operands yield their
    part."""
    operands = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    most = max(t.ndim for t in operands)
    first = next(m for m in map(mark_of, operands) if m is not None) if any(map(mark_of, operands)) else None
    if first is None:
        raise UnshardableCode(
            UnsplitReason(UnsplitKind.NO_RULE, str(getattr(func, "__name__", func))), sources_of(marks)
        )
    owner = next(t for t in operands if mark_of(t) is first)
    common = first.at_dim(first.dim + most - owner.ndim)
    local = [match_shard(mode, a, common, most) if isinstance(a, torch.Tensor) else a for a in args]
    named = {
        k: match_shard(mode, a, common, most) if isinstance(a, torch.Tensor) else a for k, a in kwargs.items()
    }
    out = func(*local, **named)
    if not isinstance(out, torch.Tensor):
        if isinstance(out, bool | int | float | tuple):
            raise UnshardableCode(
                UnsplitReason(UnsplitKind.READS_VALUES, str(getattr(func, "__name__", func))),
                sources_of(marks),
            )
        return out
    shapes = [t.shape for t in (*local, *named.values()) if isinstance(t, torch.Tensor)]
    if out.shape != torch.broadcast_shapes(*shapes):
        raise UnshardableCode(
            UnsplitReason(UnsplitKind.NO_RULE, str(getattr(func, "__name__", func))), sources_of(marks)
        )
    return set_mark(out, ShardMark(common.dim, common.parts, sources_of(marks)))
