"""Small decoders with different kinds of attention, for tests of context parallelism. Each is an `Entry`, as
the models of the zoo are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers as T
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from tools.zoo_models.entry import Entry
from tools.zoo_models.parts import TEXT
from tools.zoo_models.samples import IGNORED, VOCABULARY, Sample, padded, text_only, words

WIDTH, HEADS = 48, 4
WINDOWS: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


class OwnAttention(nn.Module):
    """Grouped queries with rotary code, mask and softmax of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 96), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        samples, rows, _ = x.shape
        heads = self.qkv(self.norm(x)).view(samples, rows, 2 * HEADS, 12).transpose(1, 2)
        q, k, v = heads.split((HEADS, HEADS // 2, HEADS // 2), dim=1)
        cos, sin = angles.cos(), angles.sin()

        def turn(t: torch.Tensor) -> torch.Tensor:
            even, odd = t[..., ::2], t[..., 1::2]
            return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

        k, v = (t.repeat_interleave(2, dim=1) for t in (turn(k), v))
        scores = torch.einsum("bhqd,bhkd->bhqk", turn(q), k) / 12**0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        seen = torch.einsum("bhqk,bhkd->bhqd", weights, v)
        return x + self.out(seen.transpose(1, 2).reshape(samples, rows, WIDTH))


class OwnDecoder(nn.Module):
    """A decoder in plain PyTorch: attention among rows of one number (a document, or a whole sample) that are
    not padding; places begin with 0 in each."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(OwnAttention() for _ in range(2))

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, document: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        rows = input_ids.shape[1]
        angles = places[:, None, :, None] * 0.1 ** torch.arange(6)
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()
        mask = causal & (document[:, None, :] == document[:, :, None])
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x, angles.to(x.dtype), mask[:, None])
        logits = self.head(x[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def _documents(g: torch.Generator) -> Sample:
    """One to three documents side by side; each begins without a label."""
    parts = [words(g, 2, 9) for _ in range(int(torch.randint(1, 4, (), generator=g)))]
    labels = torch.cat(parts)
    labels[torch.tensor([0, *[len(p) for p in parts[:-1]]]).cumsum(0)] = IGNORED
    return {
        "input_ids": torch.cat(parts),
        "labels": labels,
        "document": torch.cat([torch.full_like(p, n) for n, p in enumerate(parts)]),
        "places": torch.cat([torch.arange(len(p)) for p in parts]),
    }


def _pad_documents(samples: Sequence[Sample]) -> Sample:
    return padded(samples, {"input_ids": 0, "labels": IGNORED, "document": -1, "places": 0})


def _pad_left(samples: Sequence[Sample]) -> Sample:
    """Texts padded on the left, with the mask and the positions that say so."""
    flipped = [{k: v.flip(0) for k, v in s.items()} for s in samples]
    batch = padded(flipped, {"input_ids": 0, "labels": IGNORED}, "attention_mask")
    batch = {k: v.flip(1) for k, v in batch.items()}
    return batch | {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def _short(g: torch.Generator) -> Sample:
    """A text that mostly has fewer tokens than four ranks."""
    text = words(g, 2, 6)
    return {"input_ids": text, "labels": text}


def _tail(g: torch.Generator) -> Sample:
    """A short text, or one in four times a long one."""
    text = words(g, 20, 31) if torch.rand((), generator=g) < 0.25 else words(g, 2, 9)
    return {"input_ids": text, "labels": text}


def _sound(g: torch.Generator) -> Sample:
    return {"input_features": torch.randn(1, 8, 32, generator=g), "labels": words(g, 3, 20)}


def _pad_sounds(samples: Sequence[Sample]) -> Sample:
    labels = pad_sequence([s["labels"] for s in samples], batch_first=True, padding_value=IGNORED)
    return {"input_features": torch.cat([s["input_features"] for s in samples]), "labels": labels}


def _llama() -> nn.Module:
    return T.LlamaForCausalLM(T.LlamaConfig(**TEXT))


def _deep_llama() -> nn.Module:
    """Four layers, and a head that shares the embedding."""
    deep: dict[str, Any] = {"num_hidden_layers": 4, "tie_word_embeddings": True}
    return T.LlamaForCausalLM(T.LlamaConfig(**TEXT | deep))


def _odd_llama() -> nn.Module:
    """Three layers, so that two even stages would begin inside the second one."""
    return T.LlamaForCausalLM(T.LlamaConfig(**TEXT | {"num_hidden_layers": 3}))


def _odd_mixture() -> nn.Module:
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "moe_intermediate_size": 24, "num_experts": 4}
    return T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(**TEXT | sizes, head_dim=12, num_experts_per_tok=2))


def _llama_of_heads() -> nn.Module:
    """Eight heads of queries on four of keys and values, which four ranks can divide."""
    heads: dict[str, Any] = {"num_attention_heads": 2 * HEADS, "num_key_value_heads": HEADS}
    return T.LlamaForCausalLM(T.LlamaConfig(**TEXT | heads))


def _qwen3() -> nn.Module:
    return T.Qwen3ForCausalLM(T.Qwen3Config(**TEXT, head_dim=12))


def _gemma3_text() -> nn.Module:
    return T.Gemma3ForCausalLM(T.Gemma3TextConfig(**TEXT, **WINDOWS, head_dim=12))


def _mistral() -> nn.Module:
    return T.MistralForCausalLM(T.MistralConfig(**TEXT, sliding_window=5))


def _bloom() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS}
    return T.BloomForCausalLM(T.BloomConfig(**sizes, use_cache=False, pad_token_id=0))


def _whisper() -> nn.Module:
    counts = {"layers": 2, "attention_heads": HEADS, "ffn_dim": 96}
    sizes: dict[str, Any] = {f"{side}_{k}": n for side in ("encoder", "decoder") for k, n in counts.items()}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"max_source_positions": 16, "max_target_positions": 32, "num_mel_bins": 8}
    config = T.WhisperConfig(vocab_size=VOCABULARY, d_model=WIDTH, **lengths, **tokens, **sizes)
    config.use_cache = False
    return T.WhisperForConditionalGeneration(config)


DECODERS = {
    e.name: e
    for e in (
        Entry("llama", "decoders", _llama, text_only),
        Entry("llama_deep", "decoders", _deep_llama, text_only),
        Entry("llama_odd", "decoders", _odd_llama, text_only),
        Entry("mixture_odd", "decoders", _odd_mixture, text_only),
        Entry("llama_short", "decoders", _llama, _short),
        Entry("llama_tail", "decoders", _llama, _tail),
        Entry("llama_tail_left", "decoders", _llama, _tail, _pad_left),
        Entry("llama_heads", "decoders", _llama_of_heads, text_only),
        Entry("llama_heads_left", "decoders", _llama_of_heads, text_only, _pad_left),
        Entry("llama_heads_short", "decoders", _llama_of_heads, _short),
        Entry("qwen3", "decoders", _qwen3, text_only, _pad_left),
        Entry("gemma3_text", "decoders", _gemma3_text, text_only),
        Entry("gemma3_text_left", "decoders", _gemma3_text, text_only, _pad_left),
        Entry("mistral", "decoders", _mistral, text_only),
        Entry("bloom", "decoders", _bloom, text_only),
        Entry("whisper_padded", "decoders", _whisper, _sound, _pad_sounds),
        Entry("documents", "decoders", OwnDecoder, _documents, _pad_documents),
    )
}


def source(name: str) -> str:
    """The text of a model file for a decoder."""
    made = DECODERS[name]
    lines = [f"from tests.e2e.decoders import DECODERS\n\n_ENTRY = DECODERS[{name!r}]"]
    lines += [
        "model, dataset = _ENTRY.model, _ENTRY.dataset",
        "collate = _ENTRY.collate" * bool(made.collate),
    ]
    return "\n".join(lines) + "\n"
