"""Workload kd-dsv3: DeepSeek-V3 of 671B teaches a dense student of 14B (Qwen3-14B with DeepSeek's
vocabulary); 2,048 samples a step on 128x8 H100."""

from __future__ import annotations

import torch
from parts.configs import deepseek_v3, language_model, qwen3_14b, small_deepseek_v3, small_text
from parts.data import Mix
from parts.models import Distillation, LanguageModel
from parts.packing import collate as collate
from torch import nn

MIX = Mix(long_text=True)


def model() -> nn.Module:
    teacher = deepseek_v3()
    student = qwen3_14b(teacher.vocab_size)
    return Distillation(*(LanguageModel(language_model(c)) for c in (teacher, student))).to(torch.bfloat16)


def small_model() -> nn.Module:
    teacher, student = small_deepseek_v3(), small_text("Qwen3")
    return Distillation(*(LanguageModel(language_model(c)) for c in (teacher, student)))


def dataset() -> Mix:
    return MIX


def small_dataset() -> Mix:
    return MIX.small


def sizes(i: int) -> dict[str, int]:
    return MIX.sizes(i)
