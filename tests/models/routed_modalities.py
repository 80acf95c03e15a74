"""A mixture of transformers: tokens of pictures and of text have weights of their own in every layer, and see
each other in attention. Samples without a picture send no token to the picture's weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

PICTURE, ENTRIES = 31, 6


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor, kind: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mixed = x.new_zeros(*x.shape[:2], 3 * x.shape[2])
        for k, mix in enumerate(self.mix):
            mixed[kind == k] = mix(x[kind == k])
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in mixed.chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, mask[:, None]).transpose(1, 2).flatten(2)
        y = torch.zeros_like(x)
        for k, out in enumerate(self.out):
            y[kind == k] = out(seen[kind == k])
        return x + y


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.patch = nn.Embedding(32, 16), nn.Linear(ENTRIES, 16)
        self.layers = nn.ModuleList(Layer(16) for _ in range(2))
        self.head, self.flow = nn.Linear(16, 32), nn.Linear(16, ENTRIES)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, patches: torch.Tensor | None = None
    ) -> torch.Tensor:
        x, kind = self.embed(ids), torch.zeros_like(ids)
        if patches is not None:
            kind = (ids == PICTURE).long()
            x = x.masked_scatter((kind == 1)[..., None], self.patch(patches * 0.5))
        both = (kind[:, :, None] == 1) & (kind[:, None, :] == 1)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril() | both
        for layer in self.layers:
            x = layer(x, kind, mask & (ids != 0)[:, None])
        loss = F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        if patches is not None:
            loss = loss + F.mse_loss(self.flow(x[kind == 1]), patches)
        return loss


def model() -> nn.Module:
    return Mixture()


def sample(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    ids = torch.randint(1, PICTURE, (4 + i % 5,), generator=g)
    if i % 3 == 0:
        return {"ids": ids, "labels": ids}
    ids = torch.cat([ids[:2], torch.full((3 + i % 2,), PICTURE), ids[2:]])
    patches = torch.randn(3 + i % 2, ENTRIES, generator=g)
    return {"ids": ids, "labels": ids.masked_fill(ids == PICTURE, -100), "patches": patches}


def dataset() -> list[dict[str, torch.Tensor]]:
    return [sample(i) for i in range(60)]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    def padded(key: str, fill: int) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence([s[key] for s in samples], True, fill)

    patches = [s["patches"] for s in samples if "patches" in s]
    batch = {"ids": padded("ids", 0), "labels": padded("labels", -100)}
    return batch | ({"patches": torch.cat(patches)} if patches else {})
