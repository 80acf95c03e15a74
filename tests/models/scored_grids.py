"""Texts with a class for each token, some with pictures of different grids. Forward reads a grid as numbers,
so that its glue has other ops in every batch; it returns counts and classes next to the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

IMAGE = 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.words, self.body, self.head = (
            nn.Sequential(nn.Linear(6, 8), nn.Tanh()),
            nn.Embedding(30, 8),
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
            nn.Linear(8, 3),
        )
        self.places = nn.Parameter(torch.randn(9, 6))

    def forward(
        self,
        ids: torch.Tensor,
        labels: torch.Tensor,
        patches: torch.Tensor | None = None,
        grids: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        hidden = self.words(ids)
        if patches is not None and grids is not None:
            places = [self.places[: rows * columns] for rows, columns in grids.tolist()]
            seen = self.vision(patches + torch.cat(places))
            hidden = hidden.masked_scatter((ids == IMAGE)[..., None].expand_as(hidden), seen)
        logits = self.head(self.body(hidden))
        predicted, counted = logits.argmax(-1), labels != -100
        return {
            "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100),
            "right": ((predicted == labels) & counted).sum(),
            "count": counted.sum(),
            "predicted": predicted,
        }


def model() -> nn.Module:
    torch.manual_seed(3)
    return Model()


def sample(number: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(number)
    grid = torch.randint(1, 4, (2,), generator=g)
    count = int(grid.prod()) * (number % 2)
    text = torch.randint(2, 30, (int(torch.randint(2, 7, (), generator=g)),), generator=g)
    ids = torch.cat([torch.full((count,), IMAGE), text])
    labels = torch.where(ids == IMAGE, -100, ids % 3)
    picture = {"patches": torch.randn(count, 6, generator=g), "grids": grid[None]} if count else {}
    return {"ids": ids, "labels": labels} | picture


def dataset() -> list[dict[str, torch.Tensor]]:
    return [sample(i) for i in range(24)]


def eval_dataset() -> list[dict[str, torch.Tensor]]:
    return [sample(100 + i) for i in range(9)]


def collate(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    fill = {"ids": 0, "labels": -100}
    return {
        key: pad_sequence([s[key] for s in samples], True, fill[key])
        if key in fill
        else torch.cat([s[key] for s in samples if key in s])
        for key in {key: None for s in samples for key in s}
    }


def metrics(
    outputs: dict[str, float], predicted: list[torch.Tensor], labels: list[torch.Tensor]
) -> dict[str, float]:
    right = sum(int((p == t).sum()) for p, t in zip(predicted, labels, strict=True))
    return {"summed": outputs["right"] / outputs["count"], "gathered": right / outputs["count"]}
