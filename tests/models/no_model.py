"""Bad: the file has a dataset but no model()."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset


class Samples(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(i)
        return {"x": torch.randn(8, generator=g), "labels": torch.randint(0, 4, (), generator=g)}


def dataset() -> Dataset:
    return Samples()
