"""Bad: forward branches on a value that one of its own modules computed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16))
        self.decoder = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(x)
        if hidden.sum().item() > 0:
            hidden = 2 * hidden
        return F.cross_entropy(self.decoder(hidden), labels)


def model() -> nn.Module:
    return Gated()


class Samples(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(i)
        return {"x": torch.randn(8, generator=g), "labels": torch.randint(0, 4, (), generator=g)}


def dataset() -> Dataset:
    return Samples()
