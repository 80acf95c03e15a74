"""Integer columns as tensors, for sorting and comparing tens of thousands of tasks or instructions at once,
and the conversion of columns into named tuples.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

Row = TypeVar("Row", bound=NamedTuple)


def int_tensor(numbers: Iterable[int]) -> Tensor:
    """Converts integers to an int64 tensor, ten times as fast as `torch.tensor` does for a list."""
    if isinstance(numbers, range):
        return torch.arange(numbers.start, numbers.stop, numbers.step)
    values = array("q", numbers)
    return torch.frombuffer(values, dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64)


def rows_from_columns(kind: type[Row], columns: Iterable[Iterable[object]]) -> Iterator[Row]:
    """Yields kind(*row) for each row of `columns`, truncated to the shortest column, three times as fast as
    `kind._make`.
    """
    return map(
        cast("Callable[[tuple[object, ...]], Row]", partial(tuple.__new__, kind)), zip(*columns, strict=False)
    )
