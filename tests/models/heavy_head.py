"""Six small layers and a head that costs more than half of them: as three stages, the last one has the head
alone, which forward reads by its weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

TOKENS, WIDTH = 100_003, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(6)), nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.head.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def model() -> nn.Module:
    return Model()


def dataset() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, TOKENS, (n,), generator=g) for n in [6, 9, 4] * 12]
    return [{"ids": i, "labels": i.clone()} for i in ids]
