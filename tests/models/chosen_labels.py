"""A tagger with labels that a module chooses, character by character: the first half of each text counts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

IGNORED = -100


class Choice(nn.Module):
    def forward(self, text: torch.Tensor) -> torch.Tensor:
        labels = torch.full_like(text, IGNORED)
        for row, chosen in zip(text, labels, strict=True):
            half = int((row != 0).sum()) // 2
            chosen[:half] = row[:half]
        return labels


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 30))
        self.choice = Choice()

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(text).transpose(1, 2), self.choice(text), ignore_index=IGNORED)


def model() -> nn.Module:
    return Tagger()


def dataset() -> list[dict[str, torch.Tensor]]:
    samples = list[dict[str, torch.Tensor]]()
    for i in range(48):
        g = torch.Generator().manual_seed(i)
        length = int(torch.randint(2, 9, (), generator=g))
        samples.append({"text": torch.randint(1, 30, (length,), generator=g)})
    return samples


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"text": nn.utils.rnn.pad_sequence([s["text"] for s in samples], batch_first=True)}
