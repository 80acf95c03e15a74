"""Pictures and sounds of their own sizes, and thumbnails of one size, each in a list: what collate functions
without padding return."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

WIDTH = 10


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Vision(nn.Module):
    """Is given the list itself."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.layers = nn.Conv2d(3, WIDTH, 2, 2), nn.ModuleList([Layer(WIDTH), Layer(WIDTH)])

    def forward(self, pictures: list[torch.Tensor]) -> torch.Tensor:
        means = []
        for picture in pictures:
            x = self.patches(picture[None]).flatten(2).mT
            for layer in self.layers:
                x = layer(x)
            means.append(x.mean(1))
        return torch.cat(means)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.sound = Vision(), nn.Linear(4, WIDTH)
        self.heard = nn.ModuleList([Layer(WIDTH), Layer(WIDTH)])
        self.small, self.embed, self.head = (
            nn.Linear(12, WIDTH),
            nn.Embedding(30, WIDTH),
            nn.Linear(WIDTH, 30),
        )
        self.text = nn.ModuleList([Layer(WIDTH), Layer(WIDTH)])

    def forward(
        self,
        ids: torch.Tensor,
        labels: torch.Tensor,
        pictures: list[torch.Tensor],
        sounds: list[torch.Tensor],
        small: Any,
    ) -> Any:
        heard = self.sound(pad_sequence(sounds, batch_first=True))
        for layer in self.heard:
            heard = layer(heard)
        lengths = torch.tensor([len(s) for s in sounds], device=ids.device)
        heard = heard.masked_fill(
            torch.arange(heard.shape[1], device=ids.device)[None, :, None] >= lengths[:, None, None], 0.0
        )
        thumbs = self.small(torch.stack(small["thumbs"]).flatten(1))
        x = self.embed(ids) + (self.vision(pictures) + heard.sum(1) + thumbs)[:, None]
        for layer in self.text:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model() -> nn.Module:
    return Model()


def sample(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    ids = torch.randint(1, 29, (3 + i % 5,), generator=g)
    picture = torch.randn(3, 2 + 2 * (i % 3), 2 + 2 * (i % 2), generator=g)
    return {
        "ids": ids,
        "picture": picture,
        "sound": torch.randn(2 + i % 4, 4, generator=g),
        "thumb": torch.randn(3, 2, 2, generator=g),
    }


def dataset() -> list[dict[str, torch.Tensor]]:
    return [sample(i) for i in range(36)]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    ids = [s["ids"] for s in samples]
    return {
        "ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=-100),
        "pictures": [s["picture"] for s in samples], "sounds": [s["sound"] for s in samples],
        "small": {"thumbs": [s["thumb"] for s in samples]},
    }  # fmt: skip
