"""An actor and a critic in one loss: forward freezes the critic while the actor's part is computed, so that
its gradients go through the critic to the actor alone."""

from __future__ import annotations

import torch
from torch import nn


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.scale = nn.Linear(6, 8), nn.Parameter(torch.tensor(0.7))
        self.actor = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.critic = nn.Sequential(nn.Linear(11, 16), nn.ReLU(), nn.Linear(16, 1))

    def judge(self, hidden: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.scale * self.critic(torch.cat([hidden, action], -1)).squeeze(-1)

    def forward(self, x: torch.Tensor, action: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(x)
        loss = (self.judge(hidden, action) - value).pow(2).mean()
        self.critic.requires_grad_(False)
        self.scale.requires_grad = False
        hidden = hidden.detach()
        loss = loss - (self.judge(hidden, self.actor(hidden)) - self.judge(hidden, action)).mean()
        self.critic.requires_grad_(True)
        self.scale.requires_grad = True
        return loss


def model() -> nn.Module:
    return ActorCritic()


def dataset() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"x": (6,), "action": (3,), "value": ()}
    return [{k: torch.randn(shape, generator=g) for k, shape in shapes.items()} for _ in range(24)]


def optimizer(params: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)
