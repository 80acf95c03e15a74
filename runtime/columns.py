"""Columns of integers as tensors, by which tens of thousands of jobs and instructions are sorted and compared at once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor


def integers(numbers: Iterable[int]) -> Tensor:
    """The numbers as int64; `torch.tensor` takes ten times as long for a list."""
    if isinstance(numbers, range):
        return torch.arange(numbers.start, numbers.stop, numbers.step)
    found = array("q", numbers)
    return torch.frombuffer(found, dtype=torch.int64) if found else torch.empty(0, dtype=torch.int64)
