"""Attention to a caption that only some samples have: the default collation gives it fewer rows."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hear, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.words, self.read = nn.Embedding(9, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, sound: torch.Tensor, caption: torch.Tensor | None = None) -> torch.Tensor:
        heard = self.hear(sound)
        if caption is not None:
            words = self.words(caption)
            heard = heard + self.read(heard, words, words)[0]
        return self.head(heard).square().mean()


def model() -> nn.Module:
    return Model()


def dataset() -> list[dict[str, torch.Tensor]]:
    sounds = [torch.full((5, 8), float(i)) for i in range(64)]
    captions = [{"caption": torch.tensor([1, 2 + i % 7])} if i % 2 else {} for i in range(64)]
    return [{"sound": sound} | caption for sound, caption in zip(sounds, captions, strict=True)]
