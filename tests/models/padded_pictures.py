"""Captions with none to three pictures. `collate` pads them to one tensor `[B, n, 6]`, so that texts without
pictures get rows of zeros if another sample of the batch has some."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

PICTURE = 39


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3)))
        self.keys, self.query, self.gate = (
            nn.Linear(6, 24),
            nn.Linear(12, 12),
            nn.Parameter(torch.tensor(0.3)),
        )
        self.embed, self.head = nn.Embedding(40, 12), nn.Linear(12, 40)
        self.decoder = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)))

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, pictures: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embed(ids)
        if pictures is not None:
            b, n = pictures.shape[:2]
            found = self.tower(pictures.view(b * n, 6)).view(b, n, 6)
            k, v = self.keys(found).chunk(2, -1)
            seen = (ids == PICTURE).cumsum(1)[..., None] > torch.arange(n, device=ids.device)
            scores = (self.query(x) @ k.mT).masked_fill(~seen, -1e4).softmax(-1).masked_fill(~seen, 0.0)
            x = x + self.gate.tanh() * (scores @ v)
        logits = self.head(self.decoder(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def model() -> nn.Module:
    return Model()


def sample(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    parts = [torch.randint(1, PICTURE, (2 + i % 5,), generator=g)]
    for k in range(i % 4):
        parts += [torch.tensor([PICTURE]), torch.randint(1, PICTURE, (1 + (i + k) % 3,), generator=g)]
    pictures = {"pictures": torch.randn(i % 4, 6, generator=g)} if i % 4 else {}
    return {"ids": torch.cat(parts), **pictures}


def dataset() -> list[dict[str, torch.Tensor]]:
    return [sample(i) for i in range(40)]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = [s["ids"] for s in samples]
    labels = [torch.where(i == PICTURE, -100, i) for i in ids]
    batch = {
        "ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }
    if any("pictures" in s for s in samples):
        pictures = [s.get("pictures", torch.zeros(0, 6)) for s in samples]
        batch["pictures"] = pad_sequence(pictures, batch_first=True)
    return batch
