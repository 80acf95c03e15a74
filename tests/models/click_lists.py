"""Recommendation: lists of items seen and of candidates, of various lengths, and one table of items.

A softmax of each sample's scores leaves no gradient for what all candidates share: float32 has noise there.
"""

import torch
from torch import nn


class ItemEncoder(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.mix = table, nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24))

    def forward(self, items):
        return self.mix(self.table(items))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(80, 24)
        self.items = ItemEncoder(self.table)
        self.history = nn.LSTM(24, 24, batch_first=True)
        self.user = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))
        self.register_buffer("popularity", torch.linspace(0.1, 2.0, 80))

    def forward(self, history, candidates, clicks):
        lengths = torch.tensor([len(h) for h in history])
        padded = nn.utils.rnn.pad_sequence(list(history), batch_first=True)
        states, _ = self.history(self.table(padded))
        user = self.user(states[torch.arange(len(lengths)), lengths - 1])
        items = self.items(torch.cat(list(candidates)))
        total = 0.0
        for u, item, click, ids in zip(
            user, items.split([len(c) for c in candidates]), clicks, candidates, strict=True
        ):
            scores = item @ u - self.popularity[ids].log()
            total = total - (click.softmax(0) * scores.log_softmax(0)).sum()
        table = self.table.weight
        return total / len(user) + 1e-3 * table.square().sum(1).mean()


def model():
    torch.manual_seed(2)
    return Model()


def dataset():
    out = []
    for i in range(48):
        g = torch.Generator().manual_seed(i)
        n, m = (int(torch.randint(2, 8, (), generator=g)) for _ in range(2))
        out.append(
            {
                "history": torch.randint(0, 80, (n,), generator=g),
                "candidates": torch.randint(0, 80, (m,), generator=g),
                "clicks": torch.randn(m, generator=g),
            }
        )
    return out


def collate(samples):
    return {k: [s[k] for s in samples] for k in samples[0]}
