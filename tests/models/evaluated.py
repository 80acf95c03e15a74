"""Captions with pictures for every second sample, dropout in modules and in forward itself, ragged texts, two
evaluation sets, and further scalars and tensors that metrics() makes ratios, an F1 and a variance of."""

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
        hidden, seen = self.words(ids), {}
        if picture is not None:
            seen["seen"] = self.vision(picture)
            hidden = hidden.masked_scatter((ids == 1)[..., None].expand_as(hidden), seen["seen"])
        hidden = F.dropout(self.body(self.drop(hidden)), DROPOUT, self.training)
        logits = self.head(hidden)
        ce = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        size = hidden[labels != -100].square().sum(-1).mean()
        right = (logits.argmax(-1) == labels).sum()
        counted = (labels != -100)[..., None]
        pooled = (hidden * counted).sum(1) / counted.sum(1)
        scalars = {"loss": ce + 0.01 * size, "ce": ce, "right": right, "count": counted.sum()}
        return scalars | seen | {"predictions": logits.argmax(-1), "pooled": pooled}


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


def macro_f1(predicted: torch.Tensor, labels: torch.Tensor) -> float:
    """F1 of each class of two 1-D tensors, averaged over the classes that occur."""
    scores = []
    for label in torch.cat([predicted, labels]).unique():
        right = ((predicted == label) & (labels == label)).sum()
        scores.append(2 * right / ((predicted == label).sum() + (labels == label).sum()))
    return float(torch.stack(scores).mean())


def metrics(
    outputs: dict[str, float],
    predictions: list[torch.Tensor],
    labels: list[torch.Tensor],
    pooled: list[torch.Tensor],
    seen: list[torch.Tensor],
) -> dict[str, float]:
    """`labels` is an input, the others are forward's. `seen` has the rows of a sample's pictures."""
    counted = torch.cat(labels) != -100
    return {
        "accuracy": outputs["right"] / outputs["count"],
        "perplexity": math.exp(outputs["ce"]),
        "f1": macro_f1(torch.cat(predictions)[counted], torch.cat(labels)[counted]),
        "spread": float(torch.stack(pooled).var(0).sum()),
        "third": float(pooled[2].norm()),
        "pictures": sum(len(rows) for rows in seen),
        "brightness": float(torch.cat(seen).double().std()),
    }
