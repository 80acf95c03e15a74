"""Two towers and a loss that compares every sample of the batch with every other; COMPARED names the loss."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        self.text = nn.Sequential(
            *(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2))
        )
        self.out = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, y: torch.Tensor, kind: torch.Tensor) -> dict[str, torch.Tensor]:
        a, b = F.normalize(self.image(x), dim=-1), F.normalize(self.out(self.text(y)), dim=-1)
        return getattr(self, os.environ.get("COMPARED", "clip"))(a, b, kind)

    def clip(self, a: torch.Tensor, b: torch.Tensor, kind: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.scale.exp() * a @ b.T
        own = torch.arange(len(a), device=a.device)
        right = (scores.argmax(-1) == own).float().mean()
        loss = (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
        return {"loss": loss + 0.1 * (a - b).pow(2).sum(-1).mean(), "right": right}

    def siglip(self, a: torch.Tensor, b: torch.Tensor, kind: torch.Tensor) -> dict[str, torch.Tensor]:
        signs = 2 * torch.eye(len(a)) - 1
        return {"loss": -F.logsigmoid(signs * (self.scale * a @ b.T - 1)).sum() / len(a)}

    def supervised(self, a: torch.Tensor, b: torch.Tensor, kind: torch.Tensor) -> dict[str, torch.Tensor]:
        """Samples of one kind belong together (Khosla et al. 2020)."""
        scores = self.scale * a @ a.T - 1e4 * torch.eye(len(a), device=a.device)
        same = (kind[:, None] == kind[None]).float() - torch.eye(len(a), device=a.device)
        found = (scores.log_softmax(-1) * same).sum(-1) / same.sum(-1).clamp(min=1)
        return {"loss": -found.mean() + F.mse_loss(a, b)}

    def joined(self, a: torch.Tensor, b: torch.Tensor, kind: torch.Tensor) -> dict[str, torch.Tensor]:
        """Candidates of two kinds, one behind the other: those of other samples are negatives, too."""
        scores = self.scale.exp() * a @ torch.cat([b, F.normalize(b.flip(-1) + 1, dim=-1)]).T
        return {"loss": F.cross_entropy(scores, torch.arange(len(a), device=a.device))}

    def hardest(self, a: torch.Tensor, b: torch.Tensor, kind: torch.Tensor) -> dict[str, torch.Tensor]:
        """The two hardest negatives of each sample."""
        scores = a @ b.T
        others = scores.masked_fill(torch.eye(len(a), dtype=torch.bool), -2)
        return {"loss": F.relu(0.2 + others.topk(2, -1).values - scores.diagonal()[:, None]).mean()}

    def spread(self, a: torch.Tensor, b: torch.Tensor, kind: torch.Tensor) -> dict[str, torch.Tensor]:
        """Variances and covariances over the batch (VICReg, Bardes et al. 2022)."""
        centred = a - a.mean(0)
        covariance = centred.T @ centred / (len(a) - 1)
        off = covariance.pow(2).sum() - covariance.diagonal().pow(2).sum()
        return {"loss": F.mse_loss(a, b) + F.relu(1 - (a.var(0) + 1e-4).sqrt()).mean() + off}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Towers()


class Pairs(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(i)
        return {
            "x": torch.randn(8, generator=g),
            "y": torch.randn(6, generator=g),
            "kind": torch.randint(0, 3, (), generator=g),
        }


def dataset() -> Dataset:
    return Pairs()


def eval_dataset() -> list[dict[str, torch.Tensor]]:
    return [Pairs()[i] for i in range(23)]


def optimizer(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)  # pyright: ignore[reportArgumentType]
