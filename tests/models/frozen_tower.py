"""A frozen tower that stays in training mode: it drops entries at random for each image, of which samples
have none to three."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

WIDTH, VOCABULARY, PIXELS, SIZE, IMAGE = 24, 40, 300, 64, 1


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.drop = (
            nn.Linear(PIXELS, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.Dropout(0.3),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.outer(self.drop(self.inner(images).relu()))


class Model(nn.Module):
    """Guesses each next token; an image's features stand for its token."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower().requires_grad_(False)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, images: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = self.embed(input_ids)
        if images is not None:
            hidden = hidden.masked_scatter((input_ids == IMAGE).unsqueeze(-1), self.tower(images))
        logits = self.head(hidden + self.mix(hidden).relu())
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def model() -> nn.Module:
    return Model()


class Samples(Dataset):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> dict[str, Any]:
        if str(i) == os.environ.get("FROZEN_TOWER_BAD"):
            raise ValueError("a sample that does not load")
        g = torch.Generator().manual_seed(i)
        count = i * 7 % 4
        ids = torch.randint(2, VOCABULARY, (6 + i % 5,), generator=g)
        ids[:count] = IMAGE
        sample = {"input_ids": ids, "labels": ids.clone()}
        return sample | ({"images": torch.randn(count, PIXELS, generator=g)} if count else {})


def dataset() -> Dataset:
    return Samples()
