"""A frozen teacher follows its student: a hook of the optimizer moves it, and finds both in the model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 16


class Taught(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen = self.head(self.student(x * mask))
        with torch.no_grad():
            whole = self.teacher(x)
        return F.mse_loss(seen, whole) - 0.1 * seen[:, 0].mean()


class Found:
    net: Taught


def model() -> nn.Module:
    torch.manual_seed(0)
    Found.net = Taught()
    return Found.net


def optimizer(params: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(params, lr=1e-2)

    @torch.no_grad()
    def follow(*_: Any) -> None:
        pairs = zip(Found.net.teacher.parameters(), Found.net.student.parameters(), strict=True)
        for theirs, own in pairs:
            theirs.data.lerp_(own.data, 0.3)

    made.register_step_post_hook(follow)
    return made


def dataset() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, generator=g), "mask": (torch.arange(8) % 3 != i % 3).float()} for i in range(48)
    ]
