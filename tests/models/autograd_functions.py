"""A frozen encoder, a student that quantises its states, and a domain head behind a gradient reversal.

The user's autograd functions stand between modules: one under a name of its own, one with several results,
one under autocast.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.scale * gradient, None


reverse = Reverse.apply


class Quantise(torch.autograd.Function):
    """Straight through: rounds forward, passes the gradient on."""

    @staticmethod
    def forward(x: torch.Tensor, levels: int = 4) -> torch.Tensor:
        return torch.round(x * levels) / levels

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Gate(torch.autograd.Function):
    """Several results, of which one has no gradient, and an argument that is no tensor."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, y: torch.Tensor, kind: str
    ) -> tuple[torch.Tensor, str, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, y)
        signs = x > 0
        ctx.mark_non_differentiable(signs)
        return x * y, kind, signs, x + y

    @staticmethod
    def backward(
        ctx: Any, product: torch.Tensor, kind: None, signs: torch.Tensor, total: torch.Tensor
    ) -> tuple[Any, ...]:
        x, y = ctx.saved_tensors
        return 2 * product * y + total, product * x + 3 * total, None


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def layers() -> nn.ModuleList:
            return nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))

        self.encoder = nn.Sequential(nn.Linear(8, 16), *layers()).requires_grad_(False)
        self.student = nn.Sequential(nn.Linear(16, 16), *layers())
        self.classes, self.domains = nn.Linear(16, 4), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, label: torch.Tensor, domain: torch.Tensor) -> torch.Tensor:
        seen = self.encoder(x)
        hidden = self.student(seen)
        product, _kind, signs, total = Gate.apply(Quantise.apply(hidden), hidden, "both")
        hidden = hidden + 0.1 * product + 0.1 * total * signs
        hidden[:, 0] = 0.0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            reversed_ = reverse(hidden, 0.5)
        near = F.mse_loss(Quantise.apply(hidden, 8), seen)
        return (
            F.cross_entropy(self.classes(hidden), label)
            + F.cross_entropy(self.domains(reversed_), domain)
            + near
        )


class Samples(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(i)
        return {
            "x": torch.randn(8, generator=g),
            "label": torch.randint(4, (), generator=g),
            "domain": torch.randint(3, (), generator=g),
        }


def model() -> nn.Module:
    return Student()


def dataset() -> Dataset:  # type: ignore[type-arg]
    return Samples()
