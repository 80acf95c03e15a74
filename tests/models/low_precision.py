"""A small distillation whose parts compute in 16 bits, in the ways that users write it: a frozen teacher in
bfloat16 or float16, autocast inside forward, tables in float32. `VARIANT` chooses one."""

from __future__ import annotations

import functools
import os
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

VARIANT: str = os.environ.get("LOW_PRECISION", "teacher_cast")
VOCABULARY, WIDTH, LENGTH = 64, 32, 20


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x.cumsum(1) / torch.arange(1, x.shape[1] + 1).to(x.dtype)[:, None])
        return x + self.down(F.gelu(self.up(self.norm(x))))


def stack(width: int, layers: int) -> nn.Sequential:
    return nn.Sequential(*(Layer(width) for _ in range(layers)))


class Distilled(nn.Module):
    """The student follows a frozen teacher, by features and by distributions."""

    angles: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.teacher, self.teacher_head = stack(WIDTH, 3), nn.Linear(WIDTH, VOCABULARY)
        self.student, self.head = stack(WIDTH, 2), nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("angles", torch.linspace(0, 1, 2 * LENGTH)[:, None].repeat(1, WIDTH))
        for part in (self.teacher, self.teacher_head):
            part.requires_grad_(False)
            if VARIANT.startswith("teacher"):
                part.to(torch.float16 if VARIANT == "teacher_half" else torch.bfloat16)

    def teach(self, x: torch.Tensor) -> torch.Tensor:
        if VARIANT == "teacher_weight_dtype":
            x = x.to(self.teacher_head.weight.dtype)
        elif VARIANT == "teacher_half":
            x = x.to(torch.float16)
        elif VARIANT.startswith("teacher"):
            x = x.to(torch.bfloat16)
        return self.teacher_head(self.teacher(x))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if VARIANT == "autocast_inside":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.loss(input_ids, labels)
        if VARIANT == "autocast_island":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = self.student(self.words(input_ids))
                with torch.autocast("cpu", enabled=False):
                    logits = self.head(hidden.float())
                return self.join(logits, labels, self.teach(self.words(input_ids).detach()))
        return self.loss(input_ids, labels)

    def loss(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        if VARIANT.endswith("tables"):
            angles = self.angles[: x.shape[1]]
            x = (x * angles.cos() + x.flip(-1) * angles.sin()).to(x.dtype)
        with torch.no_grad():
            taught = self.teach(x)
        return self.join(self.head(self.student(x)), labels, taught)

    def join(self, logits: torch.Tensor, labels: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
        counts = labels != -100
        own = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
        divergence = F.kl_div(
            logits.float().log_softmax(-1), taught.float().log_softmax(-1), log_target=True, reduction="none"
        ).sum(-1)
        return own + (divergence * counts).sum() / counts.sum()


def model() -> nn.Module:
    made = Distilled()
    if VARIANT == "accelerate":
        # as accelerate's prepare_model wraps a model
        made.forward = MethodType(torch.autocast("cpu", dtype=torch.bfloat16)(made.forward.__func__), made)
    if VARIANT == "wrapped":  # as one would write it by hand: the function is bound to this very object
        made.forward = functools.wraps(made.forward)(
            torch.autocast("cpu", dtype=torch.bfloat16)(made.forward)
        )
    if VARIANT == "wide_tables":
        made.angles = made.angles.double()
    if VARIANT == "whole":
        made.to(torch.bfloat16)
    return made


class Samples(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(i)
        text = torch.randint(1, VOCABULARY, (int(torch.randint(4, LENGTH, (), generator=g)),), generator=g)
        return {"input_ids": text, "labels": text.roll(-1)}


def dataset() -> Dataset[dict[str, Any]]:
    return Samples()
