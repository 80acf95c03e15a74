"""A recurrent state-space model: each time step draws its state, so a batch draws as often as its longest
sample is long."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence


class States(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.moments = nn.GRUCell(8, 16), nn.Linear(16, 8)

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """seen: [B, T, 4]; returns states and their moments for each time step."""
        hidden, state = seen.new_zeros(len(seen), 16), seen.new_zeros(len(seen), 4)
        hiddens, moments = list[torch.Tensor](), list[torch.Tensor]()
        for now in seen.unbind(1):
            hidden = self.cell(torch.cat([state, now], -1), hidden)
            moments.append(self.moments(hidden))
            mean, spread = moments[-1].chunk(2, -1)
            state = mean + F.softplus(spread) * torch.randn_like(mean)
            hiddens.append(hidden)
        return torch.stack(hiddens, 1), torch.stack(moments, 1)


class World(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.states, self.decoder = nn.Linear(5, 4), States(), nn.Linear(16, 5)

    def forward(self, seen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        hidden, moments = self.states(self.encoder(seen))
        mean, spread = moments.chunk(2, -1)
        error = (self.decoder(hidden) - seen).square().mean(-1) + (mean.square() + F.softplus(spread)).mean(
            -1
        )
        return (error * counts).sum() / counts.sum()


def model() -> nn.Module:
    return World()


def dataset() -> list[dict[str, torch.Tensor]]:
    def sample(i: int) -> dict[str, torch.Tensor]:
        length = 3 + i % 4
        seen = torch.randn(length, 5, generator=torch.Generator().manual_seed(i))
        return {"seen": seen, "counts": torch.ones(length)}

    return [sample(i) for i in range(60)]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: pad_sequence([s[key] for s in samples], batch_first=True) for key in samples[0]}
