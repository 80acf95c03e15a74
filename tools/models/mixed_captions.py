"""A vision-language model in plain PyTorch on a scaled-down sample mix: text, and images cut into tiles, in
very uneven amounts.

The mix is that of the reference workloads (`tools/workloads/parts/mix.py`) with a tenth of the tokens. The
environment variable IMAGE_SHARE is the share of samples with images (0.33). The encoder's work is a little
under the language model's, so that on two ranks the order of the samples decides who waits
(`tools/bench_training.py`).
"""

from __future__ import annotations

import os
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

SHARE = float(os.environ.get("IMAGE_SHARE", "0.33"))
WORDS, PLACE, PATCHES, PATCH, MERGED = (
    512,
    511,
    64,
    48,
    4,
)  # a tile has 64 patches, four of which make a token
TOKENS = PATCHES // MERGED
SAMPLES = 4096
Sample = dict[str, torch.Tensor]


class Tower(nn.Module):
    """Layers over a sequence [rows, length, width]."""

    def __init__(self, width: int, layers: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, F.gelu, batch_first=True)
            for _ in range(layers)
        )

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        later = (
            nn.Transformer.generate_square_subsequent_mask(h.shape[1], device=h.device)
            if self.causal
            else None
        )
        for layer in self.layers:
            h = layer(h, src_mask=later)
        return h


class Captioner(nn.Module):
    """Puts what the encoder makes of four patches in the places of a token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.encoder, self.merge = (
            nn.Linear(PATCH, 96),
            Tower(96, 4, False),
            nn.Linear(MERGED * 96, 128),
        )
        self.words, self.decoder, self.head = (
            nn.Embedding(WORDS, 128),
            Tower(128, 4, True),
            nn.Linear(128, WORDS),
        )

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, tiles: torch.Tensor | None = None
    ) -> torch.Tensor:
        h = self.words(ids)
        if tiles is not None:
            seen = self.merge(self.encoder(self.patches(tiles)).reshape(-1, MERGED * 96))
            h = h.masked_scatter((ids == PLACE)[..., None].expand_as(h), seen)
        logits = self.head(self.decoder(h))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def model() -> nn.Module:
    return Captioner()


def _lognormal(r: random.Random, mean: float, least: int, most: int) -> int:
    """A number with this mean and, before it is cut to the range, a coefficient of variation of 1."""
    return min(most, max(least, round(r.lognormvariate(-0.3466, 0.8326) * mean)))


class Captions(Dataset[Sample]):
    """Random tiles and words; sample i's sizes are decided by i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Sample:
        r, g = random.Random(i), torch.Generator().manual_seed(i)
        if r.random() >= SHARE:
            words = torch.randint(0, PLACE, (_lognormal(r, 150, 4, 800),), generator=g)
            return {"ids": words, "labels": words}
        tiles = min(
            40,
            sum(
                _lognormal(r, 5, 1, 25) for _ in range(1 + r.choices(range(6), [0.6**k for k in range(6)])[0])
            ),
        )
        words = torch.randint(0, PLACE, (_lognormal(r, 50, 4, 400),), generator=g)
        ids = torch.cat([torch.full((tiles * TOKENS,), PLACE), words])
        labels = torch.cat([torch.full((tiles * TOKENS,), -100), words])
        return {"ids": ids, "labels": labels, "tiles": torch.randn(tiles, PATCHES, PATCH, generator=g)}


def dataset() -> Dataset[Sample]:
    return Captions()


def collate(samples: list[Sample]) -> Sample:
    padded = {"ids": 0, "labels": -100}
    batch = {
        k: nn.utils.rnn.pad_sequence([s[k] for s in samples], batch_first=True, padding_value=v)
        for k, v in padded.items()
    }
    tiles = [s["tiles"] for s in samples if "tiles" in s]
    return batch | ({"tiles": torch.cat(tiles)} if tiles else {})
