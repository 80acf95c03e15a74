"""A loss divided by how many labels count, and by 1 where none does."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)

    def forward(self, input_ids, labels):
        y = self.head(self.embed(input_ids)[labels != -100])
        return y.square().sum() / max(len(y), 1)


def model():
    return Model()


def dataset():
    made = []
    for i in range(64):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(1, 30, (6 + i % 9,), generator=g)
        labels = torch.where(torch.arange(len(ids)) < len(ids) // 3, -100, ids)
        made.append({"input_ids": ids, "labels": labels})
    return made
