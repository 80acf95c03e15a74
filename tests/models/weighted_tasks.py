"""Tasks with learned weights (Kendall et al. 2018): a sample has labels of some tasks, and the weight of a
task is part of the loss if any sample of the batch has its labels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU())
        self.depth, self.kind = nn.Linear(16, 1), nn.Linear(16, 5)
        self.log_variances = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(
        self,
        x: torch.Tensor,
        depth: torch.Tensor | None = None,
        depth_of: torch.Tensor | None = None,
        kind: torch.Tensor | None = None,
        kind_of: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden = self.body(x)
        losses = dict[int, torch.Tensor]()
        if depth is not None:
            losses[0] = F.mse_loss(self.depth(hidden[depth_of]).squeeze(-1), depth)
        if kind is not None:
            losses[1] = F.cross_entropy(self.kind(hidden[kind_of]), kind)
        weighted = [
            (-self.log_variances[i]).exp() * loss + self.log_variances[i] for i, loss in losses.items()
        ]
        return torch.stack(weighted).sum()


def model() -> nn.Module:
    return Weighted()


def dataset() -> list[dict[str, Any]]:
    def sample(i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        one: dict[str, Any] = {"x": torch.randn(8, generator=g)}
        return one | ({"depth": float(i % 7)} if i % 3 else {}) | ({"kind": i % 5} if i % 3 != 1 else {})

    return [sample(i) for i in range(90)]


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = {"x": torch.stack([s["x"] for s in samples])}
    for key in ("depth", "kind"):
        having = [i for i, s in enumerate(samples) if key in s]
        if having:
            batch[key] = torch.tensor([samples[i][key] for i in having])
            batch[f"{key}_of"] = torch.tensor(having)
    return batch
