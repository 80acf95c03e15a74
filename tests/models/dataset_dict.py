"""Bad: the splits of a dataset in place of one of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), labels)


def model() -> nn.Module:
    return Classifier()


def dataset() -> dict[str, Any]:
    samples = [{"x": torch.full((8,), float(i)), "labels": torch.tensor(i % 4)} for i in range(8)]
    return {"train": samples, "test": samples}
