"""Notes which parameters forward changes while it runs: a teacher that follows the student's weights, a
clamp, a first batch that sets a scale.

A plan calls modules once for each micro-batch and on several ranks, and of the statements between modules it
keeps what computes the loss. So such a change is the plan's own only where a module makes it of its weights
alone, and making it again changes nothing (a clamp): then all ranks that have the weights make it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from secc.runtime.model.source_lines import (
    current_source_line,
    module_paths_by_id,
    running_module_and_lines,
)

_NOISE = 0.1  # relative


class WeightChanges(TorchDispatchMode):
    """Observes one forward. places: for each parameter that is written to, the path of the innermost running
    module and the line; the path is that of the whole model ("") for data that was replaced. results: what
    these parameters hold after it; repeated: after it has run again."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters = dict(model.named_parameters())
        self._paths = module_paths_by_id(model)
        self._names = {p.untyped_storage().data_ptr(): n for n, p in self._parameters.items() if p.numel()}
        self._data = {n: p.data for n, p in self._parameters.items()}
        self._before: dict[str, torch.Tensor] = {}
        self.places: dict[str, tuple[str, str]] = {}
        self.results: dict[str, torch.Tensor] = {}
        self.repeated: dict[str, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op, and notes the parameters that it writes to."""
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for i, a in enumerate(func._schema.arguments):
                if a.alias_info is not None and a.alias_info.is_write:
                    self._note_write(args[i] if i < len(args) else kwargs.get(a.name))
        return func(*args, **kwargs)

    def _note_write(self, written: Any) -> None:
        for tensor in tree_leaves(written):
            if not isinstance(tensor, torch.Tensor) or type(tensor) not in (torch.Tensor, nn.Parameter):
                continue
            name = self._names.get(tensor.untyped_storage().data_ptr())
            if name is not None and name not in self.places:
                self._before.setdefault(name, self._data[name].clone())
                self.places[name] = running_module_and_lines(self._paths)[0], current_source_line()

    def note_results(self) -> None:
        """Notes what the parameters hold that were changed, and which have other data than before forward
        (`p.data = …`)."""
        for name, parameter in self._parameters.items():
            if parameter.data_ptr() != self._data[name].data_ptr():
                self.places.setdefault(name, ("", ""))
        self.results = self._read_changed()

    def note_repeated(self) -> None:
        """Notes what they hold after forward has run again."""
        self.repeated = self._read_changed()

    def _read_changed(self) -> dict[str, torch.Tensor]:
        return {n: self._parameters[n].detach().clone() for n in self.places}

    @torch.no_grad()
    def move_weights(self) -> None:
        """Adds noise to all parameters: a teacher that is its student's copy does not move towards it."""
        generator = torch.Generator().manual_seed(0)
        for name, data in self._data.items():
            self._before.setdefault(name, data.clone())
            if data.is_floating_point():
                noise = torch.randn(data.shape, generator=generator).to(data)
                data.add_(noise * (_NOISE * data.abs().mean() + _NOISE**2))

    @torch.no_grad()
    def restore(self) -> None:
        """Gives all parameters back what they held."""
        for name, before in self._before.items():
            self._data[name].copy_(before)
        for name, data in self._data.items():
            if self._parameters[name].data_ptr() != data.data_ptr():
                self._parameters[name].data = data


@contextmanager
def watch_weights(model: nn.Module, moved: bool = False) -> Iterator[WeightChanges]:
    """Yields what observes the forward that runs in the block, at other weights if `moved`; afterwards
    parameters are as before it."""
    watch = WeightChanges(model)
    try:
        if moved:
            watch.move_weights()
        with watch:
            yield watch
    finally:
        watch.restore()
