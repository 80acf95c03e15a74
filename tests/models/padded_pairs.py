"""Preference pairs as preference trainers write them: Python pads answers if the others are wider."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

WORDS, WIDTH = 50, 16


def pad_to_width(ids: torch.Tensor, width: int) -> torch.Tensor:
    if ids.shape[1] >= width:
        return ids
    return torch.cat([ids, ids.new_zeros(len(ids), width - ids.shape[1])], 1)


class Preferences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.reader = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        width = max(chosen.shape[1], rejected.shape[1])
        ids = torch.cat([pad_to_width(chosen, width), pad_to_width(rejected, width)])
        hidden, _ = self.reader(self.words(ids[:, :-1]))
        logs = self.head(hidden).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        good, bad = (logs * (ids[:, 1:] != 0)).sum(1).chunk(2)
        return -F.logsigmoid(0.1 * (good - bad)).mean() - 0.01 * good.mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return Preferences()


class Pairs(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        lengths = {"chosen": 3 + i % 6, "rejected": 2 + 3 * i % 7}
        return {key: (i + 7 * torch.arange(n)) % (WORDS - 1) + 1 for key, n in lengths.items()}


def dataset() -> Pairs:
    return Pairs()
