"""Workload llava-frozen: CLIP-L/14-336 frozen, a projector and Llama-3 8B trained; 256 samples a step on 2x8
H100."""

from __future__ import annotations

import torch
from parts.configs import clip_l_336, llama3_8b, small_clip, small_text
from parts.data import Mix, clip_images
from parts.models import frozen, llava
from parts.packing import collate as collate
from torch import nn

MIX = Mix(clip_images)


def model() -> nn.Module:
    return frozen(llava(clip_l_336(), llama3_8b()), "vision_tower").to(torch.bfloat16)


def small_model() -> nn.Module:
    return frozen(llava(small_clip(), small_text("Llama")), "vision_tower")


def dataset() -> Mix:
    return MIX


def small_dataset() -> Mix:
    return MIX.small


def sizes(i: int) -> dict[str, int]:
    return MIX.sizes(i)
