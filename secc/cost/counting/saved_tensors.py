"""Tracks what autograd saves for the backward while a block runs without values, inside and outside of
recomputation units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from secc.cost.model.live_bytes import storage_key


class SavedTensorsTracker:
    """Counts every storage that autograd saves once, except parameters and buffers, and records in which unit
    it was saved.

    Without `grad`, only the order in which units run is recorded.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], grad: bool = True) -> None:
        self._grad = grad
        self._kept_alive = list(state.values())  # addresses of freed storages would be reused
        self._state_storages = {storage_key(t) for t in self._kept_alive}
        self._sizes: dict[int, int] = {}  # bytes by storage, of all saved ones
        self._outside: dict[int, int] = {}  # saved outside of units, or input of one
        self._inside: list[dict[int, int]] = []  # saved by each run of a unit
        self._saves_by_run: list[int] = []  # how often each of them saved anything, parameters too
        self._depth = 0
        self._units_run: list[nn.Module] = []  # in the order of their runs
        self._repeated_bytes = self._repeated_outside_bytes = 0  # of skipped layers

    def pack_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pack hook of `torch.autograd.graph.saved_tensors_hooks`: record a tensor of any shape, and
        return it unchanged."""
        if self.is_inside_unit:
            self._saves_by_run[-1] += 1
        self._record_storage(tensor, self._sizes, self._inside[-1] if self.is_inside_unit else self._outside)
        return tensor

    @property
    def is_inside_unit(self) -> bool:
        """Whether a unit is running."""
        return self._depth > 0

    def place_in_unit(self) -> tuple[int, int]:
        """The number of the last run of a unit, and of its saves up to now."""
        return len(self._saves_by_run) - 1, self._saves_by_run[-1]

    def has_saved_after(self, place: tuple[int, int]) -> bool:
        """Whether the run of a unit has saved anything after this place."""
        run, saves = place
        return self._saves_by_run[run] > saves

    def is_parameter_or_buffer(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of any shape is a parameter or buffer, or a view of one."""
        return storage_key(tensor) in self._state_storages

    @property
    def saved_bytes(self) -> int:
        """Bytes saved by a plain run."""
        return sum(self._sizes.values()) + self._repeated_bytes

    def bytes_kept_outside_units(self) -> int:
        """Bytes kept if every unit is recomputed: inputs of units, and what is saved outside of them."""
        return sum(self._outside.values()) + self._repeated_outside_bytes

    def ran_in_order(self, units: Sequence[nn.Module]) -> bool:
        """Whether each unit ran at most once, in the order of `units`."""
        positions = {unit: k for k, unit in enumerate(units)}
        run_positions = [positions[unit] for unit in self._units_run]
        return all(before < after for before, after in pairwise(run_positions))

    def add_repeated_layer(self, size: int, outside: int) -> None:
        """Add bytes saved by a skipped layer, and those of them outside of units."""
        self._repeated_bytes += size
        self._repeated_outside_bytes += outside

    def largest_unit_bytes(self) -> int:
        """The most bytes that one unit saves in its second run."""
        return max(
            (sum(n for s, n in sizes.items() if s not in self._outside) for sizes in self._inside), default=0
        )

    @contextmanager
    def watch_units(self, units: Sequence[nn.Module]) -> Iterator[None]:
        """Record runs of the units within the context."""
        hooks: list[RemovableHandle] = []
        for unit in units:
            hooks.append(unit.register_forward_pre_hook(self._enter_unit, with_kwargs=True))
            hooks.append(unit.register_forward_hook(self._leave_unit, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter_unit(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.is_inside_unit:
            for tensor in tree_leaves((args, kwargs)) if self._grad else ():
                if isinstance(tensor, torch.Tensor):
                    self._record_storage(tensor, self._outside)
            self._inside.append({})
            self._saves_by_run.append(0)
            self._units_run.append(module)
        self._depth += 1

    def _leave_unit(self, module: nn.Module, args: Any, result: Any) -> None:
        self._depth -= 1

    def _record_storage(self, tensor: torch.Tensor, *sizes: dict[int, int]) -> None:
        key = storage_key(tensor)
        if key not in self._state_storages:
            self._kept_alive.append(tensor)
            for table in sizes:
                table[key] = tensor.untyped_storage().nbytes()
