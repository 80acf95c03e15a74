"""Bad: a stream without samples."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), labels)


def model() -> nn.Module:
    return Classifier()


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from ()


def dataset() -> IterableDataset:
    return Stream()
