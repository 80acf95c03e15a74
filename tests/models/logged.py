"""Distillation whose forward returns scalars in addition to the loss: parts of it, counts, an accuracy,
some as numbers, one that no sum gives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student, self.head = layers().requires_grad_(False), layers(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, label: torch.Tensor, weight: torch.Tensor) -> dict[str, object]:
        hidden = self.student(x)
        scores = self.head(hidden)
        ce, mse = F.cross_entropy(scores, label), F.mse_loss(hidden, self.teacher(x))
        right = scores.argmax(-1) == label
        found: dict[str, object] = {
            "loss": ce + 0.5 * mse,
            "ce": ce.detach().item(),
            "mse": mse,
            "sum": ce + mse + 1.0,
            "logits": scores,
            "rate": 0.1,
        }
        found |= {
            "right": right.sum().item(),
            "percent": round(100 * right.sum().item() / len(label), 12),
            "total": ce.item() + mse.item() / 2,
            "accuracy": right[label != 0].float().mean(),
            "weight": weight.sum(),
        }
        return found | {"bias": self.head.bias.norm(), "spread": hidden.std()}


def model() -> nn.Module:
    torch.manual_seed(1)
    return Model()


def dataset() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [
        {
            "x": torch.randn(8, generator=g),
            "weight": torch.rand((), generator=g),
            "label": torch.tensor(i * 7 % 4),
        }
        for i in range(24)
    ]
