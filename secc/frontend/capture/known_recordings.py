"""Recordings of micro-batches, each made once for a choice of blocks.

Paths through forward are merged one by one, and glue that is recorded again for each micro-batch is merged
once more; all ask for the same micro-batches. A recording of a model with many layers takes a second, a copy
of it a hundredth of that.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secc.frontend.capture.control_flow_paths import LabelledShapes
from secc.frontend.dataset.survey import Sample
from secc.runtime.model.user_file import UserModel
from secc.runtime.recorder import Recorder, Recording
from secc.runtime.recorder.fold_joins import fold_joins
from secc.runtime.recorder.outline import Outline

_MOST_NODES = 400_000  # that are kept, at about 2 kB each


@dataclass(frozen=True)
class ProbeBatch:
    """A collated micro-batch, its symbol values and its samples. changed: the keys with other values than the
    samples have."""

    batch: Mapping[str, Any]
    sizes: Mapping[str, int]
    samples: Sequence[Sample]
    changed: tuple[str, ...] = ()

    @property
    def key(self) -> Hashable:
        """What tells it from other micro-batches, as long as its samples exist."""
        return tuple(map(id, self.samples)), tuple(sorted(self.sizes.items())), self.changed


class KnownRecordings:
    """What `recorder` recorded since its blocks were chosen."""

    def __init__(self, user: UserModel, recorder: Recorder) -> None:
        self._user, self._recorder = user, recorder
        self._configuration: Hashable = None
        self._by_batch = dict[Hashable, tuple[Recording, Sequence[Sample]]]()  # samples, to keep their ids
        self._shapes = dict[int, tuple[LabelledShapes, Sample]]()
        self._node_count = 0

    def record(self, b: ProbeBatch) -> Recording:
        """Returns the recording of a micro-batch, with a graph that may be changed. Raises what the recorder
        raises."""
        known = self._find(b)
        if known is not None:
            return known.copy()
        recording = self._recorder.record(b.batch)
        self.keep_recording(b, recording)
        return recording.copy() if self._find(b) is recording else recording

    def record_ahead(self, b: ProbeBatch) -> None:
        """Records a micro-batch that will be asked for."""
        if self._find(b) is None:
            self.keep_recording(b, self._recorder.record(b.batch))

    def keep_recording(self, b: ProbeBatch, recording: Recording) -> None:
        """Keeps the recording of a micro-batch, unless there are many."""
        self._forget_other_blocks()
        self._node_count += len(recording.graph.nodes)
        if self._node_count <= _MOST_NODES:
            self._by_batch[b.key] = recording, b.samples

    def adopt_recording(self, b: ProbeBatch, recording: Recording) -> None:
        """Keeps the recording of a micro-batch that a copy of this process made."""
        self.keep_recording(b, self._recorder.adopt_recording(recording))

    def shapes_of_sample(self, sample: Sample) -> LabelledShapes:
        """Returns the labelled shapes of a sample recorded alone."""
        self._forget_other_blocks()
        if id(sample) not in self._shapes:
            recording = fold_joins(self._recorder.record(self._user.collate([sample])))
            self._shapes[id(sample)] = Outline.of_recording(recording).known_shapes(), sample
        return self._shapes[id(sample)][0]

    def _find(self, b: ProbeBatch) -> Recording | None:
        self._forget_other_blocks()
        recording, _ = self._by_batch.get(b.key, (None, ()))
        return recording

    def _forget_other_blocks(self) -> None:
        if self._configuration != self._recorder.configuration:
            self._configuration = self._recorder.configuration
            self._by_batch.clear()
            self._shapes.clear()
            self._node_count = 0
