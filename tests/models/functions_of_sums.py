"""Losses that are functions of sums over the batch: the scale-invariant logarithmic loss of depth estimation
(Eigen et al. 2014), Dice over the batch, a floor under a mean; and a root of a mean for the log."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Depth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.GELU())
        self.depth, self.parts = nn.Linear(16, 1), nn.Linear(16, 3)
        self.weight = nn.Parameter(torch.tensor(0.7))

    def forward(
        self, x: torch.Tensor, depth: torch.Tensor, counts: torch.Tensor, part: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """x: [B, S, 6]; the others [B, S]."""
        hidden = self.encoder(x)
        found = self.depth(hidden).squeeze(-1)
        gap = (found - depth.log())[counts]
        scale_invariant = torch.sqrt(gap.square().mean() - 0.85 * gap.mean() ** 2)
        chosen = self.parts(hidden).softmax(-1) * counts[..., None]
        wanted = F.one_hot(part, 3) * counts[..., None]
        shared = (chosen * wanted).sum((0, 1))
        dice = 1 - ((2 * shared + 1) / (chosen.sum((0, 1)) + wanted.sum((0, 1)) + 1)).mean()
        error = F.mse_loss(found, depth)
        floored = torch.clamp(error, min=0.1) + self.weight * torch.log(gap.abs().mean() + 1)
        return {"loss": 3 * scale_invariant + dice + floored, "root": error.sqrt()}


def model() -> nn.Module:
    return Depth()


def sample(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    return {
        "x": torch.randn(5, 6, generator=g),
        "depth": torch.rand(5, generator=g) * 3 + 0.1,
        "counts": torch.rand(5, generator=g) > 0.3,
        "part": torch.randint(0, 3, (5,), generator=g),
    }


def dataset() -> list[dict[str, torch.Tensor]]:
    return [sample(i) for i in range(60)]


def eval_dataset() -> list[dict[str, torch.Tensor]]:
    return [sample(1000 + i) for i in range(13)]
