"""Captions with pictures for every second sample, dropout in modules and in forward itself, ragged texts, two
evaluation sets, and further scalars that metrics() makes ratios of."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

DROPOUT = 0.2


def layers(count: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(DROPOUT)) for _ in range(count))
    )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.words, self.body, self.head = (
            layers(3),
            nn.Embedding(30, 8),
            layers(4),
            nn.Linear(8, 30),
        )
        self.drop = nn.Dropout(DROPOUT)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, picture: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        hidden = self.words(ids)
        if picture is not None:
            hidden = hidden.masked_scatter((ids == 1)[..., None].expand_as(hidden), self.vision(picture))
        hidden = F.dropout(self.body(self.drop(hidden)), DROPOUT, self.training)
        logits = self.head(hidden)
        ce = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        size = hidden[labels != -100].square().sum(-1).mean()
        right = (logits.argmax(-1) == labels).sum()
        return {"loss": ce + 0.01 * size, "ce": ce, "right": right, "count": (labels != -100).sum()}


def model() -> nn.Module:
    return Model()


class Captions(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(self.seed + i)
        ids = torch.randint(2, 30, (int(torch.randint(3, 12, (), generator=g)),), generator=g)
        labels = ids.clone()
        labels[0] = -100
        if i % 2 == 0:
            return {"ids": ids, "labels": labels}
        ids[1] = 1
        return {"ids": ids, "labels": labels, "picture": torch.randn(1, 8, generator=g)}


def dataset() -> Captions:
    return Captions(40, 0)


def eval_dataset() -> dict[str, Captions]:
    return {"short": Captions(5, 1000), "long": Captions(23, 2000)}


def metrics(outputs: dict[str, float]) -> dict[str, float]:
    return {"accuracy": outputs["right"] / outputs["count"], "perplexity": math.exp(outputs["ce"])}
