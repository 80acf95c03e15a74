"""Workload vlm-big-encoder: InternViT-6B and Llama-3 70B, both trained; 512 samples a step on 32x8 H100."""

from __future__ import annotations

import torch
from parts.configs import intern_vit_6b, llama3_70b, small_intern_vit, small_text
from parts.data import Mix, tiled_images
from parts.models import internvl
from parts.packing import collate as collate
from torch import nn

MIX = Mix(tiled_images)


def model() -> nn.Module:
    return internvl(intern_vit_6b(), llama3_70b()).to(torch.bfloat16)


def small_model() -> nn.Module:
    return internvl(small_intern_vit(), small_text("Llama"))


def dataset() -> Mix:
    return MIX


def small_dataset() -> Mix:
    return MIX.small


def sizes(i: int) -> dict[str, int]:
    return MIX.sizes(i)
