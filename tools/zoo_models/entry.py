"""What the zoo knows of one architecture: how to build it small, what its samples look like, how they become
a batch.

An entry is what a user would put into a model file; `source` writes that file, so that the zoo goes the
user's way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

Sample = dict[str, Any]
Make = Callable[[torch.Generator], Sample]

_SOURCE = '''"""{name}: a small random model of the zoo."""

from tools.zoo_models import entry

_ENTRY = entry("{name}")
model, dataset = _ENTRY.model, _ENTRY.dataset
{collate}'''


@dataclass(frozen=True)
class Entry:
    """An architecture of the zoo: `model` builds it, `make` draws one sample, `collate` is None for secc's
    default."""

    name: str
    family: str
    model: Callable[[], nn.Module]
    make: Make
    collate: Callable[[Sequence[Sample]], Sample] | None = None

    def dataset(self) -> Dataset[Sample]:
        """64 samples, the same in every process."""
        return Samples(self.make)

    def source(self) -> str:
        """The text of a model file for this entry."""
        return _SOURCE.format(name=self.name, collate="collate = _ENTRY.collate\n" if self.collate else "")


class Samples(Dataset[Sample]):
    """A map-style dataset whose sample i is drawn by generator i."""

    def __init__(self, make: Make, length: int = 64) -> None:
        self._make, self._length = make, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> Sample:
        return self._make(torch.Generator().manual_seed(i))
