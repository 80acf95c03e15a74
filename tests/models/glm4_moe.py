"""A GLM-4 mixture of experts of Hugging Face: a dense layer, then layers with a shared expert and a router of
sigmoids with a correction for each expert."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T
from torch import nn


def model() -> nn.Module:
    more: dict[str, Any] = {"head_dim": 8}
    config = T.Glm4MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        use_cache=False,
        **more,
    )
    return T.Glm4MoeForCausalLM(config)


def dataset() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 64, (n,), generator=g) for n in [5, 9, 14, 3] * 12]
    return [{"input_ids": i, "labels": i.clone()} for i in ids]
