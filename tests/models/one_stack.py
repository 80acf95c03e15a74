"""A stack of layers in a module of its own, between an embedding and a head: one block for a coarse capture,
opened down to its layers for pipeline stages."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

VOCABULARY, WIDTH, LAYERS = 32, 64, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            Body(),
            nn.Linear(WIDTH, VOCABULARY),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(self.words(ids)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def model() -> nn.Module:
    return Model()


class Samples(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"ids": torch.randint(VOCABULARY, (8,), generator=torch.Generator().manual_seed(i))}


def dataset() -> Samples:
    return Samples()
