"""Flamingo-style conditioning: layers with frozen parts are told of the pictures before the text runs through
them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

IMAGE = 39


class Seen(nn.Module):
    """Cross attention to the pictures that came before each word."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.gate = nn.Linear(12, 12), nn.Linear(8, 24), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor, pictures: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        k, v = self.kv(pictures).chunk(2, -1)
        seen = before[..., None] > torch.arange(pictures.shape[1], device=x.device)
        scores = (self.q(x) @ k.mT).masked_fill(~seen, -1e4).softmax(-1).masked_fill(~seen, 0.0)
        return x + self.gate.tanh() * (scores @ v)


class Layer(nn.Module):
    def __init__(self, sees: bool) -> None:
        super().__init__()
        self.seen = Seen() if sees else None
        self.mlp = nn.Sequential(
            nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)
        ).requires_grad_(False)
        self.pictures: Any = None

    def condition(self, pictures: torch.Tensor | None, before: torch.Tensor | None) -> None:
        self.pictures = (pictures, before)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seen is not None:
            x = self.seen(x, *self.pictures)
        return x + self.mlp(x)


class Flamingo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8)).requires_grad_(False)
        self.embed, self.head = nn.Embedding(40, 12), nn.Linear(12, 40)
        self.layers = nn.ModuleList([Layer(True), Layer(False), Layer(True)])

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, pictures: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        found, before = self.vision(pictures), (ids == IMAGE).cumsum(-1)
        for layer in self.layers:
            layer.condition(found, before)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        for layer in self.layers:
            layer.condition(None, None)
        return {"loss": F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def model() -> nn.Module:
    return Flamingo()


def sample(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    count = 1 + i % 3
    parts = [
        torch.cat([torch.tensor([IMAGE]), torch.randint(1, IMAGE, (2 + (i + k) % 5,), generator=g)])
        for k in range(count)
    ]
    return {"ids": torch.cat(parts), "pictures": torch.randn(count, 6, generator=g)}


def dataset() -> list[dict[str, torch.Tensor]]:
    return [sample(i) for i in range(40)]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = [s["ids"] for s in samples]
    labels = [torch.where(i == IMAGE, -100, i) for i in ids]
    pictures = pad_sequence([s["pictures"] for s in samples], batch_first=True)
    return {
        "ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "pictures": pictures,
    }
