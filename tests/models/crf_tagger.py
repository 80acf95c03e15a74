"""A tagger with a linear-chain CRF: the partition function is a loop over time steps in forward."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

TAGS, VOCAB = 5, 40


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        self.encoder = nn.GRU(24, 16, batch_first=True)
        self.emit = nn.Linear(16, TAGS)
        self.transitions = nn.Parameter(torch.randn(TAGS, TAGS) * 0.1)
        self.start, self.end = nn.Parameter(torch.randn(TAGS) * 0.1), nn.Parameter(torch.randn(TAGS) * 0.1)

    def forward(self, words, tags, mask):
        emissions = self.emit(self.encoder(self.embed(words))[0])
        b, s = words.shape
        rows = torch.arange(b, device=words.device)
        gold = self.start[tags[:, 0]] + emissions[rows, 0, tags[:, 0]]
        alpha = self.start + emissions[:, 0]
        for t in range(1, s):
            step = self.transitions[tags[:, t - 1], tags[:, t]] + emissions[rows, t, tags[:, t]]
            gold = gold + step * mask[:, t]
            nxt = torch.logsumexp(alpha.unsqueeze(2) + self.transitions + emissions[:, t].unsqueeze(1), 1)
            alpha = torch.where(mask[:, t].unsqueeze(1).bool(), nxt, alpha)
        last = mask.sum(1).long() - 1
        gold = gold + self.end[tags[rows, last]]
        partition = torch.logsumexp(alpha + self.end, 1)
        return {"loss": (partition - gold).mean()}


def model():
    return Tagger()


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        n = int(torch.randint(2, 9, (), generator=g))
        words = torch.randint(1, VOCAB, (n,), generator=g)
        return {"words": words, "tags": torch.randint(0, TAGS, (n,), generator=g), "mask": torch.ones(n)}


def dataset():
    return Data()


def collate(samples):
    return {k: pad_sequence([s[k] for s in samples], batch_first=True) for k in samples[0]}
