"""Workload wikipedia-8b: Qwen3-8B on articles of Wikipedia, up to 128,000 tokens; 2,048 samples a step on 4x8
H100."""

from __future__ import annotations

import torch
from parts.configs import qwen3_8b, small_text
from parts.long_texts import CountedTexts, LongText, long_language_model
from torch import nn

TEXTS = CountedTexts(64, 128_000)


def model() -> nn.Module:
    return LongText(long_language_model(qwen3_8b())).to(torch.bfloat16)


def small_model() -> nn.Module:
    return LongText(long_language_model(small_text("Qwen3")))


def dataset() -> CountedTexts:
    return TEXTS


def small_dataset() -> CountedTexts:
    return TEXTS.small


def sizes(i: int) -> dict[str, int]:
    return TEXTS.sizes(i)
