"""The micro-batches of a pattern that captures compare: ragged ones, which collate pads, and even ones, which need no padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from secc.errors import UserError
from secc.frontend.inputs import Inputs
from secc.frontend.survey import Pattern, Sample, Survey
from secc.frontend.ways import Observed, Shapes, way
from secc.runtime.recorder import Recorder
from secc.runtime.recorder.fold import fold
from secc.runtime.recorder.outline import Outline
from secc.runtime.sizes import pad_batch, sizes_of
from secc.runtime.user_model import UserModel

_TURNS = 3  # choices of samples that are tried for micro-batches whose sizes move independently


@dataclass(frozen=True)
class Batch:
    """A collated micro-batch, its sizes and its samples."""

    batch: Mapping[str, Any]
    sizes: Mapping[str, int]
    samples: Sequence[Sample]


class Batches:
    """The micro-batches of a pattern."""

    def __init__(self, user: UserModel, survey: Survey, inputs: Inputs, pattern: Pattern, recorder: Recorder) -> None:
        def collated(samples: list[Any]) -> Batch:
            batch = user.collate(samples)
            return Batch(batch, sizes_of(batch, inputs.symbols, len(samples)), samples)

        self._user, self._inputs, self._recorder = user, inputs, recorder
        self.free = frozenset(s.name for s in inputs.symbols if s.kind == "width")
        turns = ((turn, [collated(s) for s in survey.batches(pattern, turn=turn)]) for turn in range(_TURNS))
        turn, self.ragged = _most_independent(turns)
        self.even = [collated(s) for s in survey.batches(pattern, even=True, turn=turn)]

    def record(self) -> list[Observed]:
        """Ragged and even micro-batches recorded; of the even ones only the first if forward takes the same way through it."""
        found = [self._observe(b) for b in (*self.ragged, self.even[0])]
        if way(found[-1].recording) not in [way(o.recording) for o in found[:-1]]:
            found += [self._observe(b) for b in self.even[1:]]
        return found

    def record_with_parts(self) -> list[Observed]:
        """All micro-batches recorded, with the labelled shapes of their samples alone."""
        known: dict[int, Shapes] = {}

        def alone(sample: Sample) -> Shapes:
            if id(sample) not in known:
                known[id(sample)] = shapes_alone(self._recorder, self._user, sample)
            return known[id(sample)]

        return [replace(self._observe(b), parts=tuple(map(alone, b.samples))) for b in (*self.ragged, *self.even)]

    def _observe(self, b: Batch) -> Observed:
        return Observed(fold(self._recorder.record(b.batch)), b.sizes)

    def __call__(self, name: str, size: int) -> Observed | None:
        """A probe: the ragged micro-batch that is narrowest along the width symbol `name`, padded to `size`."""
        b = min(self.ragged, key=lambda b: b.sizes[name])
        try:
            padded = pad_batch(b.batch, self._inputs.inputs, {name: size})
            found = self._observe(Batch(padded, {**b.sizes, name: size}, b.samples))
            return replace(found, parts=tuple(shapes_alone(self._recorder, self._user, s) for s in b.samples))
        except (UserError, ValueError):
            return None  # the model or collate refuses this width


def shapes_alone(recorder: Recorder, user: UserModel, sample: Sample) -> Shapes:
    """The labelled shapes of a sample's own recording."""
    return Outline.of(fold(recorder.record(user.collate([sample])))).shapes()


def _most_independent(turns: Iterable[tuple[int, list[Batch]]]) -> tuple[int, list[Batch]]:
    """The micro-batches in which the fewest sizes follow from others by chance (26 tokens less one for each sample)."""
    best, most = (0, list[Batch]()), 0
    for turn, batches in turns:
        rows = torch.tensor([[1, *b.sizes.values()] for b in batches], dtype=torch.float64)
        moving = 1 + sum(len(set(column)) > 1 for column in rows.T.tolist())
        rank = int(torch.linalg.matrix_rank(rows))
        if rank > most:
            best, most = (turn, batches), rank
        if rank == min(moving, len(batches)):
            break
    return best
