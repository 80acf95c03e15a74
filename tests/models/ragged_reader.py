"""A reader of several passages for each question: passages of all samples stand one behind the other, and the
loss compares the scores of a sample's passages, padded to the most passages that a sample has."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 16), nn.GELU())
        self.score, self.answer = nn.Linear(16, 1), nn.Linear(16, 7)

    def forward(
        self, passages: torch.Tensor, counts: torch.Tensor, best: torch.Tensor, answer: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.encoder(passages).mean(1)
        scores = self.score(hidden).squeeze(-1).split(counts.tolist())
        read = torch.stack([h.mean(0) for h in hidden.split(counts.tolist())])
        chosen = F.cross_entropy(pad_sequence(scores, batch_first=True, padding_value=-1e9), best)
        spread = torch.cat([s - s.mean() for s in scores]).square().mean()
        return chosen + F.cross_entropy(self.answer(read), answer) + 0.1 * spread


def model() -> nn.Module:
    return Reader()


def dataset() -> list[dict[str, Any]]:
    def sample(i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        count = 1 + i % 4
        return {"passages": torch.randint(0, 40, (count, 6), generator=g), "best": i % count, "answer": i % 7}

    return [sample(i) for i in range(64)]


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {
        "passages": torch.cat([s["passages"] for s in samples]),
        "counts": torch.tensor([len(s["passages"]) for s in samples]),
        "best": torch.tensor([s["best"] for s in samples]),
        "answer": torch.tensor([s["answer"] for s in samples]),
    }
