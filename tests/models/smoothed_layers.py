"""Layers with neighbours that shall have like weights, inside a block that reads values of its result."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        kept = [i for i, row in enumerate(x.sum((1, 2)).tolist()) if row > -1e9]
        smooth = sum(
            (a.up.weight - b.up.weight).square().mean()
            for a, b in zip(self.layers, self.layers[1:], strict=False)
        )
        return x[kept] * (1 + smooth)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(50, 16), Stack(), nn.Linear(16, 50)

    def forward(self, ids):
        h = self.body(self.words(ids))
        return nn.functional.cross_entropy(self.head(h[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def model():
    return Model()


def dataset():
    g = torch.Generator().manual_seed(0)
    return [{"ids": torch.randint(0, 50, (9,), generator=g)} for _ in range(48)]
