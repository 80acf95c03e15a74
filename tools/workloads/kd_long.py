"""Workload kd-long: Qwen3-32B teaches Qwen3-8B on texts of 32k to 128k tokens; 128 samples a step on 16x8
H100."""

from __future__ import annotations

import torch
from parts.configs import qwen3_8b, qwen3_32b, small_text
from parts.long_texts import LongDistillation, LongTexts, long_language_model
from torch import nn

TEXTS = LongTexts(32_768, 131_072)


def model() -> nn.Module:
    teacher, student = (long_language_model(config) for config in (qwen3_32b(), qwen3_8b()))
    return LongDistillation(teacher, student).to(torch.bfloat16)


def small_model() -> nn.Module:
    return LongDistillation(
        long_language_model(small_text("Qwen3", 48)), long_language_model(small_text("Qwen3"))
    )


def dataset() -> LongTexts:
    return TEXTS


def small_dataset() -> LongTexts:
    return TEXTS.small


def sizes(i: int) -> dict[str, int]:
    return TEXTS.sizes(i)
