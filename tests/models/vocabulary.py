"""Losses on logits, together: labels smoothed and left out, a teacher's most likely tokens, a
penalty on the normaliser.

The vocabulary of 61 tokens no two or four ranks share evenly; the student's head is its embedding, read by
forward itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

TOKENS, WIDTH, LEFT_OUT = 61, 16, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def layers(count: int) -> nn.Module:
    return nn.Sequential(*(Layer() for _ in range(count)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher_embed, self.teacher, self.teacher_head = (
            nn.Embedding(TOKENS, WIDTH),
            layers(1),
            nn.Linear(WIDTH, TOKENS),
        )
        self.requires_grad_(False)
        self.embed, self.layers, self.temperature = (
            nn.Embedding(TOKENS, WIDTH),
            layers(2),
            nn.Parameter(torch.tensor(1.5)),
        )
        self.second = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.layers(self.embed(ids))
        logits, flat = F.linear(hidden, self.embed.weight), labels.flatten()
        smoothed = F.cross_entropy(logits.flatten(0, 1), flat, ignore_index=LEFT_OUT, label_smoothing=0.1)
        plain = F.cross_entropy(self.second(hidden).transpose(1, 2), labels, ignore_index=LEFT_OUT)
        penalty = logits.logsumexp(-1).square().mean()
        with torch.no_grad():
            likely, places = self.teacher_head(self.teacher(self.teacher_embed(ids))).topk(4, -1)
        scaled = F.log_softmax(logits / self.temperature, -1).gather(-1, places)
        distilled = -(likely.softmax(-1) * scaled).sum(-1).mean()
        right = ((logits.argmax(-1) == labels) & (labels != LEFT_OUT)).sum()
        return {
            "loss": smoothed + 0.5 * plain + 0.01 * penalty + distilled,
            "right": right,
            "penalty": penalty,
        }


def model() -> nn.Module:
    torch.manual_seed(1)
    return Model()


class Samples(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(0, TOKENS, (int(torch.randint(3, 9, (), generator=g)),), generator=g)
        return {"ids": ids, "labels": torch.where(ids % 5 == 0, LEFT_OUT, ids)}


def dataset() -> Dataset:
    return Samples()


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    padded = {"ids": 0, "labels": LEFT_OUT}
    return {
        k: nn.utils.rnn.pad_sequence([s[k] for s in samples], batch_first=True, padding_value=v)
        for k, v in padded.items()
    }
