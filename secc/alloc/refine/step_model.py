"""Predicts the estimated steps of plans from those of plans that were tried.

Closed forms misjudge whole kinds of plans, some by a third: replicas that exchange tokens wait for each other
in every round, stages for the longest micro-batch, consumers for large micro-batches of an encoder. The ratio
of a plan's estimate to its closed form is similar for plans that differ little. So the logarithms of these
ratios are taken for a Gaussian process (Rasmussen and Williams, Gaussian Processes for Machine Learning,
2006, algorithm 2.1) with the distance between two plans: one for each choice of a section that differs, less
for numbers that are less than four times each other. Of the plans not tried, those are the most promising
that may take least by a lower confidence bound (Srinivas et al., Gaussian Process Optimization in the Bandit
Setting, 2010): the step that the process expects, less `CONFIDENCE` standard deviations. A kind of plan that
nothing like it was tried of has a wide deviation, so it is tried before all variants of a good plan are.

The deviation of the process is that of the plans that were tried. The constants are fitted on estimates of
4,000 plans of two workloads with mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from math import log2

import numpy as np
from numpy.typing import NDArray

from secc.alloc.problem.types import Assignment, Candidate, Problem

LEAST_DEVIATION = 0.03  # of the logarithms of ratios, however alike those of the plans so far are
ESTIMATE_NOISE = 0.15  # of the deviation is between plans that the distance does not tell apart
LENGTH_SCALE = 4.0  # differing choices after which plans have little to do with each other
CONFIDENCE = 2.0
DOUBLINGS = 2  # numbers that differ by this many doublings count as a whole difference
RESOLUTION = 1e-6  # predictions that differ by less are equal, whatever a processor's rounding

FloatArray = NDArray[np.float64]


class StepModel:
    """The plans of one problem as points. `features[section]`: a row for each of its candidates."""

    def __init__(self, problem: Problem) -> None:
        self.features = {s: _candidate_features(cs) for s, cs in problem.sections.items()}

    def choose_promising(
        self,
        tried: Sequence[Assignment],
        ratios: Sequence[float],
        others: Sequence[Assignment],
        closed_form_ns: Sequence[int],
        count: int,
    ) -> list[Assignment]:
        """Returns up to `count` of the other plans, the most promising one first. Each is chosen as if those
        before it had been tried and had taken as long as expected.

        ratios: estimate over closed form of each plan that was tried. closed_form_ns: of the other plans.
        """
        points, new = self._points(tried), self._points(others)
        logs = np.log(np.asarray(ratios, dtype=np.float64))
        mean, deviation = logs.mean(), max(LEAST_DEVIATION, logs.std())
        shorter = np.log(np.asarray(closed_form_ns, dtype=np.float64))
        known, across = _kernel(points, points), _kernel(new, points)
        chosen: list[int] = []
        while len(chosen) < min(count, len(others)):
            solved = np.linalg.solve(known + ESTIMATE_NOISE**2 * np.eye(len(known)), across.T)
            expected = mean + (logs - mean) @ solved
            unexplained = np.maximum(1 - (across * solved.T).sum(axis=1), 0)
            bound = shorter + expected - CONFIDENCE * deviation * np.sqrt(unexplained)
            bound[chosen] = np.inf
            best = int(np.argmin(np.round(bound / RESOLUTION)))
            chosen.append(best)
            logs = np.append(logs, expected[best])
            column = _kernel(new, new[best : best + 1])
            known = np.block([[known, across[best][:, None]], [across[best][None], column[best]]])
            across = np.hstack([across, column])
        return [others[i] for i in chosen]

    def _points(self, plans: Sequence[Assignment]) -> FloatArray:
        """The plans as points: the choices of each section, and which sections share ranks."""
        columns = [rows[[a.choice[s] for a in plans]] for s, rows in self.features.items()]
        shared = [[float(a.group[s] == a.group[t]) for s, t in combinations(self.features, 2)] for a in plans]
        return np.hstack([*columns, np.asarray(shared, dtype=np.float64).reshape(len(plans), -1)])


def _kernel(a: FloatArray, b: FloatArray) -> FloatArray:
    """Correlations of the logarithms of ratios between points `a` and `b`."""
    distances = [np.minimum(np.abs(a - point), 1).sum(axis=1) for point in b]
    return np.exp(-np.stack(distances, axis=1) / LENGTH_SCALE)


def _candidate_features(candidates: Iterable[Candidate]) -> FloatArray:
    """A row for each candidate such that the distance of two is that of their choices."""
    numbers, words = list[list[float]](), list[tuple[str, ...]]()
    for c in candidates:
        degrees = c.ranks, c.pp, c.tp, c.cp, c.ep, c.micro_batch
        numbers.append([log2(n) / DOUBLINGS for n in degrees])
        words.append(
            (c.recompute, c.sharding, c.norms, str(c.backward_parts), c.offload, c.cp_per, str(c.kind))
        )
    columns = [np.asarray(numbers)]
    for column in zip(*words, strict=True):
        # Two of these entries differ between two words, by 1/2 each.
        distinct, numbers_of_words = np.unique(column, return_inverse=True)
        columns.append(np.eye(len(distinct))[numbers_of_words] / 2)
    return np.hstack(columns)
