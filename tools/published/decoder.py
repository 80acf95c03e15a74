"""The decoders of published measurements in plain PyTorch, from their shapes alone: Llama (RMSNorm, rotary
positions, gated feed-forward network) and GPT (LayerNorm, learned positions)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

ROTARY_BASE = 1e4
MAX_POSITIONS = 65536


@dataclass(frozen=True)
class DecoderShape:
    """family: "llama" or "gpt". heads, kv: heads of queries, and of keys and values. ffn: inner width."""

    family: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    kv: int
    ffn: int
    tied: bool = False
    bias: bool = False


class Attention(nn.Module):
    """Causal self-attention of rows [B, S, hidden]; `cos` and `sin` [S, head] rotate, None leaves as is."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.head = shape.hidden // shape.heads
        rows = self.head * (shape.heads + 2 * shape.kv)
        self.splits = [self.head * shape.heads, self.head * shape.kv, self.head * shape.kv]
        self.qkv = nn.Linear(shape.hidden, rows, bias=shape.bias)
        self.out = nn.Linear(self.head * shape.heads, shape.hidden, bias=shape.bias)

    def forward(self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in self.qkv(x).split(self.splits, -1)
        )
        if cos is not None and sin is not None:
            q, k = (part * cos + rotate_half(part) * sin for part in (q, k))
        if k.shape[1] < q.shape[1]:
            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Rotates pairs of entries of x [..., head] by 90 degrees."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class FeedForward(nn.Module):
    """A gated network for Llama, two products around GELU for GPT."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gated = shape.family == "llama"
        self.up = nn.Linear(shape.hidden, shape.ffn * (2 if self.gated else 1), bias=shape.bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=shape.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x)
        if self.gated:
            gate, inner = inner.chunk(2, -1)
            return self.down(F.silu(gate) * inner)
        return self.down(F.gelu(inner))


def make_norm(shape: DecoderShape) -> nn.Module:
    """The family's norm over hidden units."""
    return (
        nn.RMSNorm(shape.hidden) if shape.family == "llama" else nn.LayerNorm(shape.hidden, bias=shape.bias)
    )


class Layer(nn.Module):
    """A layer with its norms before attention and feed-forward network."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.norm1, self.attention = make_norm(shape), Attention(shape)
        self.norm2, self.ffn = make_norm(shape), FeedForward(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.ffn(self.norm2(x))


class Decoder(nn.Module):
    """Hidden states [B, S, hidden] of tokens [B, S]."""

    freq: torch.Tensor

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        head = shape.hidden // shape.heads
        self.rotary = shape.family == "llama"
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        if self.rotary:
            freq = ROTARY_BASE ** (-torch.arange(0, head, 2) / head)
            self.register_buffer("freq", freq, persistent=False)
        else:
            self.positions = nn.Embedding(MAX_POSITIONS, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = make_norm(shape)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, cos, sin = self.embed(ids), None, None
        places = torch.arange(ids.shape[1], device=ids.device)
        if self.rotary:
            angles = places[:, None] * self.freq
            angles = torch.cat((angles, angles), -1)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        else:
            x = x + self.positions(places)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class LanguageModel(nn.Module):
    """The mean next-token loss of tokens [B, S] with labels [B, S], in float32 as frameworks compute it."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.decoder = Decoder(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.decoder.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.decoder(ids)).flatten(0, 1).float(), labels.flatten())


class FixedLengthTexts(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, all samples of one length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 9, (self.length,), generator=torch.Generator().manual_seed(i))
        return {"ids": ids, "labels": ids}
