"""Documents as lists of paragraphs of uneven lengths: the return statement calls a module for each paragraph
of each document, and joins the results. The module attends over the words of a paragraph."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(words))
        return self.second(x + torch.softmax(x @ x.T, -1) @ x)


class Rater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, **batch: Any) -> torch.Tensor:
        return F.mse_loss(
            torch.cat([self.encoder(p) for doc in batch["documents"] for p in doc]), batch["target"]
        )


def model() -> nn.Module:
    torch.manual_seed(0)
    return Rater()


def collate(samples: list[Any]) -> dict[str, Any]:
    return {"documents": [s["words"] for s in samples], "target": torch.cat([s["target"] for s in samples])}


class Documents(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        lengths = [int(torch.randint(1, 5, (), generator=g)) for _ in range(1 + i % 3)]
        words = [torch.randn(n, 6, generator=g) for n in lengths]
        return {"words": words, "target": torch.randn(sum(lengths), 4, generator=g)}


def dataset() -> Documents:
    return Documents()
