"""Provides the micro-batches of one step, and measures the waiting for batches and for re-recordings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from secc.runtime.data.data_plane import DataPlane, GlobalBatch
from secc.runtime.monitoring.chrome_trace import ChromeTrace
from secc.runtime.plan.step_program import MicroBatch
from secc.runtime.sections.base import RECORDING_KEY
from secc.runtime.training.step_planner import PlannedStep


class StepBatches:
    """Loads the micro-batches of a step: those of its global batch, and prefetched ones of the next."""

    def __init__(self, data: DataPlane, step: PlannedStep, trace: ChromeTrace) -> None:
        self._data, self._step, self._trace = data, step, trace
        self._recording = self._waiting = self._exposed = 0.0
        self._recorded = self._kept = 0

    def load_batch(self, micro: MicroBatch) -> dict[str, Any]:
        """Returns the collated batch of a micro-batch, on the device. Blocks until it is loaded."""
        start = time.perf_counter()
        args = {
            "section": micro.section,
            "microbatch": micro.index,
            "samples": [self._step.samples[s].id for s in micro.samples],
        }
        with self._trace.record_event(f"LOAD {micro.section} {micro.index}", kind="LOAD", **args):
            batch = self._data.load_micro_batch(*self._positions_in_batch(micro), micro.section)
        self._waiting += time.perf_counter() - start
        if RECORDING_KEY in batch and (spent := batch[RECORDING_KEY].recorded_during):
            self._recorded += 1
            self._recording += spent.seconds
            self._exposed += sum(map(spent.overlap_seconds, self._data.loader_waits))
            self._trace.record_background_event(
                f"RECORD {micro.section} {micro.index}", spent.start, spent.end, kind="RECORD", **args
            )
        elif RECORDING_KEY in batch:
            self._kept += 1
        return batch

    def _positions_in_batch(self, micro: MicroBatch) -> tuple[Sequence[int], GlobalBatch]:
        """Returns the positions of a micro-batch's samples in the global batch that they belong to, and that
        batch."""
        if self._step.next_batch is not None and self._step.schedule.is_of_next_batch(micro):
            return [p - len(self._step.batch.samples) for p in micro.samples], self._step.next_batch
        return micro.samples, self._step.batch

    def recording_metrics(self, share: float = 1.0) -> dict[str, float]:
        """Returns the metrics of re-recording in this step: the numbers of recordings made and reused, and,
        multiplied by `share`, the seconds that recordings took in any process, that this rank waited for
        them, and that it waited for batches."""
        seconds = {"recording_s": self._recording, "exposed_s": self._exposed, "waiting_s": self._waiting}
        return {"recorded": self._recorded, "kept": self._kept} | {
            name: share * s for name, s in seconds.items()
        }
