"""An exponential moving average of the trained weights (EMA).

After every optimizer step the average becomes `decay * average + (1 - decay) * weights`; it starts as the
weights of the first step's beginning. Each rank averages what its optimizer updates, a slice of a sharded
parameter or a float32 master, so the average is as sharded as the optimizer, and the same under every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secc.runtime.parameters.checkpoint import AVERAGE_PREFIX, OptimizedSlices


class WeightAverage:
    """The average of this rank's trained weights. `slices`: what its optimizer updates, and the parts of the
    user's parameters that these are. `values`: the memory with the values of one of them, which is the host's
    for an offloaded master; its average is then computed there."""

    def __init__(
        self,
        decay: float,
        slices: OptimizedSlices,
        values: Callable[[nn.Parameter], torch.Tensor] = lambda p: p.data,
    ) -> None:
        self.decay, self._slices, self._values = decay, slices, values
        # At least float32: a 16-bit average would not move.
        self._averages: dict[nn.Parameter, torch.Tensor] = {
            p: values(p).to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in slices
        }

    @torch.no_grad()
    def update(self) -> None:
        """Takes in the weights after an optimizer step."""
        for param, average in self._averages.items():
            average.lerp_(self._values(param).to(average.dtype), 1 - self.decay)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Puts the averages in place of this rank's trained weights, and restores these bit by bit at the
        end. The caller sends them to replicas and into gathered parameters."""
        kept = {p: self._values(p).clone() for p in self._averages}
        with torch.no_grad():
            for param, average in self._averages.items():
                self._values(param).copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for param, values in kept.items():
                    self._values(param).copy_(values)

    def state(self, owned: Collection[str]) -> dict[str, Any]:
        """Returns this rank's part of the averages of the parameters `owned`, for a checkpoint."""
        from secc.runtime.parameters.sliced_tensor_store import TensorSlice

        return {
            f"{AVERAGE_PREFIX}{part.name}": TensorSlice(
                self._averages[p].view(-1), part.shape, part.start, part.cut
            )
            for p, part in self._slices.items()
            if part.name in owned
        }

    def load(self, checkpoint: Path) -> bool:
        """Reads the averages from a checkpoint. Returns False, and changes nothing, if it has none.
        Collective."""
        from secc.runtime.parameters import sliced_tensor_store

        stored = sliced_tensor_store.stored_entries(checkpoint)
        has_averages = any(key.startswith(AVERAGE_PREFIX) for key in stored)
        target = self.state({part.name for part in self._slices.values()}) if has_averages else {}
        sliced_tensor_store.read_entries(checkpoint, {k: v for k, v in target.items() if k in stored})
        return has_averages
