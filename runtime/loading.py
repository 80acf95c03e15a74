"""The micro-batches of one step as a rank takes them, and what it waited for: batches, and the recordings that come with them."""

from __future__ import annotations

import time
from typing import Any

from secc.runtime.data import DataPlane, GlobalBatch
from secc.runtime.program import MicroBatch
from secc.runtime.section import RECORDED


class Loading:
    """Hands out the micro-batches of a global batch."""

    def __init__(self, data: DataPlane, batch: GlobalBatch) -> None:
        self._data, self._batch = data, batch
        self._recording = self._waiting = 0.0

    def batch(self, micro: MicroBatch) -> dict[str, Any]:
        """The batch of a micro-batch, on the device."""
        start = time.perf_counter()
        found = self._data.batch(micro.samples, self._batch)
        self._waiting += time.perf_counter() - start
        if RECORDED in found:
            self._recording += found[RECORDED].seconds
        return found

    def spent(self, share: float = 1.0) -> dict[str, float]:
        """Seconds so far, times `share`: what recordings took, wherever they were made, and how long this rank waited for batches."""
        return {"recording_s": share * self._recording, "waiting_s": share * self._waiting}
