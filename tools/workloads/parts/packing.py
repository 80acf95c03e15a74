"""Packed batches: the samples' tokens one after another in one row, and attention that stays inside each
sample.

`collate` gives `input_ids`, `labels` and `position_ids` of shape [1, tokens] and `lengths` [samples];
`PER_SAMPLE` is the attention that configurations name. Nothing is padded, and no sample sees another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers as T
from torch.nn import functional as F

PER_SAMPLE = "per_sample"
# Hugging Face's vision towers hand offsets of images and windows to attention of this kind of name
PER_IMAGE = "per_image_flash"
IGNORED = -100
ROWS = ("input_ids", "labels")  # one row of tokens; everything else is stacked along its dim 0

Sample = dict[str, torch.Tensor]


def collate(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Samples in order; tensors that are one row repeated stay that, so that sizes alone take no memory."""
    batch = {key: torch.cat([s[key] for s in samples])[None] for key in ROWS}
    counts = [len(s["input_ids"]) for s in samples]
    batch["lengths"] = torch.tensor(counts)
    batch["position_ids"] = torch.cat([torch.arange(n) for n in counts])[None]
    for key in dict.fromkeys(k for s in samples for k in s if k not in ROWS):
        batch[key] = _joined([s[key] for s in samples if key in s])
    return batch


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    if all(p.stride(0) == 0 for p in parts):
        return parts[0][:1].expand(sum(map(len, parts)), *parts[0].shape[1:])
    return torch.cat(parts)


def offsets(lengths: torch.Tensor) -> torch.Tensor:
    """Where each sample begins, and where the last one ends."""
    return F.pad(lengths.cumsum(0), (1, 0))


def per_sample(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as Hugging Face calls it, [1, heads, tokens, dim] -> [1, tokens, heads, dim], inside each
    sample if offsets are given."""
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", False))
    lengths = [query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.diff().tolist()
    parts = zip(*(t.split(lengths, dim=2) for t in (query, key, value)), strict=True)
    grouped = query.shape[1] != key.shape[1]
    outs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scaling, enable_gqa=grouped)
        for q, k, v in parts
    ]
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    """What says which tokens see which are the offsets."""


T.AttentionInterface.register(PER_SAMPLE, per_sample)
T.AttentionInterface.register(PER_IMAGE, per_sample)
T.AttentionMaskInterface.register(PER_SAMPLE, _no_mask)
