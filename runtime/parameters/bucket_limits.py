"""Sizes of buckets of gradients and of offloaded optimizer states. A module of its own without torch, because
the cost model reads them, too."""

from __future__ import annotations

BUCKET_BYTES = 64 * 2**20  # parameters in one bucket
OFFLOADED_BUCKETS = 3  # of offloaded states on the device: arriving, in use, and leaving
MAX_BUCKETS_IN_FLIGHT = 4  # sums that a rank has started and not finished
