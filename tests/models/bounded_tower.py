"""A regressor with layers that may bound what they compute by a value of all samples of a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LIMIT = 1000.0


class BoundedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h + self.inner(h).tanh()
        if h.norm() > LIMIT:
            h = h * 0.5
        return h


class BoundedRegressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(BoundedLayer(), BoundedLayer())
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.head(self.tower(x))
        return F.cross_entropy(out.transpose(1, 2), y)


def model() -> nn.Module:
    torch.manual_seed(0)
    return BoundedRegressor()


def dataset() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)

    def make(i: int) -> dict[str, Any]:
        n = 3 + i % 4
        y = torch.randint(0, 3, (n,), generator=generator)
        return {"x": torch.randn(n, 6, generator=generator), "y": y}

    return [make(i) for i in range(24)]


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    n = max(len(s["x"]) for s in samples)
    return {
        "x": torch.stack([F.pad(s["x"], (0, 0, 0, n - len(s["x"]))) for s in samples]),
        "y": torch.stack([F.pad(s["y"], (0, n - len(s["y"])), value=-100) for s in samples]),
    }
