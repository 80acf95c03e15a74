"""Fraction of a device's rate that a matrix product reaches, by its shape.

A large product reaches the device's `efficiency_percent` of its peak. A narrow one reaches less: tiles are
not filled, and weights are read for few FLOPs each. The table says how much less, by the smallest dimension
of the weight. The number of rows, which a micro-batch determines, is assumed to be large; the overhead of
small ones is the time of issuing operations. Fused attention has a rate of its own: its FLOPs count only
pairs that attend to each other (within a sample, causal, within a window), in products over one head.

Work is counted in FLOPs of large products, so that one rate suffices: a product at half the rate counts
twice. The defaults are assumptions about vendor libraries on GPUs; measured costs (`secc profile`) replace
them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

# (smallest weight dimension, percent of a large product's rate)
PERCENT_BY_SMALLEST_DIM = (
    (16, 4),
    (32, 8),
    (64, 16),
    (128, 32),
    (256, 55),
    (512, 75),
    (1024, 88),
    (2048, 95),
    (4096, 100),
)
ATTENTION_PERCENT = 60


@dataclass(frozen=True)
class GemmEfficiency:
    """Percent of a large product's rate: by smallest weight dimension (`percent_by_dim`, ascending), and
    for fused attention. label: origin of the table."""

    percent_by_dim: Sequence[tuple[int, int]] = PERCENT_BY_SMALLEST_DIM
    attention_percent: int = ATTENTION_PERCENT
    label: str = "default"

    def percent_of_rate(self, dim: int) -> float:
        """Percent for a product with smallest weight dimension `dim`, by linear interpolation in the
        table."""
        dims = [d for d, _ in self.percent_by_dim]
        i = bisect_right(dims, dim)
        if i == len(dims):
            return self.percent_by_dim[-1][1]
        if i == 0:
            return max(1.0, self.percent_by_dim[0][1] * dim / dims[0])
        (a, low), (b, high) = self.percent_by_dim[i - 1], self.percent_by_dim[i]
        return low + (high - low) * (dim - a) / (b - a)

    def equivalent_work(self, flops: int, dim: int) -> int:
        """Hundredths of FLOPs of a large product that take as long as `flops` with smallest dimension `dim`.

        An integer multiple of `flops`, so that polynomial fits stay exact.
        """
        return flops * round(100 * 100 / self.percent_of_rate(dim))

    def equivalent_attention_work(self, flops: int) -> int:
        """Hundredths of FLOPs of a large product that take as long as `flops` of fused attention."""
        return flops * round(100 * 100 / self.attention_percent)


DEFAULT_EFFICIENCY = GemmEfficiency()
