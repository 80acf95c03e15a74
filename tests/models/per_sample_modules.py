"""A loop over samples in forward of the whole model, which calls its modules for each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(30, 10), nn.Linear(10, 10), nn.Linear(10, 30)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        losses = []
        for i, n in enumerate(lengths.tolist()):
            logits = self.head(self.layer(self.embed(ids[i, :n])).relu())
            losses.append(F.cross_entropy(logits, labels[i, :n]))
        return torch.stack(losses).mean()


def model() -> nn.Module:
    return Model()


def sample(i: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 29, (3 + i % 5,), generator=torch.Generator().manual_seed(i))
    return {"ids": ids, "labels": ids.clone(), "lengths": torch.tensor(len(ids))}


def dataset() -> list[dict[str, torch.Tensor]]:
    return [sample(i) for i in range(36)]
