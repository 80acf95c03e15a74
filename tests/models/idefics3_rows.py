"""A tiny Idefics3 that takes each image as a row of its own, `[images, 1, 3, H, W]`: forward picks the images
that are not empty by a mask, so how many it keeps is known only from values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from tools.zoo_models import samples, tiles


def model() -> nn.Module:
    return tiles.idefics3()


class Samples(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Any]:
        made = samples.pictures(4, most=3, share=0.7)(torch.Generator().manual_seed(i))
        if "pixel_values" in made:
            made["pixel_values"] = made["pixel_values"].unsqueeze(1)
        return made


def dataset() -> Dataset:
    return Samples()


def collate(batch: Sequence[dict[str, Any]]) -> dict[str, Any]:
    padding = {"input_ids": 0, "labels": samples.IGNORED}
    return samples.padded(batch, padding, "attention_mask") | samples.joined(batch, ["pixel_values"])
