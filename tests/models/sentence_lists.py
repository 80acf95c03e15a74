"""Documents of sentences: a sample is a list of sentences, which may be empty, and a batch is a list of these
lists. One module takes all of these lists at once; a loop runs a recurrent network over each document."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 16


class Words(nn.Module):
    """The mean of a sentence's words, which see each other."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH, padding_idx=0)
        options = dict(dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 32, **options) for _ in range(2))

    def forward(self, ids):
        x, padding = self.embed(ids), ids == 0
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return x.masked_fill(padding[..., None], 0).sum(1) / (~padding).sum(1, keepdim=True)


class Longest(nn.Module):
    """A row for the longest sentence of each document."""

    def __init__(self):
        super().__init__()
        self.lengths, self.empty = nn.Embedding(10, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, documents):
        lengths = [max(map(len, sentences), default=0) for sentences in documents]
        return torch.stack([self.lengths(torch.tensor(n)) if n else self.empty for n in lengths])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.longest = Words(), Longest()
        self.document, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 3)

    def forward(self, documents, label):
        told = self.longest(documents)
        rows = []
        for sentences, row in zip(documents, told, strict=True):
            if sentences:
                ids = nn.utils.rnn.pad_sequence(sentences, batch_first=True)
                row = row + self.document(self.words(ids)[None])[1][-1, 0]
            rows.append(row)
        return F.cross_entropy(self.head(torch.stack(rows)), label)


def model():
    return Model()


class Documents(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        made = torch.Generator().manual_seed(i)
        return [torch.randint(1, 40, (2 + (i + k) % 5,), generator=made) for k in range(i % 4)], i % 3


def dataset():
    return Documents()


def collate(samples):
    return {"documents": [d for d, _ in samples], "label": torch.tensor([label for _, label in samples])}
