"""Bad: a contrastive loss whose negatives are the other samples of the batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 16)
        self.right = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = F.normalize(self.left(x), dim=-1) @ F.normalize(self.right(y), dim=-1).T
        return F.cross_entropy(10 * scores, torch.arange(scores.shape[0], device=scores.device))


def model() -> nn.Module:
    return Pairs()


class Samples(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(i)
        return {"x": torch.randn(8, generator=g), "y": torch.randn(8, generator=g)}


def dataset() -> Dataset:
    return Samples()
