"""A GPT-OSS of experts with biases, and with enough heads for four ranks."""

from __future__ import annotations

import torch
import transformers as T


def model() -> torch.nn.Module:
    return T.GptOssForCausalLM(
        T.GptOssConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=8,
            intermediate_size=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=4,
            use_cache=False,
            max_position_embeddings=32,
            output_router_logits=False,
        )
    )


def dataset() -> list[dict[str, torch.Tensor]]:
    ids = [torch.arange(1, n) * (i + 3) % 64 for i, n in enumerate([7, 10, 5, 12] * 12)]
    return [dict(input_ids=i, labels=i.clone()) for i in ids]


def optimizer(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)
