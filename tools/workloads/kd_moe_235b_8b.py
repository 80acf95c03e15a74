"""Workload kd-moe-235b-8b: Qwen3-235B-A22B teaches Qwen3-8B; 512 samples a step on 32x8 H100."""

from __future__ import annotations

import torch
from parts.configs import language_model, qwen3_8b, qwen3_235b_a22b, small_mixture, small_text
from parts.data import Mix
from parts.models import Distillation, LanguageModel
from parts.packing import collate as collate
from torch import nn

MIX = Mix(long_text=True)


def model() -> nn.Module:
    teacher, student = (LanguageModel(language_model(c)) for c in (qwen3_235b_a22b(), qwen3_8b()))
    return Distillation(teacher, student).to(torch.bfloat16)


def small_model() -> nn.Module:
    teacher, student = (LanguageModel(language_model(c)) for c in (small_mixture(48), small_text("Qwen3")))
    return Distillation(teacher, student)


def dataset() -> Mix:
    return MIX


def small_dataset() -> Mix:
    return MIX.small


def sizes(i: int) -> dict[str, int]:
    return MIX.sizes(i)
