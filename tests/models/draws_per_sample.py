"""Loops over samples that draw random numbers: each sample's patches are chosen at random, and predictions of
two layers are matched at drawn points by a function that reads values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, PATCHES, KEPT, QUERIES, POINTS = 8, 6, 4, 3, 5


class ChosenPatches(nn.Module):
    """Keeps some patches of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, WIDTH)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        h = self.project(patches)
        chosen = [torch.multinomial(torch.ones(PATCHES), KEPT) for _ in range(len(h))]
        return torch.stack([row[places] for row, places in zip(h, chosen, strict=True)]).flatten(1)


@torch.no_grad()
def match(curves: torch.Tensor, wanted: Sequence[torch.Tensor]) -> torch.Tensor:
    """Gives each sample the query that is nearest to its curve at drawn points."""
    found = list[int]()
    for own, curve in zip(curves, wanted, strict=True):
        points = torch.rand(1, POINTS)
        shift = torch.rand(1)
        at = (points + shift)[:, :, None] * torch.arange(1, WIDTH + 1)
        far = ((own[:, None] * at).sin() - (curve * at).sin()).square().sum((1, 2))
        found.append(min(range(QUERIES), key=far.tolist().__getitem__))
    return torch.tensor(found)


def matched_loss(layers: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(())
    for curves in layers:
        rows = curves[torch.arange(len(curves)), match(curves, wanted)]
        total = total + (F.dropout(rows, 0.3) - torch.stack(list(wanted))).square().sum()
    return total / len(wanted)


class Matcher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choice = ChosenPatches()
        self.first = nn.Sequential(nn.Linear(KEPT * WIDTH, WIDTH), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.queries = nn.Linear(WIDTH, QUERIES * WIDTH)

    def forward(self, patches: torch.Tensor, wanted: Sequence[torch.Tensor]) -> torch.Tensor:
        first = self.first(self.choice(patches))
        second = self.second(first)
        curves = [self.queries(h).unflatten(1, (QUERIES, WIDTH)) for h in (first, second)]
        return matched_loss(curves, wanted)


def model() -> nn.Module:
    return Matcher()


def dataset() -> list[dict[str, Any]]:
    generators = [torch.Generator().manual_seed(i) for i in range(24)]
    return [
        {"patches": torch.randn(PATCHES, 4, generator=g), "wanted": torch.rand(WIDTH, generator=g)}
        for g in generators
    ]


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "patches": torch.stack([s["patches"] for s in samples]),
        "wanted": [s["wanted"] for s in samples],
    }
