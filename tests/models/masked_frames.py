"""Masked prediction of speech: each masked frame is told from frames of the same sound that were drawn as
negatives, and is class 0 among their scores. A parameter and an input have one name, `masked`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

FRAMES, WIDTH, NEGATIVES = 15, 16, 5


class MaskedFrames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(1, WIDTH, 10, stride=5), nn.GELU())
        self.masked = nn.Parameter(torch.rand(WIDTH))
        self.context = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, wave: torch.Tensor, masked: torch.Tensor, negatives: torch.Tensor) -> torch.Tensor:
        frames = self.features(wave[:, None]).transpose(1, 2)
        context = self.out(self.context(torch.where(masked[..., None], self.masked, frames)))
        drawn = frames.gather(1, negatives.flatten(1)[..., None].expand(-1, -1, WIDTH))
        every = torch.cat([frames[:, :, None], drawn.unflatten(1, (FRAMES, NEGATIVES))], 2)
        scores = F.cosine_similarity(context[:, :, None], every, dim=-1)[masked] / 0.1
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device))


def model() -> nn.Module:
    torch.manual_seed(0)
    return MaskedFrames()


class Sounds(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(i)
        masked = torch.rand(FRAMES, generator=draw) < 0.4
        masked[i % FRAMES] = True
        return {
            "wave": torch.randn(80, generator=draw),
            "masked": masked,
            "negatives": torch.randint(0, FRAMES, (FRAMES, NEGATIVES), generator=draw),
        }


def dataset() -> Sounds:
    return Sounds()
