"""Losses that are added up in a loop over samples, each of its own length, as detection and ranking heads
have them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 10


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.score = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 30), nn.Linear(WIDTH, 1)
        self.teacher, self.layers = (
            nn.ModuleList([Layer(), Layer()]).requires_grad_(False),
            nn.ModuleList([Layer(), Layer()]),
        )

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = taught = self.embed(ids)
        for layer, wise in zip(self.layers, self.teacher, strict=True):
            x, taught = layer(x), wise(taught)
        logits, scores = self.head(x), self.score(x)[..., 0]
        loss = 0
        for i, n in enumerate(lengths.tolist()):
            loss = loss + F.cross_entropy(logits[i, :n], labels[i, :n], reduction="sum")
        spread = [scores[i, :n].softmax(0).square().sum() for i, n in enumerate(lengths.tolist())]
        near = F.mse_loss(x, taught.detach(), reduction="none").mean(-1)
        mask = labels != -100
        return loss / lengths.sum() + 0.1 * torch.stack(spread).mean() + (near * mask).sum() / mask.sum()


class Trained(nn.Module):
    """Forward of the whole model is none of the loss's."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Model()

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.reader(**batch)}


def model() -> nn.Module:
    return Trained()


def sample(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    ids = torch.randint(1, 29, (3 + i % 5,), generator=g)
    return {"ids": ids, "labels": ids.clone(), "lengths": torch.tensor(len(ids))}


def dataset() -> list[dict[str, torch.Tensor]]:
    return [sample(i) for i in range(36)]
