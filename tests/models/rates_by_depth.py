"""A stack of layers with learning rates that decay from the last layer to the first, and a schedule for each
group of the optimizer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 16), nn.Linear(16, 5)
        self.layers = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden), label)


def model() -> nn.Module:
    return Classifier()


def dataset() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(6, generator=g), "label": torch.tensor(i % 5)} for i in range(24)]


def optimizer(params: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    depths = {n: int(n.split(".")[1]) + 1 if n.startswith("layers") else 0 for n, _ in params}
    top = max(depths.values()) + 1
    depths |= {n: top for n in depths if n.startswith("head")}
    groups = [[p for n, p in params if depths[n] == d] for d in range(top + 1)]
    return torch.optim.SGD([{"params": ps, "lr": 0.2 * 0.5 ** (top - d)} for d, ps in enumerate(groups)])


def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Lower layers warm up later."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda step, d=d: min(1.0, (step + 1) / (7 - d)) for d in range(6)]
    )
