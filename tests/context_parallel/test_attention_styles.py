"""Decoders that write attention in ways of their own, on the rows of two and three ranks: loss and all
gradients are those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from secc.runtime.model.flex_attention import prepare_flex_attention
from tests.context_parallel.test_row_mode import assert_same

prepare_flex_attention()
WIDTH, HEADS, WORDS = 32, 4, 64
HEAD = WIDTH // HEADS
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Style(nn.Module):
    """A layer with queries, keys and values [samples, heads, rows, width]; kinds differ in `attend`."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index, self.norm = index, nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def heads(self, x: torch.Tensor) -> Heads:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        out = self.attend(*self.heads(x), x, context)
        return x + self.out(out.transpose(1, 2).flatten(2))

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor, context: dict[str, Any]
    ) -> torch.Tensor:
        raise NotImplementedError


def causal(rows: int) -> torch.Tensor:
    return torch.ones(rows, rows, dtype=torch.bool).tril()


class PrefixMask(Style):
    """Sees the whole prefix of its sample, and what is before; mask made in the layer."""

    def attend(self, q: Any, k: Any, v: Any, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        mask = causal(x.shape[1]) | (places < context["prefix"][:, None])[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class WindowByLayer(Style):
    """A window of another width in each layer, written into the scores in place."""

    def attend(self, q: Any, k: Any, v: Any, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        places = torch.arange(x.size(1))
        distance = places[:, None] - places[None, :]
        hidden = (distance < 0) | (distance >= 2 + 3 * self.index)
        scores = q @ k.mT / HEAD**0.5
        scores.masked_fill_(hidden, -torch.inf)
        return torch.softmax(scores, dim=-1) @ v


class Chunks(Style):
    """Attention inside of chunks of four rows, as views of the padded sequence."""

    def attend(self, q: Any, k: Any, v: Any, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        rows = x.shape[1]
        short = -rows % 4
        q, k, v = (F.pad(t, (0, 0, 0, short)).unflatten(2, (-1, 4)) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.flatten(2, 3)[:, :, :rows]


class ChunkMask(Style):
    """Chunks by a mask of numbers."""

    def attend(self, q: Any, k: Any, v: Any, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        chunk = torch.arange(x.shape[1]) // 4
        seen = causal(x.shape[1]) & (chunk[:, None] == chunk)
        bias = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, bias)


class OwnAlibi(Style):
    """ALiBi: slopes times distances, added by `baddbmm`."""

    def attend(self, q: Any, k: Any, v: Any, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        samples, rows, _ = x.shape
        places = torch.arange(rows, dtype=x.dtype)
        slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=x.dtype)
        bias = slopes[:, None, None] * (places[None, None, :] - places[None, :, None])
        bias = bias.masked_fill(~causal(rows), -torch.inf).repeat(samples, 1, 1)
        scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=self.index + 0.3)
        return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view(samples, HEADS, rows, HEAD)


class AcrossMemory(Style):
    """Queries of the rows on a memory that is whole, then on themselves."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)

    def attend(self, q: Any, k: Any, v: Any, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        memory = self.kv(context["memory"]).unflatten(-1, (2, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, memory[0], memory[1], context["memory_mask"])
        return seen + F.scaled_dot_product_attention(q, k, v, is_causal=True)


class TwoDimensionalRope(Style):
    """Half of a head turns by the row, half by the column of a picture four entries wide."""

    def turn(self, t: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        angle = places.to(t.dtype)[:, None] * 0.3 ** torch.arange(t.shape[-1] // 2)
        a, b = t.chunk(2, dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def attend(self, q: Any, k: Any, v: Any, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        place = torch.arange(x.shape[1])
        q, k = (
            torch.cat(
                [self.turn(t[..., : HEAD // 2], place // 4), self.turn(t[..., HEAD // 2 :], place % 4)], -1
            )
            for t in (q, k)
        )
        return F.scaled_dot_product_attention(q, k, v)


class EinsumSoftmax(Style):
    """Scores as keys by queries, and a softmax by hand with a sink."""

    def attend(self, q: Any, k: Any, v: Any, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        scores = torch.einsum("bhkd,bhqd->bhkq", k, q) * self.scale
        scores = scores.masked_fill(~causal(x.shape[1]).T, -torch.inf)
        top = scores.amax(-2, keepdim=True).clamp(min=0).detach()
        weights = (scores - top).exp()
        weights = weights / (weights.sum(-2, keepdim=True) + (self.scale - top).exp())
        return torch.einsum("bhkq,bhkd->bhqd", weights, v)


class SharedKeys(Style):
    """Odd layers attend to keys and values of the layer before."""

    def attend(self, q: Any, k: Any, v: Any, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        if self.index % 2:
            k, v = context["shared"]
        context["shared"] = k, v
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Differential(Style):
    """The difference of two maps of attention, normed by head (Ye et al., 2024)."""

    def attend(self, q: Any, k: Any, v: Any, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype).triu(1)
        maps = [
            F.softmax(a @ b.transpose(-1, -2) + mask, -1)
            for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        ]
        return F.rms_norm((maps[0] - self.scale * maps[1]) @ v, (HEAD,))


class LinearAttention(Style):
    """Sums over all keys before a query, by a cumulative sum."""

    def attend(self, q: Any, k: Any, v: Any, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)
        total = (q * k.cumsum(2)).sum(-1, keepdim=True)
        return (q.unsqueeze(-2) @ state).squeeze(-2) / total


class CosineAndTopKeys(Style):
    """Normed queries and keys; only the three best keys of each query count."""

    def attend(self, q: Any, k: Any, v: Any, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        q, k = F.normalize(q, 2, -1), k / k.norm(2, -1, keepdim=True)
        scores = (q @ k.mT).masked_fill(~causal(x.shape[1]), -9.0)
        least = scores.topk(min(3, x.shape[1]), -1).values[..., -1:]
        return scores.masked_fill(scores < least, -torch.inf).softmax(-1) @ v


class Neighbours(Style):
    """Each row gets half of the row before: a shift by `roll`, one by `cat`, one by `diff`."""

    def attend(self, q: Any, k: Any, v: Any, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        before = torch.cat([torch.zeros_like(v[:, :, :1]), v[:, :, :-1]], dim=2)
        turned = v.roll(1, 2) * context["inner"]
        steps = torch.diff(v, 1, 2, prepend=v[:, :, :1])
        return F.scaled_dot_product_attention(q, k, before + turned + steps, is_causal=True)


class SequenceGate(Style):
    """Statistics of the whole sequence scale every row; latents attend to it and are added to all."""

    def attend(self, q: Any, k: Any, v: Any, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        gate = torch.sigmoid(x.mean(1, keepdim=True) + x.std(1, keepdim=True) + x.amax(1, keepdim=True))
        latents = context["latents"].unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
        pooled = F.scaled_dot_product_attention(latents, k, v).mean(2, keepdim=True)
        return (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            * gate.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
            + pooled
        )


class RelativeTable(Style):
    """A learned bias by clamped distance, looked up and moved."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.table = nn.Embedding(9, HEADS)

    def attend(self, q: Any, k: Any, v: Any, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        bias = self.table((places[None] - places[:, None]).clamp(-4, 4) + 4).permute(2, 0, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0))


class FlexWindow(Style):
    """Flex attention over documents and a window, with a learned bias by clamped distance and head."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.table = nn.Parameter(torch.randn(9, HEADS))

    def attend(self, q: Any, k: Any, v: Any, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        prefix = context["prefix"]

        def may_attend(sample: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
            window = (query >= key) & (query - key < 4 + head)
            return window & ((query < prefix[sample]) == (key < prefix[sample]))

        def add_bias(score: Any, sample: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
            return score + self.table[(key - query).clamp(-4, 4) + 4, head]

        mask = create_block_mask(may_attend, len(x), HEADS, x.shape[1], x.shape[1], device=x.device)
        return flex_attention(q, k, v, add_bias, mask)


class FlexGates(Style):
    """Flex attention with a score by the rows of query and key, and a sink from the sums of the softmax."""

    def attend(self, q: Any, k: Any, v: Any, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        gate = x.sigmoid().mean(-1)

        def weigh_score(score: Any, sample: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
            weighed = score * gate[sample, query] + gate[sample, key]
            return torch.where(query >= key, weighed, -torch.inf)

        out, more = flex_attention(q, k, v, weigh_score, scale=0.4, return_aux=AuxRequest(lse=True))
        return out * (more.lse - self.scale).sigmoid()[..., None]


class FlexGroups(Style):
    """Flex attention of all to all, two heads of queries on one of keys."""

    def attend(self, q: Any, k: Any, v: Any, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        return flex_attention(q, k[:, :: HEADS // 2], v[:, :: HEADS // 2], enable_gqa=True)


class TorchLayer(nn.Module):
    """torch's own encoder layer with a causal mask."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 48, 0.0, batch_first=True, norm_first=index == 1
        )

    def forward(self, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.layer(x, src_mask=mask, is_causal=True)


class RowsFirst(nn.Module):
    """torch's own decoder layer on tensors of [rows, samples, width]."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 48, 0.0)

    def forward(self, x: torch.Tensor, context: dict[str, Any]) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.layer(x.transpose(0, 1), context["memory"].transpose(0, 1), mask).transpose(0, 1)


class Decoder(nn.Module):
    """Two layers of a style, and losses that see logits of all rows in several ways."""

    def __init__(self, style: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(style(index) for index in range(2))
        self.latents = nn.Parameter(torch.randn(1, 2, WIDTH))

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, prefix: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor:
        context: dict[str, Any] = {
            "prefix": prefix,
            "memory": memory,
            "memory_mask": (torch.arange(memory.shape[1]) < 3 + prefix[:, None])[:, None, None],
            "latents": self.latents.expand(len(input_ids), -1, -1),
            "inner": (torch.arange(input_ids.shape[1]) > 0)[:, None],
        }
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x, context)
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        count = (labels != -100).sum(1)
        by_sample = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1) / count
        return loss + by_sample.mean() + 1e-2 * logits.logsumexp(-1).square().mean()


STYLES = (
    PrefixMask, WindowByLayer, Chunks, ChunkMask, OwnAlibi, AcrossMemory, TwoDimensionalRope, EinsumSoftmax,
    SharedKeys, Differential, LinearAttention, CosineAndTopKeys, Neighbours, SequenceGate, RelativeTable,
    FlexWindow, FlexGates, FlexGroups, TorchLayer, RowsFirst,
)  # fmt: skip


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.__name__)
def test_attention_of_any_style_is_exact_on_rows(style: Callable[[int], nn.Module]) -> None:
    """13 rows on 2 ranks and on 3, and 4 rows on 3, with heads exchanged, too."""
    torch.manual_seed(0)
    model, generator = Decoder(style), torch.Generator().manual_seed(1)
    for rows, count, attention in (
        (13, 2, "gather"),
        (13, 3, "gather"),
        (4, 3, "gather"),
        (13, 2, "ulysses"),
    ):
        ids = torch.randint(0, WORDS, (2, rows), generator=generator)
        batch = {
            "input_ids": ids,
            "labels": ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100),
            "prefix": torch.tensor([2, 3]),
            "memory": torch.randn(2, 7, WIDTH, generator=generator).double(),
        }
        batch["labels"][:, -1] = 5
        assert_same(model, batch, count, attention)
