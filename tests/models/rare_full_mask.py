"""A clip's frames go through the encoder without a mask where no clip of the batch is padded, which few
are."""

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, frames, mask=None):
        x = self.layer(frames)
        return x if mask is None else x * mask[..., None]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.embed, self.head = Encoder(), nn.Embedding(30, 8), nn.Linear(8, 30)

    def forward(self, input_ids, labels, frames, seen):
        encoded = self.encoder(frames, None if seen.all() else seen)
        x = self.embed(input_ids) + encoded.mean(1, keepdim=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


def model():
    return Model()


def dataset():
    made = []
    for i in range(64):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(1, 30, (4 + i % 9,), generator=g)
        frames = 10 if i == 50 else 3 + i % 6
        seen = (torch.arange(10) < frames).long()
        made.append(
            {"input_ids": ids, "labels": ids.clone(), "frames": torch.randn(10, 6, generator=g), "seen": seen}
        )
    return made
