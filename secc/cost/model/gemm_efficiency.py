"""What of a device's rate a matrix product reaches, by its shape.

A large product reaches the device's `efficiency_percent` of its peak. A narrow one reaches less: tiles are
not filled and weights are read for few FLOPs each. The table says how much less, by the smallest dim that the
weights fix; a micro-batch's own number of rows is taken to be large, and what a small one costs more is the
time that issuing operations takes. Attention in one kernel has a rule of its own: it counts the pairs that
attend to each other (each sample's own, half of them if causal, a window's), in narrow products over one
head.

Work is counted in FLOPs of large products, so that one rate suffices: a product at half of a large one's rate
counts twice. The defaults are assumptions of the order that vendors' libraries reach on GPUs; a measured
table (`secc profile`) takes their place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

# (smallest dim, percent of a large product's rate)
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
    """Percent of a large product's rate: `narrow` by the smallest dim, `attention` for attention in one
    kernel. `label` says where from."""

    percent_by_dim: Sequence[tuple[int, int]] = PERCENT_BY_SMALLEST_DIM
    attention_percent: int = ATTENTION_PERCENT
    label: str = "default"

    def percent_of_rate(self, dim: int) -> float:
        """For a product whose smallest fixed dim is `dim`, between the table's entries by straight lines."""
        dims = [d for d, _ in self.percent_by_dim]
        i = bisect_right(dims, dim)
        if i == len(dims):
            return self.percent_by_dim[-1][1]
        if i == 0:
            return max(1.0, self.percent_by_dim[0][1] * dim / dims[0])
        (a, low), (b, high) = self.percent_by_dim[i - 1], self.percent_by_dim[i]
        return low + (high - low) * (dim - a) / (b - a)

    def equivalent_work(self, flops: int, dim: int) -> int:
        """Hundredths of FLOPs of a large product that take as long; a whole multiple of `flops`, so that fits
        stay exact."""
        return flops * round(100 * 100 / self.percent_of_rate(dim))

    def equivalent_attention_work(self, flops: int) -> int:
        """Hundredths of FLOPs of a large product that take as long as attention's `flops`."""
        return flops * round(100 * 100 / self.attention_percent)


DEFAULT_EFFICIENCY = GemmEfficiency()
