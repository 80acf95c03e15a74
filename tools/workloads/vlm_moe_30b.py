"""Workload vlm-moe-30b: Qwen2.5-VL's tower and Qwen3-30B-A3B, the language model of Qwen3-VL-30B-A3B, both
trained; 512 samples a step on 8x8 H100. (Qwen3-VL's own tower also hands features of three of its layers to
the language model; they are left out.)"""

from __future__ import annotations

import torch
from parts.configs import language_model, qwen3_30b_a3b, qwen_vit, small_mixture, small_qwen_vit
from parts.data import Mix, qwen_images
from parts.models import Multimodal, Supervised
from parts.packing import collate as collate
from torch import nn

MIX = Mix(qwen_images)


def model() -> nn.Module:
    text = qwen3_30b_a3b()
    return Supervised(Multimodal(language_model(text), qwen_vit(text.hidden_size))).to(torch.bfloat16)


def small_model() -> nn.Module:
    return Supervised(Multimodal(language_model(small_mixture()), small_qwen_vit(32)))


def dataset() -> Mix:
    return MIX


def small_dataset() -> Mix:
    return MIX.small


def sizes(i: int) -> dict[str, int]:
    return MIX.sizes(i)
