"""Three tasks in a batch: each head gets the rows of its samples, if there are any, and its loss is the mean
over them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

TASKS = 3


class MultiTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.trunk = nn.Embedding(20, 16), nn.Linear(16, 16)
        widths = {"regress": 1, "labels": 4, "rank": 1}
        self.heads = nn.ModuleDict({name: nn.Linear(16, width) for name, width in widths.items()})
        self.cuts = nn.Parameter(torch.tensor([-1.0, 0.0, 1.0]))

    def forward(self, ids: torch.Tensor, task: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        valid = (ids != 0)[..., None]
        hidden = (torch.tanh(self.trunk(self.embed(ids))) * valid).sum(1) / valid.sum(1)
        loss = hidden.new_zeros(())
        for t, (name, head) in enumerate(self.heads.items()):
            rows = task == t
            if not rows.any():
                continue
            found, wanted = head(hidden[rows]), goal[rows]
            if name == "regress":
                loss = loss + F.huber_loss(found.squeeze(-1), wanted[:, 0])
            elif name == "labels":
                loss = loss + 0.5 * F.binary_cross_entropy_with_logits(found, wanted.sigmoid())
            else:
                above = (wanted[:, :1] > torch.arange(3, device=wanted.device)).float()
                loss = loss + 2.0 * F.binary_cross_entropy_with_logits(found - self.cuts, above)
        return loss


def model() -> nn.Module:
    return MultiTask()


def dataset() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [
        {
            "ids": torch.randint(1, 20, (3 + i * 3 % 7,), generator=g),
            "task": torch.tensor((i * 7 + i // 5) % TASKS),
            "goal": torch.randn(4, generator=g),
        }
        for i in range(36)
    ]


def optimizer(params: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)
