"""What rules share: their form, the first argument's mark, and how whole operands give their part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from secc.runtime.tensor_parallel.rules.mark import Mark, Refused, mark, set_mark, sources_of

if TYPE_CHECKING:
    from secc.runtime.tensor_parallel.shape_mode import Shapes

Args = Sequence[Any]
Rule = Callable[["Shapes", Any, Args, dict[str, Any], list[Mark]], Any]


def own_mark(found: list[Mark], args: Args) -> Mark:
    """The mark of the first argument."""
    first = mark(args[0])
    if first is None:
        raise Refused("a part is given where a whole tensor is changed", sources_of(found))
    return first


def places(found: Mark, *entries: int) -> tuple[tuple[int, int], ...]:
    """Entries of the marked dim as fractions of it."""
    return tuple((entry, found.size) for entry in entries if 0 < entry < found.size)


def all_marked(tensors: Any, found: Mark) -> Any:
    """Tensors with the same mark."""
    return tuple(set_mark(t, found) for t in tensors)


def entered(mode: Shapes, values: Any) -> Any:
    """Operands, those that are whole with gradients that are summed."""
    return tree_map(lambda t: mode.enter(t) if isinstance(t, torch.Tensor) and mark(t) is None else t, values)


def like(mode: Shapes, tensor: torch.Tensor, common: Mark | None, ndim: int | None = None) -> torch.Tensor:
    """An operand that has the same part as the others: its own, or taken from a whole one; dims are counted
    from the right of `ndim`."""
    assert common is not None
    dim = common.dim - ((ndim or tensor.ndim) - tensor.ndim)
    own = mark(tensor)
    if own is not None:
        if own.dim != dim or own.parts != common.parts:
            raise Refused("operands have different parts", own.sources | common.sources)
        return tensor
    if dim < 0 or tensor.shape[dim] == 1:
        return mode.enter(tensor)
    if tensor.shape[dim] != common.size:
        raise Refused("a part meets a tensor of another size", common.sources)
    return mode.part_of(mode.enter(tensor), dim, common.parts)
