"""Speech with lengths: a recurrent encoder over packed clips and a CTC loss, in the way that recipes without
a library write it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.rnn = nn.Linear(5, 8), nn.LSTM(8, 4, batch_first=True, bidirectional=True)

    def forward(self, clips: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.inward(clips), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(8, 12)

    def forward(
        self, clips: torch.Tensor, lengths: torch.Tensor, words: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        found = self.head(self.encoder(clips, lengths)).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(found, words, lengths, counts, reduction="sum") / len(clips)


def model() -> nn.Module:
    return Recogniser()


def sample(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    return {
        "clips": torch.randn(8 + i * 7 % 9, 5, generator=g),
        "words": torch.randint(1, 12, (1 + i % 3,), generator=g),
    }


def dataset() -> list[dict[str, torch.Tensor]]:
    return [sample(i) for i in range(36)]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {key: pad_sequence([s[key] for s in samples], batch_first=True) for key in ("clips", "words")}
    lengths, counts = (torch.tensor([len(s[key]) for s in samples]) for key in ("clips", "words"))
    return batch | {"lengths": lengths, "counts": counts}
