"""A projector that is called once for each picture, in a loop over the batch, as LFM2-VL's is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

IMAGE = 29


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Captioner(nn.Module):
    """`pictures` [n, 3, 6] are those of all samples, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleList([Layer(6), Layer(6)])
        self.projector, self.embed = nn.Linear(6, 10), nn.Embedding(30, 10)
        self.text = nn.ModuleList([Layer(10), Layer(10)])

    def forward(self, ids: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
        for layer in self.vision:
            pictures = layer(pictures)
        seen = torch.cat([self.projector(picture) for picture in pictures])
        x = self.embed(ids).masked_scatter((ids == IMAGE)[..., None], seen)
        for layer in self.text:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.captioner, self.head = Captioner(), nn.Linear(10, 30)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.captioner(ids, pictures))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def model() -> nn.Module:
    return Model()


def sample(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    text, count = torch.randint(1, IMAGE, (3 + i % 5,), generator=g), 1 + i % 3
    ids = torch.cat([torch.full((3 * count,), IMAGE), text])
    return {
        "ids": ids,
        "labels": torch.where(ids == IMAGE, -100, ids),
        "pictures": torch.randn(count, 3, 6, generator=g),
    }


def dataset() -> list[dict[str, torch.Tensor]]:
    return [sample(i) for i in range(36)]
