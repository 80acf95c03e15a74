"""A model that shares statistics of its batch with all ranks where it finds a process group, and an optimizer
with a rate for the number of ranks, as scripts for data parallelism have them."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import is_initialized

from tests.models import one_rate_for_all
from tests.models.one_rate_for_all import collate, dataset

__all__ = ["collate", "dataset", "model", "optimizer"]


class SharedNorm(nn.Module):
    """Divides by the root mean square, over all ranks if there are several, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = x.square().mean(-1, keepdim=True)
        if dist.is_available() and is_initialized():
            square = square.clone()
            dist.all_reduce(square)
        scaled = x * torch.rsqrt(square + 1e-5) * self.gain
        if scaled.requires_grad:
            scaled.register_hook(_average)
        return scaled


def _average(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / dist.get_world_size() if dist.is_initialized() else gradient


def model() -> nn.Module:
    made = one_rate_for_all.model()
    made.body = nn.Sequential(SharedNorm(), made.get_submodule("body"))
    return made


def optimizer(params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1 * int(os.environ.get("WORLD_SIZE", "1")))
