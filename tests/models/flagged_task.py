"""A second task with a learned weight. Samples without its inputs get rows of zeros and the flag 0 if another
sample of the batch has them, so every input has rows of all samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
        self.scene = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 5))
        self.log_variance = nn.Parameter(torch.tensor(0.3))

    def forward(
        self,
        x: torch.Tensor,
        target: torch.Tensor,
        scene: torch.Tensor | None = None,
        kind: torch.Tensor | None = None,
        has_scene: torch.Tensor | None = None,
    ) -> torch.Tensor:
        loss = F.mse_loss(self.body(x), target)
        if scene is not None:
            assert kind is not None and has_scene is not None
            of_sample = F.cross_entropy(self.scene(scene), kind, reduction="none")
            mean = (of_sample * has_scene).sum() / has_scene.sum()
            loss = loss + (-self.log_variance).exp() * mean + self.log_variance
        return loss


def model() -> nn.Module:
    return Flagged()


def dataset() -> list[dict[str, Any]]:
    def sample(i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        one: dict[str, Any] = {"x": torch.randn(8, generator=g), "target": torch.randn(3, generator=g)}
        return one | ({"scene": torch.randn(6, generator=g), "kind": i % 5} if i % 3 else {})

    return [sample(i) for i in range(90)]


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = {key: torch.stack([s[key] for s in samples]) for key in ("x", "target")}
    if any("scene" in s for s in samples):
        batch["scene"] = torch.stack([s.get("scene", torch.zeros(6)) for s in samples])
        batch["kind"] = torch.tensor([s.get("kind", 0) for s in samples])
        batch["has_scene"] = torch.tensor([float("scene" in s) for s in samples])
    return batch
