"""A language model with layers that add to their argument in place and return it."""

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, hidden):
        hidden += torch.tanh(self.mix(0.5 * hidden))
        return hidden


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, hidden):
        hidden = 2 * hidden
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.decoder, self.head = nn.Embedding(40, 16), Decoder(), nn.Linear(16, 40)

    def forward(self, input_ids, labels):
        hidden = self.decoder(self.embed(input_ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def model():
    return Model()


def dataset():
    made = []
    for i in range(48):
        ids = torch.randint(40, (4 + i % 7,), generator=torch.Generator().manual_seed(i))
        made.append({"input_ids": ids, "labels": ids})
    return made
