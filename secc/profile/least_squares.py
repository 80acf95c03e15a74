"""Prices from times: least squares in which none is negative."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


def nonnegative_least_squares(
    rows: Sequence[Sequence[float]], wanted: Sequence[float]
) -> np.ndarray[Any, Any]:
    """Least squares of relative errors, none of the unknowns negative: the best over all sets of unknowns
    that may differ from 0."""
    table, times = np.array(rows), np.array(wanted)
    scale = np.maximum(np.abs(table).max(axis=0), 1e-30)
    relative, target = table / scale / times[:, None], np.ones(len(times))
    best, least = np.zeros(table.shape[1]), float("inf")
    for chosen in _nonempty_subsets(table.shape[1]):
        solved = np.linalg.lstsq(relative[:, chosen], target, rcond=None)[0]
        rest = float(((relative[:, chosen] @ solved - target) ** 2).sum())
        if (solved >= 0).all() and rest < least - 1e-12:
            least, best = rest, np.zeros(table.shape[1])
            best[chosen] = solved
    return best / scale


def _nonempty_subsets(count: int) -> Iterator[list[int]]:
    for mask in range(1, 1 << count):
        yield [i for i in range(count) if mask >> i & 1]
