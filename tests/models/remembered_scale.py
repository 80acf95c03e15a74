"""A forecast of series: one module scales them before the layers and scales results back behind them, with
the mean and deviation that it has kept on itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

STEPS, AHEAD, WIDTH = 12, 4, 16


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))
        self.mean, self.deviation = torch.zeros(1, 1), torch.ones(1, 1)

    def forward(self, x: torch.Tensor, back: bool = False) -> torch.Tensor:
        if back:
            return (x - self.bias) / self.weight * self.deviation + self.mean
        self.mean, self.deviation = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
        return (x - self.mean) / self.deviation * self.weight + self.bias


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner, self.head = Scale(), nn.Linear(STEPS, WIDTH), nn.Linear(WIDTH, AHEAD)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, series: torch.Tensor, ahead: torch.Tensor) -> dict[str, Any]:
        x = self.inner(self.scale(series))
        for layer in self.layers:
            x = layer(x)
        error = (self.scale(self.head(x), back=True) - ahead).abs()
        return {"loss": error.mean(), "worst": error.detach().square().mean()}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Forecast()


class Series(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(i)
        walk = torch.randn(STEPS + AHEAD, generator=g).cumsum(0) * (1 + i % 5) + i
        return {"series": walk[:STEPS], "ahead": walk[STEPS:]}


def dataset() -> Series:
    return Series()
