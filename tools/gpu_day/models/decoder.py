"""A language model alone: Qwen3-8B's layers."""

from __future__ import annotations

import torch
import transformers as T
from torch import nn

from tools.gpu_day.models.sizes import Samples, build_model, choose, decoder, learnable_tokens


def model() -> nn.Module:
    layers, hidden, heads, ffn = choose(
        {"small": (2, 32, 4, 64), "train": (8, 768, 12, 2048), "layers": (4, 4096, 32, 12_288)}
    )
    return build_model(lambda: decoder(T.Qwen3Config, layers, hidden, heads, ffn, head_dim=hidden // heads))


def _sample(generator: torch.Generator, length: int) -> dict[str, torch.Tensor]:
    tokens = learnable_tokens(generator, length)
    return {"input_ids": tokens, "labels": tokens}


def dataset() -> Samples:
    return Samples(_sample)
