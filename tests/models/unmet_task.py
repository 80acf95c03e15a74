"""A block that centers its results over the batch for a task that none of the first samples has: only one of
all samples has it, and the id is compared inside of the block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

RARE_TASK = 7


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, *conditions: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.inner(self.norm(x)))
        if (conditions[0] == RARE_TASK).any():
            y = y - y.mean(0, keepdim=True)
        return x + y


class ReadCentered(Centered):
    """Reads each task in Python."""

    def forward(self, x: torch.Tensor, *conditions: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.inner(self.norm(x)))
        if RARE_TASK in conditions[0].tolist():
            y = y - y.mean(0, keepdim=True)
        return x + y


class TaggedReader(nn.Module):
    def __init__(self, layer: type[nn.Module] = Centered) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.blocks = nn.ModuleList(layer() for _ in range(2))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, task)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def model() -> nn.Module:
    torch.manual_seed(0)
    return TaggedReader()


def dataset() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    samples = list[dict[str, torch.Tensor]]()
    for i in range(3000):
        ids = torch.randint(1, 20, (4 + i % 5,), generator=g)
        task = torch.tensor(RARE_TASK if i == 2987 else i % 5)
        samples.append({"ids": ids, "labels": ids.clone(), "task": task})
    return samples


def optimizer(params: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)
