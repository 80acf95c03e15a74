"""Small configurations of the language models and towers that compound models share."""

from __future__ import annotations

from typing import Any

import transformers as T
from torch import nn

from tools.zoo_models.samples import VOCABULARY

TEXT: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    use_cache=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
VISION: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=32,
    patch_size=8,
)


def llama(**options: Any) -> T.LlamaConfig:
    """A Llama of two layers."""
    return T.LlamaConfig(**TEXT | options)


def qwen2(**options: Any) -> T.Qwen2Config:
    """A Qwen2 of two layers."""
    return T.Qwen2Config(**TEXT | options)


def mistral(**options: Any) -> T.MistralConfig:
    """A Mistral of two layers without a sliding window."""
    return T.MistralConfig(**TEXT | {"sliding_window": None} | options)


def clip(**options: Any) -> T.CLIPVisionConfig:
    """A CLIP tower: 16 patches and a class token."""
    return T.CLIPVisionConfig(**VISION | options)


def siglip(**options: Any) -> T.SiglipVisionConfig:
    """A SigLIP tower: 16 patches."""
    return T.SiglipVisionConfig(**VISION | options)


def quiet(config: T.PreTrainedConfig) -> T.PreTrainedConfig:
    """The configuration with every dropout, of its parts too, set to 0: what draws random numbers cannot be
    compared."""
    for name, value in vars(config).items():
        if isinstance(value, T.PreTrainedConfig):
            quiet(value)
        elif isinstance(value, float) and any(
            sign in name for sign in ("drop", "mask_time_prob", "mask_feature_prob")
        ):
            setattr(config, name, 0.0)
    return config


def frozen(model: nn.Module, *paths: str) -> nn.Module:
    """The model with the parts at `paths` frozen."""
    for path in paths:
        model.get_submodule(path).requires_grad_(False)
    return model
