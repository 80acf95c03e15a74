"""A picture tower and a text model under an optimizer that divides by the norm of all gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class NormalizedDescent(torch.optim.Optimizer):
    """Gradient descent by steps of length `lr`."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in moved])
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norm, alpha=group["lr"])


class Captioner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.Linear(64, 16))
        self.embed, self.body, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, picture: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = self.embed(ids)
        if picture is not None:
            rows = ids[:, 0] == 1
            hidden = (
                hidden
                + torch.zeros_like(hidden[:, 0]).masked_scatter(rows[:, None], self.tower(picture))[:, None]
            )
        scores = self.head(torch.tanh(self.body(hidden)))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)


def model() -> nn.Module:
    return Captioner()


def dataset() -> list[dict[str, torch.Tensor]]:
    samples = list[dict[str, torch.Tensor]]()
    for i in range(48):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(2, 32, (int(torch.randint(3, 9, (), generator=g)),), generator=g)
        sample = {"ids": ids, "labels": ids.clone()}
        if i % 3 == 0:
            ids[0] = 1
            sample |= {"picture": torch.randn(1, 12, generator=g)}
        samples.append(sample)
    return samples


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = nn.utils.rnn.pad_sequence
    batch = {
        "ids": pad([s["ids"] for s in samples], batch_first=True),
        "labels": pad([s["labels"] for s in samples], batch_first=True, padding_value=-100),
    }
    pictures = [s["picture"] for s in samples if "picture" in s]
    return batch | ({"picture": torch.cat(pictures)} if pictures else {})


def optimizer(params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return NormalizedDescent([p for _, p in params], lr=0.05)
