"""A plain PyTorch tower that attends to each frame of videos by itself, and a decoder that reads its patches.
Videos have two to seven frames of four to nine patches; every third sample has none."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

WIDTH, HEADS, PATCH, WORDS, VIDEO, IGNORED = 16, 2, 6, 40, 39, -100


class FrameLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3).unbind()
        frames = zip(*(t.split(ends.diff().tolist(), 1) for t in parts), strict=True)
        seen = torch.cat([F.scaled_dot_product_attention(*frame) for frame in frames], 1)
        x = x + self.out(seen.transpose(0, 1).flatten(1))
        return x + self.mlp(x)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH, WIDTH)
        self.layers = nn.ModuleList(FrameLayer() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, patches: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        ends = F.pad(frames.cumsum(0), (1, 0))
        x = self.embed(patches)
        for layer in self.layers:
            x = layer(x, ends)
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
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(3))
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
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        patches: torch.Tensor | None = None,
        frames: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.words(input_ids)
        if patches is not None:
            seen = self.tower(patches, frames)
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
        frames = torch.randint(4, 10, (2 + i % 6,), generator=g)
        count = int(frames.sum())
        return {
            "input_ids": torch.cat([torch.full((count,), VIDEO), text]),
            "labels": torch.cat([torch.full((count,), IGNORED), text]),
            "patches": torch.randn(count, PATCH, generator=g),
            "frames": frames,
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
    videos = [s for s in samples if "frames" in s]
    return batch | ({k: torch.cat([s[k] for s in videos]) for k in ("patches", "frames")} if videos else {})


def optimizer(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)  # type: ignore[arg-type]
