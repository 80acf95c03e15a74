"""A plain PyTorch tower that takes frames as entries of a batch: blocks of convolutions, and layers of
attention within a frame; and a decoder that reads one state for each patch. Videos have two to nine frames;
every third sample has none."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

WIDTH, HEADS, PATCHES, WORDS, VIDEO, IGNORED = 16, 2, 4, 40, 39, -100


class FrameLayer(nn.Module):
    """Attention over the patches [frames, patches, width] of each frame, with a bias for pairs of patches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, PATCHES, PATCHES))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()
        seen = F.scaled_dot_product_attention(q, k, v, self.bias[None])
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class ConvLayer(nn.Module):
    """Convolutions over the pictures [frames, width, height, width] of each frame (ConvNeXt, 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.norm, self.mlp = nn.GroupNorm(1, WIDTH), nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.mlp(self.norm(self.mix(x))))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.blocks = nn.ModuleList(ConvLayer() for _ in range(2))
        self.layers = nn.ModuleList(FrameLayer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        x = self.embed(frames)
        for block in self.blocks:
            x = block(x)
        x = x.flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(seen.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class VideoReader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.tower, self.decoder = nn.Embedding(WORDS, WIDTH), Tower(), Decoder()

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, frames: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.words(input_ids)
        if frames is not None:
            seen = self.tower(frames).flatten(0, 1)
            x = x.masked_scatter((input_ids == VIDEO)[..., None].expand_as(x), seen)
        logits = self.decoder(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


class Videos(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(i)
        text = torch.randint(1, VIDEO, (5 + i % 6,), generator=g)
        if i % 3 == 2:
            return {"input_ids": text, "labels": text}
        frames = 2 + i % 8
        return {
            "input_ids": torch.cat([torch.full((frames * PATCHES,), VIDEO), text]),
            "labels": torch.cat([torch.full((frames * PATCHES,), IGNORED), text]),
            "frames": torch.randn(frames, 3, 4, 4, generator=g),
        }


def model() -> nn.Module:
    return VideoReader()


def dataset() -> Videos:
    return Videos()


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = nn.utils.rnn.pad_sequence
    batch = {
        "input_ids": pad([s["input_ids"] for s in samples], batch_first=True),
        "labels": pad([s["labels"] for s in samples], batch_first=True, padding_value=IGNORED),
    }
    videos = [s["frames"] for s in samples if "frames" in s]
    return batch | ({"frames": torch.cat(videos)} if videos else {})


def optimizer(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)  # type: ignore[arg-type]
