"""A sequence in segments: layers write keys into caches that forward makes alike, and read those of
earlier segments."""

import torch
import torch.nn.functional as F
from torch import nn

WORDS, DIM, SEGMENT = 40, 16, 5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x, cache, start):
        end = start + x.shape[1]
        keys = torch.cat([cache[:, :start], self.key(x)], 1)
        cache[:, start:end] = keys[:, start:].detach()
        return x + torch.tanh(self.query(x) * keys.cumsum(1)[:, start:])


class Segments(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(WORDS, DIM), nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, ids):
        caches = [torch.empty(*ids.shape, DIM) for _ in self.layers]
        labels, total = F.pad(ids[:, 1:], (0, 1)), 0.0
        for start in range(0, ids.shape[1], SEGMENT):
            x = self.embed(ids[:, start : start + SEGMENT])
            for layer, cache in zip(self.layers, caches, strict=True):
                x = layer(x, cache, start)
            targets = labels[:, start : start + SEGMENT].flatten()
            total = total + F.cross_entropy(
                self.head(x).flatten(0, 1), targets, ignore_index=0, reduction="sum"
            )
        return total / (labels != 0).sum()


def model():
    torch.manual_seed(0)
    return Segments()


def dataset():
    g = torch.Generator().manual_seed(18)
    return [torch.randint(1, WORDS, (7 + (i * 5) % 12,), generator=g) for i in range(24)]


def collate(samples):
    return {"ids": nn.utils.rnn.pad_sequence(samples, batch_first=True)}
