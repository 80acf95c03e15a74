"""Boxes found by queries that a method of the model matches with the boxes of each image, between modules:
the number of boxes of the batch divides."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CLASSES, QUERIES = 4, 6


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 32, 4, 4), nn.Flatten(2))
        self.queries = nn.Parameter(torch.randn(QUERIES, 32, generator=torch.Generator().manual_seed(0)))
        self.decoder = nn.MultiheadAttention(32, 4, batch_first=True)
        self.classes, self.boxes = nn.Linear(32, CLASSES + 1), nn.Linear(32, 4)

    @torch.no_grad()
    def match_queries(
        self, scores: torch.Tensor, boxes: torch.Tensor, targets: list[Any]
    ) -> list[torch.Tensor]:
        """For each image the queries of its boxes: the nearest that is free."""
        found = list[torch.Tensor]()
        for probabilities, own, target in zip(scores.softmax(-1), boxes, targets, strict=True):
            cost = torch.cdist(own, target["boxes"], p=1) - probabilities[:, target["labels"]]
            taken = list[int]()
            for column in cost.T.tolist():
                taken.append(min((c, q) for q, c in enumerate(column) if q not in taken)[1])
            found.append(torch.tensor(taken))
        return found

    def forward(self, image: torch.Tensor, targets: list[Any]) -> torch.Tensor:
        patches = self.encoder(image).transpose(1, 2)
        found = self.decoder(self.queries.expand(len(image), -1, -1), patches, patches)[0]
        scores, boxes = self.classes(found), self.boxes(found).sigmoid()
        queries = self.match_queries(scores, boxes, targets)
        classes, distance = torch.full(scores.shape[:2], CLASSES), 0.0
        for i, (chosen, target) in enumerate(zip(queries, targets, strict=True)):
            classes[i, chosen] = target["labels"]
            distance = distance + (boxes[i, chosen] - target["boxes"]).abs().sum()
        count = max(sum(len(t["labels"]) for t in targets), 1)
        return F.cross_entropy(scores.transpose(1, 2), classes) + 5 * distance / count


def model() -> nn.Module:
    return Detector()


def dataset() -> list[dict[str, torch.Tensor]]:
    samples = list[dict[str, torch.Tensor]]()
    for i in range(48):
        g = torch.Generator().manual_seed(i)
        count = int(torch.randint(1, 4, (), generator=g))
        labels = torch.randint(CLASSES, (count,), generator=g)
        boxes = torch.rand(count, 4, generator=g)
        samples.append({"image": torch.randn(3, 16, 16, generator=g), "labels": labels, "boxes": boxes})
    return samples


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    targets = [{"labels": s["labels"], "boxes": s["boxes"]} for s in samples]
    return {"image": torch.stack([s["image"] for s in samples]), "targets": targets}
