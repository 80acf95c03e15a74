"""A language model whose layers run twice, one after the other and again, as in a universal transformer: one
stack, twice as deep."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from nano import LENGTH, VOCABULARY, WIDTH, Block, Samples
from torch import nn
from torch.utils.data import Dataset


class Loops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.stack = Stack()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        logits = self.head(self.stack(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return x


def model() -> nn.Module:
    return Loops()


def dataset() -> Dataset:
    return Samples()
