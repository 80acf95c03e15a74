"""How gradients travel: the size of a bucket and how many are under way. Without torch, because the cost
model asks, too."""

from __future__ import annotations

BUCKET_BYTES = 64 * 2**20  # of parameters
MAX_BUCKETS_IN_FLIGHT = 4  # buckets under way at once
