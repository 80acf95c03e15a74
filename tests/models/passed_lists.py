"""Layers that add their balance losses to a list of their caller's, next to a frozen teacher."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(16), nn.Linear(16, 4)
        self.up, self.down = (
            nn.Parameter(torch.randn(4, 16, 24) / 5),
            nn.Parameter(torch.randn(4, 24, 16) / 5),
        )

    def forward(self, hidden: torch.Tensor, valid: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
        normed = self.norm(hidden)
        shares = self.router(normed).softmax(-1) * valid[..., None]
        losses.append((shares.sum(1) / valid.sum(1, keepdim=True)).pow(2).sum(-1))
        inner = F.gelu(torch.einsum("btd,edf->betf", normed, self.up))
        return hidden + torch.einsum("betf,efd,bte->btd", inner, self.down, shares)


class Distilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.layers = nn.ModuleList(Mixture() for _ in range(3))
        teacher = nn.Sequential(nn.Embedding(30, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 30))
        self.teacher = teacher.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        valid, hidden = ids != 0, self.embed(ids)
        losses: list[torch.Tensor] = []
        for layer in self.layers:
            hidden = layer(hidden, valid, losses)
        with torch.no_grad():
            wanted = self.teacher(ids).softmax(-1)
        loss = -(wanted * self.head(hidden).log_softmax(-1)).sum(-1)
        return (loss * valid).sum() / valid.sum() + 0.1 * torch.stack(losses).mean()


def model() -> nn.Module:
    return Distilled()


def dataset() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(1, 30, (4 + i * 5 % 9,), generator=g) for i in range(36)]


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"ids": nn.utils.rnn.pad_sequence(samples, batch_first=True)}
