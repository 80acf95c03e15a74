"""The micro-batches of a pattern that captures compare: ragged ones, which collate pads, and even ones, which
need no padding."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, permutations
from typing import Any

import torch

from secc import process_map
from secc.errors import UserError
from secc.frontend.capture.control_flow_paths import FEWEST, Observed, Shapes, way
from secc.frontend.capture.shared_explanations import Known
from secc.frontend.dataset.input_symbols import IGNORED, Inputs
from secc.frontend.dataset.survey import Pattern, Sample, Survey, by_volume
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.batch_sizes import pad_batch, sizes_of
from secc.runtime.recorder import Recorder
from secc.runtime.recorder.fold_joins import fold
from secc.runtime.recorder.outline import Outline
from secc.runtime.recorder.serialization import pack, unpack

_TURNS = 3  # choices of samples that are tried for micro-batches whose sizes move independently
LONG = 0.1  # seconds of recordings beside which a copy of this process is cheap
_BEYOND = (2, 5, 3, 7, 4)  # by how much one width is padded beyond another


@dataclass(frozen=True)
class Batch:
    """A collated micro-batch, its sizes and its samples."""

    batch: Mapping[str, Any]
    sizes: Mapping[str, int]
    samples: Sequence[Sample]


class Batches:
    """The micro-batches of a pattern."""

    def __init__(
        self, user: UserModel, survey: Survey, inputs: Inputs, pattern: Pattern, recorder: Recorder
    ) -> None:
        def collated(samples: list[Any]) -> Batch:
            batch = user.collate(samples)
            return Batch(batch, sizes_of(batch, inputs.symbols, len(samples)), samples)

        self._user, self._inputs, self._recorder, self._survey, self._pattern = (
            user,
            inputs,
            recorder,
            survey,
            pattern,
        )
        self._collated = collated
        self.known = Known()
        self.free = frozenset(s.name for s in inputs.symbols if s.is_padded)
        turns = ((turn, [collated(s) for s in survey.batches(pattern, turn=turn)]) for turn in range(_TURNS))
        self._turn, self.ragged = _most_independent(turns)
        self.even = [collated(s) for s in survey.batches(pattern, even=True, turn=self._turn)]
        self.crossed = list(self._crossed())

    def record(self) -> list[Observed]:
        """Ragged and even micro-batches recorded; of the even ones only the first if ragged ones enough take
        the same way.

        Conditions on the inputs that were the same in all of them are looked for in single samples.
        Micro-batches of one for which they are others (a clip without padding) are recorded as well.
        """
        found = self._recorded(self.ragged, self.even) + [
            o for b in self.crossed if (o := self._tried(b)) is not None
        ]
        for sample in self._others(found):
            ragged, even = (
                [self._collated(s) for s in self._survey.batches(self._pattern, even, of=sample)]
                for even in (False, True)
            )
            found += self._recorded(ragged, even)
        return found

    def _recorded(self, ragged: Sequence[Batch], even: Sequence[Batch]) -> list[Observed]:
        found = self._observed([*ragged, even[0]])
        if [way(o.recording) for o in found].count(way(found[-1].recording)) < FEWEST:
            found += self._observed(even[1:])
        return found

    def _observed(self, batches: Sequence[Batch]) -> list[Observed]:
        """Recordings of micro-batches. Where they take long, a copy of this process makes every second of
        those that are left, as far as they can be made and travel."""
        start, first = time.perf_counter(), list[Observed]()
        while len(first) < len(batches) and time.perf_counter() - start < LONG:
            first.append(self._observe(batches[len(first)]))
        left = batches[len(first) :]
        if len(left) < 2:
            return first + [self._observe(b) for b in left]
        with process_map.beside(lambda: list(self._packed(left[1::2]))) as packed:
            made = dict(zip(count(0, 2), list(self._made(left[::2])), strict=False))
            others = [
                Observed(self._recorder.taken(unpack(data)), b.sizes)
                for data, b in zip(packed(), left[1::2], strict=False)
            ]
        made |= dict(zip(count(1, 2), others, strict=False))
        return first + [made.get(i) or self._observe(b) for i, b in enumerate(left)]

    def _made(self, batches: Sequence[Batch]) -> Iterator[Observed]:
        """Recordings up to the first that cannot be made: which error counts hangs on none of the others."""
        with suppress(Exception):
            for b in batches:
                yield self._observe(b)

    def _packed(self, batches: Sequence[Batch]) -> Iterator[bytes]:
        """The same to travel."""
        with suppress(Exception):
            for observed in self._made(batches):
                yield pack(observed.recording)

    def _others(self, found: Sequence[Observed]) -> list[Sample]:
        """Samples that alone meet conditions which `found` never met, where there are conditions that were
        the same in all of it."""
        known = {condition for o in found for condition in _conditions(o)}
        others: list[Sample] = []
        for sample in by_volume(self._survey.kept(self._pattern)):
            if len(known) == 2 * len({where for where, _ in known}):
                break
            batch = self._user.collate([sample])
            if batch.keys() != self.ragged[0].batch.keys():
                continue  # only several samples together have this pattern
            alone = _conditions(
                self._observe(Batch(batch, sizes_of(batch, self._inputs.symbols, 1), [sample]))
            )
            if not alone <= known:
                known |= alone
                others.append(sample)
        return others

    def record_with_parts(self) -> list[Observed]:
        """All micro-batches recorded, with the labelled shapes of their samples alone."""
        known: dict[int, Shapes] = {}

        def alone(sample: Sample) -> Shapes:
            if id(sample) not in known:
                known[id(sample)] = shapes_alone(self._recorder, self._user, sample)
            return known[id(sample)]

        seen = [(b, self._observe(b)) for b in (*self.ragged, *self.even)]
        seen += [(b, o) for b in self.crossed if (o := self._tried(b)) is not None]
        return [replace(o, parts=tuple(map(alone, b.samples))) for b, o in seen]

    def _observe(self, b: Batch) -> Observed:
        return Observed(fold(self._recorder.record(b.batch)), b.sizes)

    def __call__(self, name: str, size: int) -> Observed | None:
        """A probe: the ragged micro-batch that is narrowest along the width symbol `name`, padded to
        `size`."""
        b = min(self.ragged, key=lambda b: b.sizes[name])
        wider = self._padded(b, name, size)
        found = None if wider is None else self._tried(wider)
        return (
            None
            if found is None
            else replace(found, parts=tuple(shapes_alone(self._recorder, self._user, s) for s in b.samples))
        )

    def _crossed(self) -> Iterator[Batch]:
        """The ragged micro-batches with one width padded beyond another, for each two that samples have in an
        order which these never have.

        What depends on the wider one of both (chosen and rejected answers that are padded alike) would look
        like a function of either.
        """
        for wide, narrow in permutations(sorted(self.free), 2):
            met = any(b.sizes[wide] > b.sizes[narrow] for b in self.ragged)
            if not met and any(sizes[wide] > sizes[narrow] for sizes in self._inputs.sizes):
                wider = (
                    self._padded(b, wide, b.sizes[narrow] + more)
                    for b, more in zip(self.ragged, _BEYOND, strict=False)
                )
                yield from (b for b in wider if b is not None)

    def _padded(self, b: Batch, name: str, size: int) -> Batch | None:
        """A micro-batch padded to a width; None where collate's padding does not tell how."""
        try:
            return Batch(
                pad_batch(b.batch, self._inputs.inputs, {name: size}), {**b.sizes, name: size}, b.samples
            )
        except (UserError, ValueError):
            return None

    def _tried(self, b: Batch) -> Observed | None:
        """A padded micro-batch recorded; None where the model refuses its width."""
        try:
            return self._observe(b)
        except (UserError, ValueError):
            return None

    def held_out(self) -> Iterator[Observed]:
        """Ragged micro-batches of a turn that was not captured: in the place of each, other samples."""
        for samples in self._survey.batches(self._pattern, turn=self._turn + 1):
            found = self._observe(self._collated(samples))
            yield replace(found, parts=tuple(shapes_alone(self._recorder, self._user, s) for s in samples))

    def alone(self) -> Iterator[Observed]:
        """The samples of the first ragged micro-batch, each in a micro-batch of its own."""
        return (self._observe(self._collated([s])) for s in self.ragged[0].samples)

    def empty(self) -> Iterator[Observed]:
        """The first ragged micro-batch with all labels ignored, or with one of its masks empty, which may
        leave no rows to count."""
        first, labels = self.ragged[0], self._inputs.labels_key
        changed = {labels: torch.full_like(first.batch[labels], IGNORED)} if labels in first.batch else {}
        changed |= {
            key: torch.zeros_like(value)
            for key, value in first.batch.items()
            if key != labels and _is_mask(value)
        }
        for key, value in changed.items():
            yield self._observe(replace(first, batch={**first.batch, key: value}))


def _is_mask(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not value.is_floating_point()
        and bool(((value == 0) | (value == 1)).all())
    )


def _conditions(observed: Observed) -> set[tuple[str, bool]]:
    """The conditions that Python read: where, and what they were."""
    return {(r.where, r.value) for r in observed.recording.reads if isinstance(r.value, bool)}


def shapes_alone(recorder: Recorder, user: UserModel, sample: Sample) -> Shapes:
    """The labelled shapes of a sample's own recording."""
    return Outline.of(fold(recorder.record(user.collate([sample])))).shapes()


def _most_independent(turns: Iterable[tuple[int, list[Batch]]]) -> tuple[int, list[Batch]]:
    """The micro-batches in which the fewest sizes follow from others by chance (26 tokens less one for each
    sample)."""
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
