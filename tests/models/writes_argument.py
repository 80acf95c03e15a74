"""Blocks that add to their argument in place and return it; forward reads the argument again afterwards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden += torch.tanh(self.mix(0.5 * hidden))
        return hidden


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Linear(4, 8), Adds(), Adds()
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x) * 2
        added = self.first(hidden)
        both = self.second(added * 1) + hidden
        return F.mse_loss(self.head(both).squeeze(-1), y)


def model() -> nn.Module:
    return Model()


def dataset() -> list[dict[str, torch.Tensor]]:
    def sample(i: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(4, generator=torch.Generator().manual_seed(i)), "y": torch.tensor(i % 3.0)}

    return [sample(i) for i in range(60)]
