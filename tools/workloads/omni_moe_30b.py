"""Workload omni-moe-30b: Qwen2.5-VL's tower, Whisper large's encoder and Qwen3-30B-A3B, all trained, as the
thinker of an omni model; 512 samples a step on 8x8 H100."""

from __future__ import annotations

import torch
from parts.configs import (
    language_model,
    qwen3_30b_a3b,
    qwen_vit,
    small_mixture,
    small_qwen_vit,
    small_whisper,
    whisper_large,
)
from parts.data import Mix, qwen_images
from parts.models import Multimodal, Supervised
from parts.packing import collate as collate
from torch import nn

MIX = Mix(qwen_images, p_audio=0.2)


def model() -> nn.Module:
    text = qwen3_30b_a3b()
    joined = Multimodal(language_model(text), qwen_vit(text.hidden_size), whisper_large())
    return Supervised(joined).to(torch.bfloat16)


def small_model() -> nn.Module:
    return Supervised(Multimodal(language_model(small_mixture()), small_qwen_vit(32), small_whisper()))


def dataset() -> Mix:
    return MIX


def small_dataset() -> Mix:
    return MIX.small


def sizes(i: int) -> dict[str, int]:
    return MIX.sizes(i)
