"""Reconstructs features of tokens that a mask picks which forward draws in the size of hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class MaskedFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.block(self.embed(ids))
        mask = torch.rand_like(h[..., 0]) < 0.3
        error = (self.head(h) - F.one_hot(ids, 30)).pow(2).mean(-1)
        return (error * mask).sum() / mask.sum()


def model() -> nn.Module:
    torch.manual_seed(0)
    return MaskedFeatures()


def dataset() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [{"ids": torch.randint(1, 30, (20 + i % 5,), generator=g)} for i in range(48)]
