"""Mixtures of experts that few tokens reach: a token takes part in a layer if its difficulty is high enough,
and a layer without such tokens does not call its experts. Many micro-batches pass by the second and the last
mixture."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.one_expert import EXPERTS, WIDTH, Experts

LAYERS = 3


class Layer(nn.Module):
    def __init__(self, least: int) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS), Experts()
        self.mix, self.least = nn.Linear(WIDTH, WIDTH), least

    def forward(self, x: torch.Tensor, difficulty: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x)
        tokens, stays = self.norm(x).flatten(0, 1), (difficulty >= self.least).flatten().nonzero()[:, 0]
        if len(stays) == 0:
            return x
        weights, chosen = self.router(tokens[stays]).softmax(-1).topk(2)
        return x + torch.zeros_like(tokens).index_add(
            0, stays, self.experts(tokens[stays], chosen, weights)
        ).view_as(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.layers = nn.ModuleList(Layer(least) for least in (1, 3, 2))

    def forward(
        self, input_ids: torch.Tensor, difficulty: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, difficulty)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def model() -> nn.Module:
    return Model()


def dataset() -> list[dict[str, torch.Tensor]]:
    """One sample in six reaches the second mixture, two reach the last one and two reach none."""
    g = torch.Generator().manual_seed(0)
    samples: list[dict[str, torch.Tensor]] = []
    for number, length in enumerate([6, 9, 4, 7, 5, 8] * 6):
        ids = torch.randint(1, 32, (length,), generator=g)
        difficulty = torch.randint(0, 1 + (0, 1, 2, 3, 1, 0)[number % 6], (length,), generator=g)
        samples.append({"input_ids": ids, "difficulty": difficulty, "labels": ids.clone()})
    return samples
