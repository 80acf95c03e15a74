"""Boxes in pictures: a list of dicts has those of each sample, as many as it has, and a loop over it adds up
the loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, MOST = 8, 5  # numbers of a place, places of a picture


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Asked(nn.Module):
    """What is known of each box, averaged over a sample's: is given the list of dicts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(6, WIDTH)

    def forward(self, targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        return torch.stack([self.kinds(target["kinds"]).mean(0) for target in targets])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.asked = nn.Linear(6, WIDTH), Asked()
        self.layers, self.boxes, self.kinds = (
            nn.ModuleList([Layer(), Layer()]),
            nn.Linear(WIDTH, 4),
            nn.Linear(WIDTH, 6),
        )

    def forward(
        self, pictures: torch.Tensor, targets: list[dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        x = self.stem(pictures) + self.asked(targets)[:, None]
        for layer in self.layers:
            x = layer(x)
        boxes, kinds = self.boxes(x), self.kinds(x)
        far = right = torch.zeros(())
        for i, target in enumerate(targets):
            count = len(target["boxes"])
            far = far + F.l1_loss(boxes[i, :count], target["boxes"], reduction="sum")
            right = right + F.cross_entropy(kinds[i, :count], target["kinds"])
        return {"loss": far / len(targets) + right / len(targets)}


def model() -> nn.Module:
    return Model()


def sample(i: int) -> dict[str, torch.Tensor]:
    g, count = torch.Generator().manual_seed(i), 1 + i % MOST
    kinds = torch.randint(0, 6, (count,), generator=g)
    return {
        "picture": torch.randn(MOST, 6, generator=g),
        "boxes": torch.rand(count, 4, generator=g),
        "kinds": kinds,
    }


def dataset() -> list[dict[str, torch.Tensor]]:
    return [sample(i) for i in range(36)]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    targets = [{"boxes": s["boxes"], "kinds": s["kinds"]} for s in samples]
    return {"pictures": torch.stack([s["picture"] for s in samples]), "targets": targets}
