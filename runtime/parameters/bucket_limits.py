"""Sizes of gradient buckets. A module of its own without torch, because the cost model reads them, too."""

from __future__ import annotations

BUCKET_BYTES = 64 * 2**20  # parameters in one bucket
MAX_BUCKETS_IN_FLIGHT = 4  # sums that a rank has started and not finished
