"""How fast this processor computes just now.

A processor that a machine shares with others, or whose clock follows its heat, does the same work in 34 ms
now and in 52 ms ten seconds later, without waiting for a core. So a fixed piece of work, the gauge, is timed
beside what is measured: times of different moments compare at one speed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import nn

GAUGE_WIDTH, GAUGE_HEADS, GAUGE_BATCH, GAUGE_LENGTH = 96, 4, 4, 48
GAUGE_REPEATS = 2  # behind one that fills the caches


def time_at_mean_speed(found: Sequence[float]) -> float:
    """What the gauge takes at the mean of the speeds at which it was found to take so long.

    A core that shares its hardware with others' work has two speeds, between which it changes within a
    second: a run of many steps has their mean, while a median is one of the two.
    """
    return 1 / fmean(1 / ns for ns in found)


class SpeedGauge:
    """The forward and backward of a small transformer layer, on one thread of a CPU: a few milliseconds."""

    def __init__(self) -> None:
        self._layer = nn.TransformerEncoderLayer(
            GAUGE_WIDTH, GAUGE_HEADS, 4 * GAUGE_WIDTH, dropout=0.0, batch_first=True
        )
        self._input = torch.linspace(-1, 1, GAUGE_BATCH * GAUGE_LENGTH * GAUGE_WIDTH).view(
            GAUGE_BATCH, GAUGE_LENGTH, GAUGE_WIDTH
        )

    def measure_ns(self) -> int:
        """The least processor time of some goes."""
        return min([self._time_once() for _ in range(1 + GAUGE_REPEATS)][1:])

    def _time_once(self) -> int:
        start = time.thread_time_ns()
        self._layer(self._input).sum().backward()
        return time.thread_time_ns() - start
