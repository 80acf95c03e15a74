"""A decoder with mixtures of experts. The real layer sizes are those of Qwen3-30B-A3B, in two layers."""

from __future__ import annotations

import torch
import transformers as T
from torch import nn

from tools.gpu_day.models.sizes import Samples, build_model, choose, decoder, learnable_tokens


def model() -> nn.Module:
    layers, hidden, heads, head, ffn, experts, chosen = choose(
        {
            "small": (2, 32, 4, 8, 16, 4, 2),
            "train": (8, 1024, 16, 64, 384, 16, 4),
            "layers": (2, 2048, 32, 128, 768, 128, 8),
        }
    )
    return build_model(
        lambda: decoder(
            T.Qwen3MoeConfig,
            layers,
            hidden,
            heads,
            ffn,
            head_dim=head,
            moe_intermediate_size=ffn,
            num_experts=experts,
            num_experts_per_tok=chosen,
        )
    )


def _sample(generator: torch.Generator, length: int) -> dict[str, torch.Tensor]:
    tokens = learnable_tokens(generator, length)
    return {"input_ids": tokens, "labels": tokens}


def dataset() -> Samples:
    return Samples(_sample)
