"""What autograd keeps for a backward while a block runs without values, and what of it where units run
again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class Saved:
    """Counts each storage once that autograd keeps, except those of parameters and buffers, and knows in
    which unit's run that was. Without `grad` it only sees in which order units run."""

    def __init__(self, state: Mapping[str, torch.Tensor], grad: bool = True) -> None:
        self._grad = grad
        self._alive = list(state.values())  # keeps addresses from being used again
        self._state = {storage(t) for t in self._alive}
        self._sizes: dict[int, int] = {}  # of each storage that is saved
        self._outside: dict[int, int] = {}  # of each that is saved outside of units or goes into one
        self._inside: list[dict[int, int]] = []  # of each that a run of a unit saves
        self._depth = 0
        self._turns: list[nn.Module] = []  # the units as they ran
        self._alike = self._alike_outside = 0  # bytes of layers that did not run because they are like others

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note(tensor, self._sizes, self._inside[-1] if self.inside else self._outside)
        return tensor

    @property
    def inside(self) -> bool:
        """Whether a unit is running."""
        return self._depth > 0

    def is_state(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter or buffer, or a view of one."""
        return storage(tensor) in self._state

    @property
    def bytes(self) -> int:
        return sum(self._sizes.values()) + self._alike

    def kept(self) -> int:
        """Bytes kept where every unit runs again."""
        return sum(self._outside.values()) + self._alike_outside

    def in_turn(self, units: Sequence[nn.Module]) -> bool:
        """Whether each unit ran once at most, in the order in which they stand."""
        places = {unit: k for k, unit in enumerate(units)}
        turns = [places[unit] for unit in self._turns]
        return all(before < after for before, after in pairwise(turns))

    def add_alike(self, size: int, outside: int) -> None:
        """Count what a layer keeps, and what of it outside of units, that is like one that ran."""
        self._alike += size
        self._alike_outside += outside

    def working(self) -> int:
        """The most bytes that the second run of a unit adds to them."""
        return max(
            (sum(n for s, n in sizes.items() if s not in self._outside) for sizes in self._inside), default=0
        )

    @contextmanager
    def watching(self, units: Sequence[nn.Module]) -> Iterator[None]:
        """Notice when the units run."""
        hooks: list[RemovableHandle] = []
        for unit in units:
            hooks.append(unit.register_forward_pre_hook(self._enter, with_kwargs=True))
            hooks.append(unit.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.inside:
            for tensor in tree_leaves((args, kwargs)) if self._grad else ():
                if isinstance(tensor, torch.Tensor):
                    self._note(tensor, self._outside)
            self._inside.append({})
            self._turns.append(module)
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._depth -= 1

    def _note(self, tensor: torch.Tensor, *sizes: dict[int, int]) -> None:
        key = storage(tensor)
        if key not in self._state:
            self._alive.append(tensor)
            for table in sizes:
                table[key] = tensor.untyped_storage().nbytes()


def storage(tensor: torch.Tensor) -> int:
    """What tells storages apart."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
