"""Two passes with dropout by one line, as in R-Drop, each with one layer that a loop calls three times."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, CLASSES = 16, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.drop(self.lin(x))))


class TwoPasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.again, self.head = Layer(), nn.Linear(WIDTH, CLASSES)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        for _ in range(3):
            x = self.again(x)
        return self.head(x)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        p, q = (self.predict(x) for _ in range(2))
        return F.cross_entropy(p, y) + F.cross_entropy(q, y) + (p - q).square().mean()


def model() -> nn.Module:
    return TwoPasses()


def dataset() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(WIDTH, generator=g), "y": torch.tensor(i % CLASSES)} for i in range(48)]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([s[key] for s in samples]) for key in ("x", "y")}
