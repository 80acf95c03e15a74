"""Workload omni-7b: Qwen2.5-VL's tower, Whisper large's encoder and a 7B language model, all trained; 512
samples a step on 8x8 H100."""

from __future__ import annotations

import torch
from parts.configs import (
    language_model,
    qwen2_5_7b,
    qwen_vit,
    small_qwen_vit,
    small_text,
    small_whisper,
    whisper_large,
)
from parts.data import Mix, qwen_images
from parts.models import Multimodal, Supervised
from parts.packing import collate as collate
from torch import nn

MIX = Mix(qwen_images, p_audio=0.2)


def model() -> nn.Module:
    text = qwen2_5_7b()
    return Supervised(Multimodal(language_model(text), qwen_vit(text.hidden_size), whisper_large())).to(
        torch.bfloat16
    )


def small_model() -> nn.Module:
    return Supervised(Multimodal(language_model(small_text("Qwen2")), small_qwen_vit(32), small_whisper()))


def dataset() -> Mix:
    return MIX


def small_dataset() -> Mix:
    return MIX.small


def sizes(i: int) -> dict[str, int]:
    return MIX.sizes(i)
