"""Plain PyTorch: a decoder with a tied head, optional images (up to three a sample) and optional audio, and
its own collate."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

VOCABULARY, WIDTH = 64, 32
IMAGE, AUDIO = 62, 63
PATCHES, FRAMES = 4, 6


class Layer(nn.Module):
    """A pre-norm transformer layer, causal if asked."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(self.norm2(x))


class ImageEncoder(nn.Module):
    """[n, 3, 8, 8] -> [n, PATCHES, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4)
        self.layers = nn.ModuleList([Layer(WIDTH, causal=False) for _ in range(2)])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return x


class AudioEncoder(nn.Module):
    """[n, 2 * FRAMES, 10] -> [n, FRAMES, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(10, WIDTH, kernel_size=2, stride=2)
        self.layer = Layer(WIDTH, causal=False)

    def forward(self, audio: torch.Tensor) -> torch.Tensor:
        return self.layer(F.gelu(self.conv(audio.transpose(1, 2))).transpose(1, 2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(WIDTH, causal=True) for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Listener(nn.Module):
    """Text, images and sounds in one sequence; placeholders in `tokens` say where the encoders' outputs
    go."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.position = nn.Parameter(0.02 * torch.randn(128, WIDTH))
        self.image_encoder, self.audio_encoder, self.decoder = ImageEncoder(), AudioEncoder(), Decoder()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        images: torch.Tensor | None = None,
        audio: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        penalty = x.new_zeros(())
        if images is not None:
            features = self.image_encoder(images)
            x = x.masked_scatter((tokens == IMAGE).unsqueeze(-1), features)
            penalty = 0.01 * features.square().mean()
        if audio is not None:
            x = x.masked_scatter((tokens == AUDIO).unsqueeze(-1), self.audio_encoder(audio))
        logits = self.head(self.decoder(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + penalty}


def model() -> nn.Module:
    return Listener()


class Samples(Dataset):
    """Every second sample has one to three images, every third a sound; some have both, some neither."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        images = int(torch.randint(1, 4, (), generator=g)) if torch.rand((), generator=g) < 0.5 else 0
        sounds = int(torch.rand((), generator=g) < 0.35)
        text = torch.randint(1, IMAGE, (int(torch.randint(4, 14, (), generator=g)),), generator=g)
        before = torch.tensor([IMAGE] * (PATCHES * images) + [AUDIO] * (FRAMES * sounds), dtype=torch.long)
        tokens = torch.cat([before, text])
        targets = torch.cat([torch.full_like(before, -100), text[1:], text.new_full((1,), -100)])
        sample = {"tokens": tokens, "targets": targets}
        if images:
            sample["images"] = torch.randn(images, 3, 8, 8, generator=g)
        if sounds:
            sample["audio"] = torch.randn(2 * FRAMES, 10, generator=g)
        return sample


def dataset() -> Dataset:
    return Samples()


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    batch = {
        "tokens": pad_sequence([s["tokens"] for s in samples], batch_first=True),
        "targets": pad_sequence([s["targets"] for s in samples], batch_first=True, padding_value=-100),
    }
    if images := [s["images"] for s in samples if "images" in s]:
        batch["images"] = torch.cat(images)
    if audio := [s["audio"] for s in samples if "audio" in s]:
        batch["audio"] = torch.stack(audio)
    return batch
