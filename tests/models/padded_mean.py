"""A model whose padded positions count: the loss is a mean over all positions, so every micro-batch needs the
global batch's width."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 5)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(input_ids))
        kept = (labels != 3).float()
        losses = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten().clamp(min=0), reduction="none"
        ).view_as(labels)
        return (losses * kept).sum() / kept.sum() + logits.square().mean()


def model() -> nn.Module:
    return Tagger()


class Samples(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(i)
        length = int(torch.randint(4, 20, (), generator=g))
        return {
            "input_ids": torch.randint(1, 40, (length,), generator=g),
            "labels": torch.randint(0, 5, (length,), generator=g),
        }


def dataset() -> Dataset:
    return Samples()
