"""Speech recognition: a CTC loss with all targets one behind the other, and a loss over the frames that are
no padding, joined in the same way."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

WORDS, WIDTH = 20, 16


class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(6, WIDTH // 2, batch_first=True, bidirectional=True)
        self.words, self.loudness = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, 1)

    def forward(
        self, sounds: torch.Tensor, frames: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        hidden, _ = self.encoder(sounds)
        targets = torch.cat([row[:n] for row, n in zip(ids, lengths.tolist(), strict=True)])
        logs = self.words(hidden).log_softmax(-1).transpose(0, 1)
        each = F.ctc_loss(logs, targets, frames, lengths, reduction="none", zero_infinity=True)
        loudness = self.loudness(hidden)
        spoken = torch.cat([loudness[i, : int(frames[i])] for i in range(len(frames))])
        return (each / lengths).mean() + (spoken - 1).square().mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return Recogniser()


class Sounds(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(i)
        return {
            "sounds": torch.randn(10 + i % 5, 6, generator=draw),
            "ids": torch.randint(1, WORDS, (2 + i % 4,), generator=draw),
        }


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    sounds, ids = ([s[key] for s in samples] for key in ("sounds", "ids"))
    return {
        "sounds": pad_sequence(sounds, batch_first=True),
        "frames": torch.tensor([len(s) for s in sounds]),
        "ids": pad_sequence(ids, batch_first=True),
        "lengths": torch.tensor([len(s) for s in ids]),
    }


def dataset() -> Sounds:
    return Sounds()
