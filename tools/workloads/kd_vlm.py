"""Workload kd-vlm: vlm-72b teaches vlm-7b on the same images; 512 samples a step on 16x8 H100."""

from __future__ import annotations

import torch
from parts.configs import language_model, qwen2_5_7b, qwen2_5_72b, qwen_vit, small_qwen_vit, small_text
from parts.data import Mix, qwen_images
from parts.models import Distillation, Multimodal
from parts.packing import collate as collate
from torch import nn

MIX = Mix(qwen_images)


def model() -> nn.Module:
    teacher = Multimodal(language_model(qwen2_5_72b()), qwen_vit(8192, ffn=3456))
    student = Multimodal(language_model(qwen2_5_7b()), qwen_vit(3584))
    return Distillation(teacher, student).to(torch.bfloat16)


def small_model() -> nn.Module:
    teacher = Multimodal(language_model(small_text("Qwen2", 48)), small_qwen_vit(48))
    student = Multimodal(language_model(small_text("Qwen2")), small_qwen_vit(32))
    return Distillation(teacher, student)


def dataset() -> Mix:
    return MIX


def small_dataset() -> Mix:
    return MIX.small


def sizes(i: int) -> dict[str, int]:
    return MIX.sizes(i)
