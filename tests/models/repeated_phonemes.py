"""Speech from phonemes: each phoneme's state is repeated for the frames that it lasts, so forward computes
the one width of frames that fits its samples, and refuses wider targets."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

WIDTH, BANDS = 16, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        seen, _ = self.attention(x, x, x, key_padding_mask=padded, need_weights=False)
        return self.norm(x + seen)


def repeat_states(states: torch.Tensor, durations: torch.Tensor) -> torch.Tensor:
    rows = [torch.repeat_interleave(row, count, dim=0) for row, count in zip(states, durations, strict=True)]
    return pad_sequence(rows, batch_first=True)


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH, padding_idx=0)
        self.encoder, self.decoder = Layer(), Layer()
        self.durations, self.frames = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, BANDS)

    def forward(self, phonemes: torch.Tensor, durations: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        padded = phonemes.eq(0)
        x = self.encoder(self.embed(phonemes), padded)
        lasting = self.durations(x.detach()).squeeze(-1)
        y = repeat_states(x, durations)
        ended = torch.arange(y.shape[1], device=y.device)[None] >= durations.sum(1)[:, None]
        wrong = (self.frames(self.decoder(y, ended)) - frames).abs() * ~ended[..., None]
        duration_loss = nn.functional.mse_loss(lasting[~padded], durations.float().log1p()[~padded])
        return wrong.sum() / (~ended).sum() + duration_loss


class Data(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(i)
        durations = torch.randint(1, 5, (3 + i % 5,), generator=drawn)
        return {
            "phonemes": torch.randint(1, 20, durations.shape, generator=drawn),
            "durations": durations,
            "frames": torch.randn(int(durations.sum()), BANDS, generator=drawn),
        }


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: pad_sequence([s[key] for s in samples], batch_first=True) for key in samples[0]}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Speech()


def dataset() -> Data:
    return Data()
