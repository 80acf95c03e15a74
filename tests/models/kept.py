"""A tower keeps what it has seen on itself, where the text tower looks for it, and a layer hands on the
positions' bias that all share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

IMAGE = 29


class Layer(nn.Module):
    """The first of a stack makes the bias for all of it, as T5's does."""

    def __init__(self, width: int, first: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.near = nn.Embedding(9, 1) if first else None

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if bias is None:
            assert self.near is not None
            places = torch.arange(x.shape[1], device=x.device)
            bias = self.near((places[:, None] - places).clamp(-4, 4) + 4).permute(2, 0, 1)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out((q @ k.mT + bias).softmax(-1) @ v), bias


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.kept: torch.Tensor | None = None

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            pictures = pictures + F.gelu(layer(pictures))
        self.kept = pictures.mean(1, keepdim=True)
        return pictures


class Text(nn.Module):
    """The head is called next to the layers, so that these are blocks."""

    def __init__(self, vision: Vision) -> None:
        super().__init__()
        self.seen, self.embed, self.head = nn.Linear(6, 10), nn.Embedding(30, 10), nn.Linear(10, 30)
        self.layers = nn.ModuleList([Layer(10, i == 0) for i in range(3)])
        self.vision = [vision]  # no submodule

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, bias = self.embed(ids) + self.seen(self.vision[0].kept), None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return self.head(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision = Vision()
        self.text, self.bright = Text(self.vision), nn.Linear(6, 1)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
        bright = self.bright(self.vision(pictures)).square().mean()
        return F.cross_entropy(self.text(ids).flatten(0, 1), labels.flatten()) + bright


def model() -> nn.Module:
    return Model()


def sample(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    ids = torch.randint(1, IMAGE, (3 + i % 5,), generator=g)
    return {"ids": ids, "labels": ids.clone(), "pictures": torch.randn(3, 6, generator=g)}


def dataset() -> list[dict[str, torch.Tensor]]:
    return [sample(i) for i in range(36)]
