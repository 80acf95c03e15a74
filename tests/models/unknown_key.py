"""Bad: samples have a key that forward does not take."""

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


class Samples(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(i)
        return {
            "x": torch.randn(8, generator=g),
            "labels": torch.randint(0, 4, (), generator=g),
            "weight": torch.ones(()),
        }


def dataset() -> Dataset:
    return Samples()
