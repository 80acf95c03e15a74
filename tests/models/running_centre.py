"""A student follows a frozen teacher, and the teacher's outputs are centred by their running mean (DINO). The
loss module keeps the mean in a buffer, and puts a new tensor in its place in each forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Projector(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.last = nn.Linear(width, 16)

    def forward(self, view: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(view))


class CentredLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(16))

    def forward(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = ((teacher - self.centre) / 0.04).softmax(-1)
            self.centre = self.centre * 0.9 + teacher.mean(0) * 0.1
        return -(wanted * F.log_softmax(student / 0.1, -1)).sum(-1).mean()


class Follower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Projector(32), Projector(48).requires_grad_(False)
        self.criterion = CentredLoss()

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.criterion(self.student(one), self.teacher(other))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Follower()


def dataset() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [{"one": torch.randn(12, generator=g), "other": torch.randn(12, generator=g)} for _ in range(48)]
