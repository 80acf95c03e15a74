"""NaViT-style packing: images of all sizes in one row of patches, masked by image numbers that collate
counts; returns (logits, loss)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

PLACE, VOCABULARY = 49, 50


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(-2, -3) for t in self.qkv(self.norm(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(seen.transpose(-2, -3).flatten(-2))
        return x + self.mlp(x)


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.row, self.column = nn.Linear(12, 16), nn.Embedding(4, 16), nn.Embedding(4, 16)
        self.layers = nn.ModuleList([Layer(16), Layer(16)])

    def forward(self, patches: torch.Tensor, image: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = (self.embed(patches) + self.row(places[:, 0]) + self.column(places[:, 1]))[None]
        mask = (image[:, None] == image[None, :])[None, None]
        for layer in self.layers:
            x = layer(x, mask)
        return x[0]


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(20), Layer(20)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Reader(nn.Module):
    """`images` is a dict of tensors, and missing where no sample has an image."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.connector = Vision(), nn.Linear(16, 20)
        self.embed, self.text, self.head = nn.Embedding(VOCABULARY, 20), Text(), nn.Linear(20, VOCABULARY)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, images: dict[str, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, ...]:
        x = self.embed(ids)
        if images is not None:
            x = x.clone()
            x[ids == PLACE] = self.connector(self.vision(**images))
        logits = self.head(self.text(x))
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def model() -> nn.Module:
    return Reader()


def sample(i: int) -> dict[str, Any]:
    """A text behind up to two images of 1 to 9 patches."""
    g = torch.Generator().manual_seed(i)
    grids = torch.randint(1, 4, (int(torch.randint(0, 3, (), generator=g)), 2), generator=g).tolist()
    images = [
        (torch.randn(h * w, 12, generator=g), torch.cartesian_prod(torch.arange(h), torch.arange(w)))
        for h, w in grids
    ]
    text = torch.randint(1, PLACE, (int(torch.randint(4, 12, (), generator=g)),), generator=g)
    return {"text": text, "images": images}


def dataset() -> list[dict[str, Any]]:
    return [sample(i) for i in range(48)]


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    counts = [sum(len(patches) for patches, _ in s["images"]) for s in samples]
    texts = [torch.cat([torch.full((n,), PLACE), s["text"]]) for n, s in zip(counts, samples, strict=True)]
    ids = pad_sequence(texts, batch_first=True)
    labels = pad_sequence(
        [torch.where(t == PLACE, -100, t) for t in texts], batch_first=True, padding_value=-100
    )
    images = [image for s in samples for image in s["images"]]
    if not images:
        return {"ids": ids, "labels": labels}
    numbers = torch.cat([torch.full((len(patches),), n) for n, (patches, _) in enumerate(images)])
    patches, places = (torch.cat(parts) for parts in zip(*images, strict=True))
    return {"ids": ids, "labels": labels, "images": {"patches": patches, "image": numbers, "places": places}}
