"""An encoder of ragged frames and a decoder of text, of nano's blocks: gradients flow between two sections of
four heads each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from nano import LENGTH, VOCABULARY, WIDTH, Block
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return self.norm(x)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.encoder = nn.Linear(8, WIDTH), Stack()
        self.wte, self.decoder, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            Stack(),
            nn.Linear(WIDTH, VOCABULARY),
        )

    def forward(self, frames: torch.Tensor, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.decoder(self.wte(input_ids) + self.encoder(self.inp(frames)))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def model() -> nn.Module:
    return Pair()


class Samples(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        n = int(torch.randint(6, LENGTH, (), generator=g))
        text = torch.randint(1, VOCABULARY, (n,), generator=g)
        return {"frames": torch.randn(n, 8, generator=g), "input_ids": text, "labels": text.clone()}


def dataset() -> Dataset:
    return Samples()


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    pads = {"frames": 0.0, "input_ids": 0, "labels": -100}
    return {
        key: pad_sequence([s[key] for s in samples], batch_first=True, padding_value=value)
        for key, value in pads.items()
    }
