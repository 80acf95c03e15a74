"""Masks that forward draws pick rows of a loss: by an index, by `masked_select` and by `nonzero`, with means
over what is picked."""

import torch
import torch.nn.functional as F
from drawn_masks import DIM, WORDS, Encoder
from torch import nn


class DrawnRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.text, self.head = nn.Embedding(WORDS, DIM), Encoder(), nn.Linear(DIM, WORDS)

    def forward(self, ids, attention_mask):
        rate = torch.rand(len(ids), 1)
        drawn = (torch.rand(ids.shape) < rate) & (attention_mask == 1)
        noisy = ids.clone()
        noisy[drawn] = 0
        hidden = self.text(self.embed(noisy))
        scores = self.head(hidden)
        rows = F.cross_entropy(scores[drawn], ids[drawn], reduction="none")
        loss = (rows / (0.1 + rate).expand(ids.shape)[drawn]).sum() / len(ids)
        loss = loss + F.cross_entropy(scores[drawn], ids[drawn])
        kept = torch.zeros(ids.shape).bernoulli_(0.5) * attention_mask > 0
        picked = hidden.square().mean(-1).masked_select(kept)
        loss = loss + picked.sum() / picked.shape[0]
        i, j = (torch.rand_like(hidden[..., 0]) < 0.4).nonzero(as_tuple=True)
        return loss + (hidden[i, j].mean(-1) * attention_mask[i, j]).sum() / len(ids)


def model():
    torch.manual_seed(0)
    return DrawnRows()


def dataset():
    g = torch.Generator().manual_seed(0)
    sizes = [3 + i % 5 for i in range(24)]
    return [
        {"ids": torch.randint(1, WORDS, (n,), generator=g), "attention_mask": torch.ones(n, dtype=torch.long)}
        for n in sizes
    ]
