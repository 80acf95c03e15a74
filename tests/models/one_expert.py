"""A mixture in plain PyTorch: experts stacked in parameters of three dims, one for each token, next to a
shared one. The router's bias sends every token to the first expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

EXPERTS, WIDTH, INNER = 4, 16, 24


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 5)
        self.down_bias = nn.Parameter(torch.zeros(EXPERTS, WIDTH))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.up.shape[0]):
            rows, places = torch.where(chosen == expert)
            result = F.gelu(x[rows] @ self.up[expert]) @ self.down[expert] + self.down_bias[expert]
            out = out.index_add(0, rows, result * weights[rows, places, None])
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS), Experts()
        self.shared = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
        with torch.no_grad():
            self.router.bias.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(1)
        return x + (self.experts(tokens, chosen, weights) + self.shared(tokens)).view_as(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def model() -> nn.Module:
    return Model()


def dataset() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 32, (n,), generator=g) for n in [6, 9, 4] * 12]
    return [{"input_ids": i, "labels": i.clone()} for i in ids]
