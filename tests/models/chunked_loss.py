"""A loss over chunks of a flat batch, each recomputed in the backward: logits of all tokens never exist."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CHUNK = 8


class Chunked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(40, 12), nn.GRU(12, 12, batch_first=True)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 40, bias=False)

    def loss_of_chunk(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(hidden)).float()
        penalty = (logits.logsumexp(-1).square() * (labels != -100)).sum()
        return F.cross_entropy(logits, labels, reduction="sum") + 1e-3 * penalty

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.embed(input_ids))[0][:, :-1].reshape(-1, 12)
        labels = labels[:, 1:].reshape(-1)
        loss = 0.0
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            loss = loss + checkpoint(self.loss_of_chunk, hidden[part], labels[part], use_reentrant=False)
        return loss / (labels != -100).sum()


def model() -> nn.Module:
    return Chunked()


def sample(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    ids = torch.randint(1, 40, (int(torch.randint(5, 14, (), generator=g)),), generator=g)
    return {"input_ids": ids, "labels": torch.where(torch.arange(len(ids)) < 2, -100, ids)}


def dataset() -> list[dict[str, torch.Tensor]]:
    return [sample(i) for i in range(60)]
