"""Workload kd-32b-8b: Qwen3-32B teaches Qwen3-8B; 512 samples a step on 8x8 H100."""

from __future__ import annotations

import torch
from parts.configs import language_model, qwen3_8b, qwen3_32b, small_text
from parts.data import Mix
from parts.models import Distillation, LanguageModel
from parts.packing import collate as collate
from torch import nn

MIX = Mix(long_text=True)


def model() -> nn.Module:
    teacher, student = (LanguageModel(language_model(c)) for c in (qwen3_32b(), qwen3_8b()))
    return Distillation(teacher, student).to(torch.bfloat16)


def small_model() -> nn.Module:
    teacher, student = (
        LanguageModel(language_model(c)) for c in (small_text("Qwen3", 48), small_text("Qwen3"))
    )
    return Distillation(teacher, student)


def dataset() -> Mix:
    return MIX


def small_dataset() -> Mix:
    return MIX.small


def sizes(i: int) -> dict[str, int]:
    return MIX.sizes(i)
