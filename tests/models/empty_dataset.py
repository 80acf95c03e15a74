"""Bad: dataset() has no samples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), labels)


def model() -> nn.Module:
    return Classifier()


class Nothing(Dataset):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        raise IndexError(i)


def dataset() -> Dataset:
    return Nothing()
