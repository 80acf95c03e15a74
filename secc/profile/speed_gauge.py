"""Measures the current speed of this processor by a fixed piece of work, the gauge.

A processor shared with others, or throttled by heat, does the same work in 34 ms now and in 52 ms ten seconds
later, without waiting for a core. The gauge is timed along with every measurement, so that times of different
moments can be compared at one speed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import nn

GAUGE_WIDTH, GAUGE_HEADS, GAUGE_BATCH, GAUGE_LENGTH = 96, 4, 4, 48
GAUGE_REPEATS = 2


def time_at_mean_speed(times: Sequence[float]) -> float:
    """The time of the gauge at its mean speed: the harmonic mean of its times.

    A core that shares hardware with other work switches between two speeds within a second. A run of many
    steps sees their mean; a median would be one of the two.
    """
    return 1 / fmean(1 / ns for ns in times)


class SpeedGauge:
    """Forward and backward of a small transformer layer on one CPU thread; takes a few milliseconds."""

    def __init__(self) -> None:
        self._layer = nn.TransformerEncoderLayer(
            GAUGE_WIDTH, GAUGE_HEADS, 4 * GAUGE_WIDTH, dropout=0.0, batch_first=True
        )
        self._input = torch.linspace(-1, 1, GAUGE_BATCH * GAUGE_LENGTH * GAUGE_WIDTH).view(
            GAUGE_BATCH, GAUGE_LENGTH, GAUGE_WIDTH
        )

    def measure_ns(self) -> int:
        """The shortest processor time of GAUGE_REPEATS runs after one to warm the caches."""
        return min([self._time_once() for _ in range(1 + GAUGE_REPEATS)][1:])

    def _time_once(self) -> int:
        start = time.thread_time_ns()
        self._layer(self._input).sum().backward()
        return time.thread_time_ns() - start
