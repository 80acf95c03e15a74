"""A loop over samples that calls a module and adds to the loss, next to a head in chunks of tokens: how many
calls there are depends on the batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

WORDS, WIDTH = 64, 32


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        length, patches = (int(torch.randint(low, high, (), generator=g)) for low, high in ((5, 14), (1, 4)))
        ids = torch.randint(1, WORDS, (length,), generator=g)
        return {"ids": ids, "patches": torch.randn(patches, 8, generator=g)}


def collate(samples):
    ids = pad_sequence([s["ids"] for s in samples], batch_first=True)
    return {"ids": ids, "patches": [s["patches"] for s in samples]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.tower = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, ids, patches):
        x = self.layer(self.embed(ids), src_key_padding_mask=ids == 0)
        rows, words = x[:, :-1].reshape(-1, WIDTH), ids[:, 1:].reshape(-1)
        total = 0.0
        for some, labels in zip(rows.split(16), words.split(16), strict=True):
            total = total + F.cross_entropy(self.head(some), labels, ignore_index=0, reduction="sum")
        apart = 0.0
        for row, seen in zip(x, patches, strict=True):
            apart = apart + (self.tower(seen) - row[: len(seen)]).square().mean()
        return total / (words != 0).sum() + apart / len(ids)


def model():
    return Model()


def dataset():
    return Texts()
