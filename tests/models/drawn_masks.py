"""Masks that forward draws decide what the losses divide by: words that are predicted, patches that are
reconstructed, and rows that are picked."""

import torch
import torch.nn.functional as F
from torch import nn

WORDS, DIM, PATCH = 50, 16, 6


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class DrawnMasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.text, self.head = nn.Embedding(WORDS, DIM), Encoder(), nn.Linear(DIM, WORDS)
        self.patch, self.vision, self.decode = nn.Linear(PATCH, DIM), Encoder(), nn.Linear(DIM, PATCH)

    def forward(self, ids, attention_mask, patches):
        drawn = (torch.rand(ids.shape) < 0.4) & (attention_mask == 1)
        scores = self.head(self.text(self.embed(ids.masked_fill(drawn, 0))))
        labels = torch.where(drawn, ids, torch.full_like(ids, -100))
        predicted = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        # The patches with the largest of as many random numbers are hidden, as in masked autoencoders.
        places = torch.rand(patches.shape[:2]).argsort(1).argsort(1)
        hidden = (
            places > 2 + torch.bernoulli(torch.full_like(places[:, :1], 0.5, dtype=torch.float))
        ).float()
        seen = self.patch(patches) * (1 - hidden)[..., None]
        error = (self.decode(self.vision(seen)) - patches).square().mean(-1)
        return predicted + (error * hidden).sum() / hidden.sum()


def model():
    torch.manual_seed(0)
    return DrawnMasks()


def dataset():
    g = torch.Generator().manual_seed(0)
    sizes = [3 + i % 5 for i in range(24)]
    return [
        {
            "ids": torch.randint(1, WORDS, (n,), generator=g),
            "attention_mask": torch.ones(n, dtype=torch.long),
            "patches": torch.randn(6, PATCH, generator=g),
        }
        for n in sizes
    ]
