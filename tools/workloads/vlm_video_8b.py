"""Workload vlm-video-8b: Qwen2.5-VL's tower and Qwen3-8B, the language model of Qwen3-VL-8B, on videos of 2k
to 128k tokens; 128 samples a step on 4x8 H100."""

from __future__ import annotations

import torch
from parts.configs import qwen3_8b, qwen_vit, small_qwen_vit, small_text
from parts.long_texts import LongVideo, Videos, long_language_model
from torch import nn

VIDEOS = Videos(2048, 131_072)


def model() -> nn.Module:
    text = qwen3_8b()
    return LongVideo(long_language_model(text), qwen_vit(text.hidden_size)).to(torch.bfloat16)


def small_model() -> nn.Module:
    return LongVideo(long_language_model(small_text("Qwen3")), small_qwen_vit(32))


def dataset() -> Videos:
    return VIDEOS


def small_dataset() -> Videos:
    return VIDEOS.small


def sizes(i: int) -> dict[str, int]:
    return VIDEOS.sizes(i)
