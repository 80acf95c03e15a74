"""Plain PyTorch: a vector-quantised autoencoder with a codebook that moves by sums over the batch (van den
Oord et al. 2017, appendix A), and a commitment loss that the quantiser returns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

CODES, WIDTH, FRAMES, BINS = 12, 8, 8, 6


class Quantizer(nn.Module):
    codebook: torch.Tensor
    counts: torch.Tensor
    sums: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randn(CODES, WIDTH)
        self.register_buffer("codebook", codes)
        self.register_buffer("counts", torch.ones(CODES))
        self.register_buffer("sums", codes.clone())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.reshape(-1, WIDTH)
        nearest = torch.cdist(flat, self.codebook).argmin(-1)
        chosen = F.embedding(nearest, self.codebook).view_as(x)
        if self.training:
            with torch.no_grad():
                onehot = F.one_hot(nearest, CODES).to(flat.dtype)
                self.counts.mul_(0.9).add_(onehot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(onehot.t() @ flat, alpha=0.1)
                self.codebook.copy_(self.sums / self.counts.clamp(min=1e-2)[:, None])
        return x + (chosen - x).detach(), F.mse_loss(x, chosen)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(BINS, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.quantizer = Quantizer()
        self.decoder = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, BINS))

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        codes, commitment = self.quantizer(self.encoder(frames))
        return F.mse_loss(self.decoder(codes), frames) + 0.25 * commitment


def model() -> nn.Module:
    return Autoencoder()


class Samples(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"frames": torch.randn(FRAMES, BINS, generator=torch.Generator().manual_seed(i))}


def dataset() -> Dataset:
    return Samples()
