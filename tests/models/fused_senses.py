"""Texts with a picture, a sound, both or none. A stack of layers joins picture and sound of samples that have
both."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

SENSES = ("picture", "sound")


def layers(width: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.joint, self.out = layers(24, 4), nn.Linear(24, 12)
        self.embed, self.decoder, self.head = nn.Embedding(40, 12), layers(12, 3), nn.Linear(12, 40)

    def forward(
        self,
        ids: torch.Tensor,
        labels: torch.Tensor,
        picture: torch.Tensor | None = None,
        sound: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.embed(ids)
        if picture is not None and sound is not None:
            joined = self.out(self.joint(torch.cat([picture, sound], -1)))
            both = (picture.abs().sum(-1, True) > 0) & (sound.abs().sum(-1, True) > 0)
            x = x + (joined * both)[:, None]
        logits = self.head(self.decoder(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def model() -> nn.Module:
    return Model()


def sample(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    found = {key: torch.randn(12, generator=g) for bit, key in enumerate(SENSES) if i >> bit & 1}
    return {"ids": torch.randint(1, 40, (4 + i % 6,), generator=g), **found}


def dataset() -> list[dict[str, torch.Tensor]]:
    return [sample(i) for i in range(40)]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = [s["ids"] for s in samples]
    batch = {
        "ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=-100),
    }
    for key in SENSES:
        if any(key in s for s in samples):
            batch[key] = torch.stack([s.get(key, torch.zeros(12)) for s in samples])
    return batch
