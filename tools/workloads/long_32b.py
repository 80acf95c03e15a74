"""Workload long-32b: Qwen3-32B on texts of 4k to 256k tokens with a long tail; 512 samples a step on 32x8
H100."""

from __future__ import annotations

import torch
from parts.configs import qwen3_32b, small_text
from parts.long_texts import LongText, LongTexts, long_language_model
from torch import nn

TEXTS = LongTexts(4096, 262_144)


def model() -> nn.Module:
    return LongText(long_language_model(qwen3_32b())).to(torch.bfloat16)


def small_model() -> nn.Module:
    return LongText(long_language_model(small_text("Qwen3")))


def dataset() -> LongTexts:
    return TEXTS


def small_dataset() -> LongTexts:
    return TEXTS.small


def sizes(i: int) -> dict[str, int]:
    return TEXTS.sizes(i)
