"""The model of `tools.chaos`: small, with a part for some samples, glue that values of the inputs decide,
dropout and a schedule of the learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

WORDS, PICTURE, WIDTH = 50, 49, 16  # token 49 marks the place of a picture


class Repeats(nn.Module):
    """Predicts the next word; the encoder's result for a picture takes the places of its tokens 49."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.encoder = nn.Linear(16, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.words, self.dropout = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.1)
        self.decoder, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(
        self,
        ids: torch.Tensor,
        labels: torch.Tensor,
        picture: torch.Tensor | None = None,
        times: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden = self.words(ids)
        if picture is not None and times is not None:
            seen = self.encoder(self.pixels(picture).relu())
            seen = torch.cat([seen[i : i + 1].expand(n, -1) for i, n in enumerate(times.tolist())])
            hidden = hidden.masked_scatter((ids == PICTURE)[..., None].expand_as(hidden), seen)
        logits = self.head(self.dropout(self.decoder(hidden)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def model() -> nn.Module:
    return Repeats()


class Captions(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        words = torch.arange(i, i + 5 + i % 4) % PICTURE
        if i % 2 == 0:
            return {"ids": words, "labels": words}
        times = 1 + i % 3
        ids = torch.cat([torch.full((times,), PICTURE), words])
        labels = ids.where(ids != PICTURE, -100)
        return {"ids": ids, "labels": labels, "picture": torch.full((1, 16), i / 64), "times": times}


def dataset() -> Captions:
    return Captions()


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    def pad(key: str, value: int) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence([s[key] for s in samples], batch_first=True, padding_value=value)

    batch = {"ids": pad("ids", 0), "labels": pad("labels", -100)}
    if seen := [s for s in samples if "picture" in s]:
        batch["picture"] = torch.cat([s["picture"] for s in seen])
        batch["times"] = torch.tensor([s["times"] for s in seen])
    return batch


def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
