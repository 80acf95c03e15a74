"""A captioner whose encoder reads grids: images of their own sizes, positions and windows built in Python
from the grids' values.

It stands for models such as Qwen2.5-VL in plain PyTorch. What it does between its modules has other ops for
every batch, so that a plan records it again for each micro-batch (`tools/bench_rerecord.py` shows what that
costs).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

WORDS, PLACE, PATCH, LAYERS, MERGED = 64, 63, 48, 4, 4
WIDTH = int(
    os.environ.get("WIDTH", "64")
)  # the wider, the longer a step computes, while recordings take what they took
SAMPLES = 512
Sample = dict[str, torch.Tensor]


class Layer(nn.Module):
    """Attention inside segments, or with a causal mask, and a feed-forward network."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        n = self.norm(h)
        h = h + self.attention(n, n, n, attn_mask=mask, need_weights=False)[0]
        return h + self.down(F.gelu(self.up(self.norm2(h))))


class Encoder(nn.Module):
    """Patches of all images as one sequence; images do not see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, patches: torch.Tensor, positions: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        h = self.embed(patches) + positions
        apart = image[:, None] != image[None, :]
        for layer in self.layers:
            h = layer(h[None], apart)[0]
        return h


class Decoder(nn.Module):
    """A causal language model without its head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        late = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool, device=h.device).triu(1)
        for layer in self.layers:
            h = layer(h, late)
        return h


class Captioner(nn.Module):
    """Puts what the encoder makes of 2 x 2 patches in the places of a token."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.merge = Encoder(), nn.Linear(MERGED * WIDTH, WIDTH)
        self.words, self.decoder, self.head = nn.Embedding(WORDS, WIDTH), Decoder(), nn.Linear(WIDTH, WORDS)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, patches: torch.Tensor, grids: torch.Tensor
    ) -> torch.Tensor:
        waves, image = [], []
        for i, (rows, columns) in enumerate(grids.tolist()):
            y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            waves.append(_wave(torch.stack([y.flatten(), x.flatten()], 1)))
            image += [i] * rows * columns
        device = patches.device
        seen = self.encoder(patches, torch.cat(waves).to(device), torch.tensor(image, device=device))
        merged = []
        for part, (rows, columns) in zip(seen.split(grids.prod(1).tolist()), grids.tolist(), strict=True):
            blocks = part.view(rows // 2, 2, columns // 2, 2, -1).permute(0, 2, 1, 3, 4)
            merged.append(blocks.reshape(rows * columns // MERGED, -1))
        features = self.merge(torch.cat(merged))
        h = self.words(ids)
        h = h.masked_scatter((ids == PLACE)[..., None].expand_as(h), features)
        logits = self.head(self.decoder(h))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def _wave(places: torch.Tensor) -> torch.Tensor:
    """Sines and cosines of rows and columns: [patches, WIDTH]."""
    angles = places[:, :, None] / 100 ** (torch.arange(WIDTH // 4) / (WIDTH // 4))
    return torch.cat([angles.sin(), angles.cos()], -1).flatten(1)


def model() -> nn.Module:
    return Captioner()


class Captions(Dataset[Sample]):
    """Random pictures of 2 to 10 patches a side, with random captions."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Sample:
        g = torch.Generator().manual_seed(i)
        rows, columns = (2 * int(torch.randint(1, 6, (), generator=g)) for _ in range(2))
        words = torch.randint(0, PLACE, (int(torch.randint(8, 40, (), generator=g)),), generator=g)
        ids = torch.cat([torch.full((rows * columns // MERGED,), PLACE), words])
        labels = torch.cat([torch.full((rows * columns // MERGED,), -100), words])
        return dict(
            ids=ids,
            labels=labels,
            patches=torch.randn(rows * columns, PATCH, generator=g),
            grids=torch.tensor([[rows, columns]]),
        )


def dataset() -> Dataset[Sample]:
    return Captions()


def collate(samples: list[Sample]) -> dict[str, Any]:
    padded = {"ids": 0, "labels": -100}
    batch = {
        k: nn.utils.rnn.pad_sequence([s[k] for s in samples], batch_first=True, padding_value=v)
        for k, v in padded.items()
    }
    return batch | {k: torch.cat([s[k] for s in samples]) for k in ("patches", "grids")}
