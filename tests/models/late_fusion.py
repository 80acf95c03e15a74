"""Sorts texts. A picture, where a text has one, adds to its scores, so the loss has more modules behind it in
some batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

WORDS, WIDTH, CLASSES, SIDE = 50, 16, 6, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)),
            nn.Linear(WIDTH, CLASSES),
        )
        self.tower = nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), nn.GELU(), nn.Flatten(2))
        self.picture_head = nn.Linear(WIDTH, CLASSES)

    def forward(
        self,
        ids: torch.Tensor,
        label: torch.Tensor,
        picture: torch.Tensor | None = None,
        row: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x)
        scores = self.head(x.mean(1))
        if picture is not None and row is not None:
            scores = scores.index_add(0, row, self.picture_head(self.tower(picture).mean(-1)))
        return F.cross_entropy(scores, label, ignore_index=-1)


def model() -> nn.Module:
    torch.manual_seed(1)
    return Model()


class Samples(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        sample: dict[str, Any] = {
            "ids": torch.randint(0, WORDS, (6,), generator=g),
            "label": torch.tensor(-1 if i % 5 == 0 else i % CLASSES),
        }
        if i % 3:
            sample["picture"] = torch.randn(3, SIDE, SIDE, generator=g)
        return sample


def dataset() -> Dataset:
    return Samples()


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = {key: torch.stack([s[key] for s in samples]) for key in ("ids", "label")}
    if rows := [i for i, s in enumerate(samples) if "picture" in s]:
        batch |= {"picture": torch.stack([samples[i]["picture"] for i in rows]), "row": torch.tensor(rows)}
    return batch
