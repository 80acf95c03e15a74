"""Documents in one row with the bounds between them: no input has as many rows as there are samples."""

from __future__ import annotations

import torch
from torch import nn

WORDS, WIDTH = 30, 16


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, tokens: torch.Tensor, bounds: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        loss = -self.head(x).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        lengths = bounds[1:] - bounds[:-1]
        document = torch.searchsorted(bounds, torch.arange(len(tokens)), right=True) - 1
        each = torch.zeros(len(lengths)).index_add_(0, document, loss) / lengths
        return {"loss": each.mean(), "of_tokens": loss.detach().sum() / (lengths + 1).sum()}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Reader()


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    bounds = torch.tensor([0] + [len(s["tokens"]) for s in samples]).cumsum(0)
    return {"tokens": torch.cat([s["tokens"] for s in samples]), "bounds": bounds}


def dataset() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [{"tokens": torch.randint(0, WORDS, (3 + i * 7 % 13,), generator=g)} for i in range(48)]
