"""Follows, through the glue of a recording, tensors that random numbers and inputs alone decide.

On a rank their values differ, so glue counts them as unknown. But a mask among them selects rows, and those
that it selects now give the result a shape, like those of any other batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

aten = torch.ops.aten
_SHAPE_ONLY_OPS = {  # what takes no value of its first argument
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
}
_MAX_ENTRIES = 1 << 20  # larger tensors are no masks, and not worth their memory


class DrawnValues:
    """The present values of tensors of any shape that random numbers and inputs alone decide, by tensor."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the tensor, kept alive

    def keep_value(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Keep the values of a tensor (any shape) as those of `tensor`."""
        self._values[id(tensor)] = tensor, value

    def find_value(self, tensor: Any) -> torch.Tensor | None:
        """Return the values that are kept of a tensor; None if there are none."""
        return self._values[id(tensor)][1] if id(tensor) in self._values else None

    def find_arguments(
        self, func: Any, args: Any, kwargs: Any, is_unknown: Callable[[torch.Tensor], bool]
    ) -> tuple[Any, Any] | None:
        """Return the arguments of an op, with values in place of tensors. None for an op that takes no drawn
        tensor, or one that is unknown for another reason."""
        takes_shape_only = func in _SHAPE_ONLY_OPS
        if not takes_shape_only and not self._values:
            return None
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not takes_shape_only and not any(id(t) in self._values for t in tensors):
            return None
        if any(t.numel() > _MAX_ENTRIES for t in tensors):
            return None
        is_mutable = func._schema.is_mutable
        found = dict[int, torch.Tensor]()
        for t in tensors:
            value = self.find_value(t)
            if value is None and not is_unknown(t):
                value = t.detach().clone() if is_mutable else t.detach()
            elif value is None and takes_shape_only:
                value = torch.empty(t.shape, dtype=t.dtype)
            if value is None:
                return None
            found[id(t)] = value
        return pytree.tree_map(lambda t: found[id(t)] if isinstance(t, torch.Tensor) else t, (args, kwargs))

    def compute_results(self, func: Any, arguments: tuple[Any, Any], out: Any) -> None:
        """Compute an op from the values of its arguments, and keep these values of its result `out`."""
        with torch.no_grad():
            values = func(*arguments[0], **arguments[1])
        pairs = zip(pytree.tree_leaves(out), pytree.tree_leaves(values), strict=True)
        for tensor, value in pairs:
            if isinstance(tensor, torch.Tensor):
                self.keep_value(tensor, value)

    def forget_memory(self, tensor: torch.Tensor) -> None:
        """Forget the values of all tensors in the memory of this one, where unknown values are written."""
        value = self.find_value(tensor)
        if value is not None:
            memory = value.untyped_storage()._cdata
            self._values = {
                key: kept for key, kept in self._values.items() if kept[1].untyped_storage()._cdata != memory
            }


@contextmanager
def drawn_with_seed(seed: int) -> Iterator[None]:
    """Random ops inside draw on CPUs what they draw from this seed; the generator is left as it was."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
