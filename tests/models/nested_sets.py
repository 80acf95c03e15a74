"""Sets of rows as a nested tensor, padded in forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.score, self.out = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 5)

    def forward(self, items: list[torch.Tensor], grade: torch.Tensor) -> torch.Tensor:
        padded = torch.nested.to_padded_tensor(torch.nested.nested_tensor(items, layout=torch.jagged), 0.0)
        lengths = torch.tensor([len(i) for i in items])
        keep = torch.arange(padded.shape[1])[None] < lengths[:, None]
        hidden = self.rows(padded).tanh()
        weights = self.score(hidden).squeeze(-1).masked_fill(~keep, -1e9).softmax(1)
        return F.cross_entropy(self.out((weights[..., None] * hidden).sum(1)), grade)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Sets()


def dataset() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [
        {"items": torch.randn(2 + (i * 5) % 9, 8, generator=g), "grade": torch.tensor(i % 5)}
        for i in range(40)
    ]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, object]:
    return {"items": [s["items"] for s in samples], "grade": torch.stack([s["grade"] for s in samples])}
