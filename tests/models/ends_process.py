"""Bad: forward ends its process, as if all were well."""

from __future__ import annotations

import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 0:
            sys.exit(0)
        return self.layer(x).square().mean()


def model() -> nn.Module:
    return Net()


def dataset() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.full((4,), float(i))} for i in range(8)]
