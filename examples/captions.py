"""A captioner small enough to follow by hand: every second sample has a picture. docs/concepts.md walks
through one step."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

WORDS, PICTURE, WIDTH = 100, 99, 32  # token 99 marks the place of a picture


class Tower(nn.Module):
    """Residual layers, which keep the shape [..., WIDTH]."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(layers)
        )

    def forward(self, hidden):
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


class Captioner(nn.Module):
    """Predicts the next word; the encoder's result takes the place of token 99."""

    def __init__(self):
        super().__init__()
        self.pixels, self.encoder = nn.Linear(256, WIDTH), Tower(3)
        self.words, self.decoder, self.head = nn.Embedding(WORDS, WIDTH), Tower(2), nn.Linear(WIDTH, WORDS)

    def forward(self, ids, labels, picture=None):
        hidden = self.words(ids)
        if picture is not None:
            seen = self.encoder(self.pixels(picture.flatten(1)))
            hidden = hidden.masked_scatter((ids == PICTURE)[..., None].expand_as(hidden), seen)
        logits = self.head(self.decoder(hidden))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def model():
    return Captioner()


class Captions(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        words = torch.arange(i, i + 5 + 3 * (i % 4)) % PICTURE
        if i % 2 == 0:
            return {"ids": words, "labels": words}
        ids = torch.cat([torch.tensor([PICTURE]), words])
        return {
            "ids": ids,
            "labels": ids.where(ids != PICTURE, -100),
            "picture": torch.full((1, 16, 16), i / 64),
        }


def dataset():
    return Captions()
