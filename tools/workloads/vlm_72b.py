"""Workload vlm-72b: Qwen2.5-VL's tower and a 72B language model, both trained; 512 samples a step on 32x8
H100."""

from __future__ import annotations

import torch
from parts.configs import language_model, qwen2_5_72b, qwen_vit, small_qwen_vit, small_text
from parts.data import Mix, qwen_images
from parts.models import Multimodal, Supervised
from parts.packing import collate as collate
from torch import nn

MIX = Mix(qwen_images)


def model() -> nn.Module:
    text = qwen2_5_72b()
    return Supervised(Multimodal(language_model(text), qwen_vit(text.hidden_size, ffn=3456))).to(
        torch.bfloat16
    )


def small_model() -> nn.Module:
    return Supervised(Multimodal(language_model(small_text("Qwen2")), small_qwen_vit(32)))


def dataset() -> Mix:
    return MIX


def small_dataset() -> Mix:
    return MIX.small


def sizes(i: int) -> dict[str, int]:
    return MIX.sizes(i)
