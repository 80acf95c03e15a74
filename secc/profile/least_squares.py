"""Non-negative least squares for few unknowns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


def nonnegative_least_squares(
    rows: Sequence[Sequence[float]], targets: Sequence[float]
) -> np.ndarray[Any, Any]:
    """Minimise the squared relative errors of `rows @ x` against `targets` over x >= 0. Returns x.

    Solves the unconstrained problem for every set of unknowns that may differ from 0, and takes the best
    feasible one. This is exponential in the number of unknowns; there are at most four.

    rows: [points, unknowns]. targets: [points].
    """
    matrix, target_values = np.array(rows), np.array(targets)
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-30)
    relative, ones = matrix / scale / target_values[:, None], np.ones(len(target_values))
    best, best_error = np.zeros(matrix.shape[1]), float("inf")
    for support in _nonempty_subsets(matrix.shape[1]):
        solution = np.linalg.lstsq(relative[:, support], ones, rcond=None)[0]
        error = float(((relative[:, support] @ solution - ones) ** 2).sum())
        if (solution >= 0).all() and error < best_error - 1e-12:
            best_error, best = error, np.zeros(matrix.shape[1])
            best[support] = solution
    return best / scale


def _nonempty_subsets(count: int) -> Iterator[list[int]]:
    for mask in range(1, 1 << count):
        yield [i for i in range(count) if mask >> i & 1]
