"""A detector: queries are matched with the boxes of their own image by the values of the predictions, in a
function between modules, as DETR's Hungarian matching does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

WIDTH, QUERIES, CLASSES = 16, 5, 3
WEIGHTS = torch.tensor([1.0, 1.0, 1.0, 0.2])  # the last class: no object


class Config:
    """What the loss reads of the model."""

    box_weight = 5.0


@torch.no_grad()
def match(scores: torch.Tensor, boxes: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
    """Gives each box of an image the cheapest query that is free."""
    cost = torch.cdist(boxes, target["boxes"], p=1) - scores.softmax(-1)[:, target["classes"]]
    free, chosen = list(range(QUERIES)), list[int]()
    columns: Any = cost.t().tolist()
    for column in columns:
        chosen.append(min(free, key=lambda q, column=column: column[q]))
        free.remove(chosen[-1])
    return torch.tensor(chosen)


def detection_loss(
    scores: torch.Tensor, boxes: torch.Tensor, targets: Sequence[dict[str, torch.Tensor]], config: Config
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    wanted = torch.full(scores.shape[:2], CLASSES)
    distance = torch.zeros(())
    for i, target in enumerate(targets):
        chosen = match(scores[i], boxes[i], target)
        wanted[i, chosen] = target["classes"]
        distance = distance + (boxes[i, chosen] - target["boxes"]).abs().sum()
    own = F.cross_entropy(scores.transpose(1, 2), wanted, WEIGHTS)
    count = max(sum(len(t["boxes"]) for t in targets), 1)
    return own + config.box_weight * distance / count, {"class_loss": own}


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.encoder = nn.Sequential(nn.Linear(12, WIDTH), nn.GELU(), nn.Linear(WIDTH, QUERIES * WIDTH))
        self.classes, self.boxes = nn.Linear(WIDTH, CLASSES + 1), nn.Linear(WIDTH, 4)

    def forward(self, pixels: torch.Tensor, targets: Sequence[dict[str, torch.Tensor]]) -> dict[str, Any]:
        queries = self.encoder(pixels).unflatten(1, (QUERIES, WIDTH)).tanh()
        scores, boxes = self.classes(queries), self.boxes(queries).sigmoid()
        loss, details = detection_loss(scores, boxes, targets, self.config)
        return {"loss": loss, "details": details}


class Images(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        count = int(torch.randint(1, QUERIES, (), generator=g))
        target = {
            "classes": torch.randint(0, CLASSES, (count,), generator=g),
            "boxes": torch.rand(count, 4, generator=g),
        }
        return {"pixels": torch.randn(12, generator=g), "targets": target}


def model() -> nn.Module:
    return Detector()


def dataset() -> Dataset[dict[str, Any]]:
    return Images()


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "pixels": torch.stack([s["pixels"] for s in samples]),
        "targets": [s["targets"] for s in samples],
    }
