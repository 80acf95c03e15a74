"""Qwen3-VL with mixtures of experts, small: a vision tower with DeepStack features in front of text layers
with four experts each; half of the samples have a picture."""

from __future__ import annotations

from typing import Any

import transformers as T
from torch import nn

from tools.zoo_models import entry
from tools.zoo_models.grids import ROPE, TOKENS, TOWER, MRoPE

_DATA = entry("qwen3_vl")
dataset, collate = _DATA.dataset, _DATA.collate


def model() -> nn.Module:
    vision: dict[str, Any] = TOWER | {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    text: dict[str, Any] = MRoPE | {
        "head_dim": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_parameters": ROPE | {"mrope_interleaved": True},
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "router_aux_loss_coef": 0.0,
    }
    config = T.Qwen3VLMoeConfig(vision_config=vision, text_config=text, **TOKENS)
    return T.Qwen3VLMoeForConditionalGeneration(config)
