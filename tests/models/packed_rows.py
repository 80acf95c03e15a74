"""Rows of several documents, numbered by segments: attention inside a document, and the mean over documents
of their mean losses, which `F.one_hot` tells apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

VOCABULARY, DOCUMENTS, WIDTH = 40, 4, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)).masked_fill(~mask, float("-inf"))
        return x + self.out(scores.softmax(-1) @ v)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, input_ids: torch.Tensor, segment_ids: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        hidden = self.words(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, same & torch.ones_like(same).tril())
        each = F.cross_entropy(
            self.head(hidden)[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=-100
        )
        inside = (labels[:, 1:] != -100) & (segment_ids[:, 1:] == segment_ids[:, :-1])
        document = F.one_hot(segment_ids[:, 1:], DOCUMENTS).float() * inside[..., None]
        count = document.sum(1)
        means = torch.einsum("bs,bsd->bd", each, document) / count.clamp(min=1)
        return means.sum() / (count > 0).sum()


class Samples(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(i)
        lengths = torch.randint(3, 7, (1 + i % 3,), generator=draw)
        text = torch.randint(1, VOCABULARY, (int(lengths.sum()),), generator=draw)
        segments = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), lengths)
        return {"input_ids": text, "segment_ids": segments, "labels": text}


def model() -> nn.Module:
    return Packed()


def dataset() -> Samples:
    return Samples()
