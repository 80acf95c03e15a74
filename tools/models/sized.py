"""Samples of given sizes, for emulated runs (`tools/bench_emulation.py`): `sizes.json` in this folder has
those of each sample.

`ids` has T tokens in one row, `images` I patches where there are any. The model is none: an emulated run
builds no model.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

SIZES: list[dict[str, int]] = json.loads((Path(__file__).parent / "sizes.json").read_text())


class Sized(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        found = {"ids": torch.zeros(1, SIZES[i]["T"], dtype=torch.int64)}
        return found | ({"images": torch.zeros(SIZES[i]["I"])} if SIZES[i]["I"] else {})


def model() -> nn.Module:
    return nn.Identity()


def dataset() -> Sized:
    return Sized()


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tokens in a row, and all patches."""
    images = [s["images"] for s in samples if "images" in s]
    ids = torch.cat([s["ids"] for s in samples], dim=1)
    return {"ids": ids, **({"images": torch.cat(images)} if images else {})}
