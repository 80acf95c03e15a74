"""A mixture of experts in plain PyTorch: the router's scores leave each layer, and the balance loss is made
of them over the batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Experts(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.router(x)
        weights, chosen = scores.softmax(-1).topk(2)
        gates = torch.zeros_like(scores).scatter(-1, chosen, weights)
        return x + sum(gates[..., k, None] * expert(x) for k, expert in enumerate(self.experts)), scores


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Experts(16, 4) for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, balance = self.embed(input_ids), 0.0
        for layer in self.layers:
            x, scores = layer(x)
            shares = F.one_hot(scores.topk(2).indices, 4).float().mean((0, 1, 2))
            balance = balance + 4 * (shares * scores.softmax(-1).mean((0, 1))).sum()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.1 * balance


def model() -> nn.Module:
    return Model()


def dataset() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 32, (n,), generator=g) for n in [6, 9] * 12]
    return [{"input_ids": i, "labels": i.clone()} for i in ids]
