"""Micro-batches of a pattern that captures compare: ragged ones, which collate pads, and even ones, which
need no padding."""

from __future__ import annotations

import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, cycle, groupby, islice, permutations, product
from typing import Any

import torch

from secc import process_map
from secc.errors import UserError
from secc.frontend.capture.control_flow_paths import (
    LONG_WIDTH,
    MIN_CAPTURES,
    ObservedRecording,
    path_signature,
)
from secc.frontend.capture.known_recordings import KnownRecordings, ProbeBatch
from secc.frontend.capture.shared_explanations import SharedExplanations
from secc.frontend.capture.width_orders import WidthPair, find_deciding_pairs, read_orders
from secc.frontend.dataset.input_symbols import IGNORED_LABEL, ModelInputs
from secc.frontend.dataset.survey import (
    BATCH_SAMPLE_COUNTS,
    DatasetSurvey,
    InputPattern,
    Sample,
    sort_by_volume,
)
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.batch_sizes import pad_batch, read_symbol_sizes
from secc.runtime.plan.expr_eval import expression_symbols
from secc.runtime.plan.schema import Symbol
from secc.runtime.recorder.fold_joins import fold_joins
from secc.runtime.recorder.fold_parts import fold_parts
from secc.runtime.recorder.serialization import dump_recording, load_recording

_ROTATIONS = 3  # choices of samples to try, for micro-batches with sizes that vary independently
# Recordings that take more processor time are worth a fork, which costs a quarter of a second of it; and both
# processes learn what blocks return.
SLOW_RECORDING_SECONDS = 0.5
_REPEATED_BATCHES = 3  # micro-batches that are recorded with each of their samples repeated
_REPEATED_SAMPLE = (2, 1)  # how often a sample stands in batches of it alone
_RARE_REPEATS = (
    1,
    3,
    1,
    2,
    4,
)  # how often one of a rare path stands in each ragged micro-batch: its rows vary
_SINGLE_SAMPLES = 5  # that are recorded by themselves, if one of them takes a path of its own
_FEWEST_COMBINATIONS = 3  # outcomes of conditions that one condition alone cannot have
_MOST_KINDS = 5  # kinds of samples that are combined in all ways
_COMBINED_BATCHES = 6  # of a combination, with numbers of samples of each kind that no expression relates
_EQUAL_WIDTHS = 3  # micro-batches of samples in which one width is equal
_READS_OF_A_LINE = 7  # further ones are of a loop, and count as one
_EXTRA_WIDTHS = (2, 5, 3, 7, 4)  # by how much one width is padded beyond another


class ProbeBatches:
    """The micro-batches of a pattern and their recordings; it is the `BatchProbe` of the pattern."""

    def __init__(
        self,
        user: UserModel,
        survey: DatasetSurvey,
        inputs: ModelInputs,
        pattern: InputPattern,
        known: KnownRecordings,
        check_time: Callable[[], None] = lambda: None,
    ) -> None:
        def collate(samples: list[Any]) -> ProbeBatch:
            batch = user.collate(samples)
            return ProbeBatch(batch, read_symbol_sizes(batch, inputs.symbols, len(samples)), samples)

        self._inputs, self._known, self._survey, self._pattern = inputs, known, survey, pattern
        self._collate, self._check_time = collate, check_time
        self.explanations = SharedExplanations()
        self._deciding_pairs: list[WidthPair] = []  # of widths that Python compares
        self._folded_loops = frozenset[str]()  # lines that cut tensors into parts, `Recording.folded_loops`
        self.padded_symbols = frozenset(s.name for s in inputs.symbols if s.is_padded)
        rotations = (
            (rotation, [collate(s) for s in survey.compose_batches(pattern, rotation=rotation)])
            for rotation in range(_ROTATIONS)
        )
        self._rotation, self.ragged_batches = _pick_most_independent(rotations)
        self.even_batches = [
            collate(s) for s in survey.compose_batches(pattern, even=True, rotation=self._rotation)
        ]

    def record_paths(self) -> list[ObservedRecording]:
        """Records ragged and even micro-batches; only one even one if enough ragged ones take the same
        path.

        Conditions on the inputs that were equal in all of them are searched in single samples.
        Micro-batches composed of a sample that decides them differently (a clip without padding) are
        recorded too.
        """
        recordings = self._record_ragged_then_even(self.ragged_batches, self.even_batches)
        recordings += [o for _, o in self._record_crossed_widths()]
        for sample, other in self._samples_with_new_conditions(recordings):
            if other is not None:
                recordings += [self._record_batch(self._collate([other] * n)) for n in _REPEATED_SAMPLE]
            ragged, even = (
                [self._collate(s) for s in self._survey.compose_batches(self._pattern, even, of=sample)]
                for even in (False, True)
            )
            recordings += self._record_ragged_then_even(ragged, even)
        recordings += self._record_rare_among_others()
        recordings += self._record_single_samples(recordings)
        recordings += self._record_other_combinations(recordings)
        recordings += self._record_masks_filled_apart(recordings)
        if self._folded_loops:  # some are found after batches with a single part were recorded
            recordings = [
                replace(o, recording=fold_parts(o.recording, self._folded_loops)) for o in recordings
            ]
        alike = [p for p in combinations(self._padded_widths(), 2) if self._are_alike(*p)]
        deciding = find_deciding_pairs(recordings, alike)
        recordings += self._record_width_orders(deciding)
        self._deciding_pairs = deciding
        return [read_orders(o, deciding) for o in recordings]

    def _record_rare_among_others(self) -> list[ObservedRecording]:
        """Records the ragged micro-batches with each sample of a smaller pattern that takes a rare path."""
        own = self._survey.kept_samples(self._pattern)
        rare = [s for s in self._survey.rare_samples(self._pattern) if all(s is not o for o in own)]
        return [
            self._record_batch(self._collate([*b.samples, *[sample] * times]))
            for sample in rare
            for b, times in zip(self.ragged_batches, _RARE_REPEATS, strict=True)
        ]

    def _record_width_orders(self, pairs: Sequence[WidthPair]) -> list[ObservedRecording]:
        """Records ragged micro-batches with each of two widths padded to the other and beyond it: some orders
        are rare in samples."""
        found = list[ObservedRecording]()
        for (b, more), pair in product(zip(self.ragged_batches, _EXTRA_WIDTHS, strict=False), pairs):
            for padded, other in permutations(s.name for s in pair):
                for size in (b.sizes[other], b.sizes[other] + more):
                    wider = self._pad_batch(b, padded, size) if size >= b.sizes[padded] else None
                    if wider is not None and (recording := self._record_if_accepted(wider)) is not None:
                        found.append(recording)
        return found

    def _padded_widths(self) -> list[Symbol]:
        return [s for s in self._inputs.symbols if s.is_padded]

    def _record_single_samples(self, recordings: Sequence[ObservedRecording]) -> list[ObservedRecording]:
        """Records samples by themselves, where samples lie side by side in one row and one alone takes a path
        that several rarely take: attention without a mask.

        With a dim that counts samples, such recordings could not tell their number from the constant 1.
        """
        samples_symbol = self._inputs.symbols[0].name
        counts_samples = any(
            samples_symbol in expression_symbols(dim) for i in self._inputs.inputs for dim in i.dims
        )
        samples = [] if counts_samples else self._survey.kept_samples(self._pattern)
        paths = Counter(path_signature(o.recording) for o in recordings)
        found = list[ObservedRecording]()
        for place in range(_SINGLE_SAMPLES if samples else 0):
            alone = self._record_alone(samples[place * (len(samples) - 1) // (_SINGLE_SAMPLES - 1)])
            if alone is None or paths[path_signature(alone.recording)] >= MIN_CAPTURES:
                break
            found.append(alone)
        return found

    def _record_other_combinations(self, recordings: Sequence[ObservedRecording]) -> list[ObservedRecording]:
        """Records combinations of conditions that no recording met often enough, where several conditions
        vary independently: `if (task == j).any()` for each of several tasks.

        Samples are told apart by what they decide alone. A batch of several kinds of samples decides each
        condition as one of them does, so combinations of kinds give combinations of conditions.
        """
        outcomes = Counter(map(_condition_outcomes, recordings))
        if len(outcomes) < _FEWEST_COMBINATIONS or len({len(o) for o in outcomes}) > 1:
            return []
        kinds = defaultdict[tuple[bool, ...], list[Sample]](list)
        for sample in self._survey.kept_samples(self._pattern):
            alone = self._record_alone(sample)
            if alone is not None:
                kinds[_condition_outcomes(alone)].append(sample)
        if not 2 <= len(kinds) <= _MOST_KINDS:
            return []
        found = list[ObservedRecording]()
        chosen_kinds = (c for n in range(1, len(kinds) + 1) for c in combinations(sorted(kinds), n))
        for chosen in chosen_kinds:
            columns = list(zip(*chosen, strict=True))
            likely = {tuple(map(decide, columns)) for decide in (any, all)}
            if any(outcomes[o] >= MIN_CAPTURES for o in likely):
                continue
            for turn in range(_COMBINED_BATCHES):
                counts = [1 + (turn * turn * (i + 2) + 3 * turn + i) % 5 for i in range(len(chosen))]
                samples = [
                    sample
                    for kind, number in zip(chosen, counts, strict=True)
                    for sample in islice(cycle(kinds[kind]), turn, turn + number)
                ]
                found.append(self._record_batch(self._collate(samples)))
                outcomes[_condition_outcomes(found[-1])] += 1
        return found

    def _record_masks_filled_apart(self, recordings: Sequence[ObservedRecording]) -> list[ObservedRecording]:
        """Records micro-batches in which some widths are padded for all samples and the others for none,
        where conditions change with padding: of two masks, one may be full where the other is not, in samples
        that are equally long in one input only."""
        widths = [s.name for s in self._padded_widths()]
        paths = Counter(path_signature(o.recording) for o in recordings)
        if len(widths) < 2 or len({_condition_outcomes(o) for o in recordings}) < 2:
            return []
        found = list[ObservedRecording]()
        few = (set(c) for n in (1, len(widths) - 1) for c in combinations(widths, n))
        for padded in dict.fromkeys(map(frozenset, few)):
            for b, more in zip(self.even_batches, _EXTRA_WIDTHS, strict=False):
                wider: ProbeBatch | None = b
                for i, name in enumerate(sorted(padded)):
                    wider = wider and self._pad_batch(wider, name, b.sizes[name] + more + i)
                recording = wider and self._record_if_accepted(wider)
                if recording is None or paths[path_signature(recording.recording)] >= MIN_CAPTURES:
                    break
                found.append(recording)
        return found

    def _record_ragged_then_even(
        self, ragged: Sequence[ProbeBatch], even: Sequence[ProbeBatch]
    ) -> list[ObservedRecording]:
        recordings = self._record_in_parallel([*ragged, even[0]])
        if [path_signature(o.recording) for o in recordings].count(
            path_signature(recordings[-1].recording)
        ) < MIN_CAPTURES:
            recordings += self._record_in_parallel(even[1:])
        return recordings

    def _record_in_parallel(self, batches: Sequence[ProbeBatch]) -> list[ObservedRecording]:
        """Records micro-batches. If that takes long, a forked copy of this process records every second of
        the remaining ones, as far as they can be recorded and pickled."""
        start, first = time.process_time(), list[ObservedRecording]()
        while len(first) < len(batches) and time.process_time() - start < SLOW_RECORDING_SECONDS:
            first.append(self._record_batch(batches[len(first)]))
        left = batches[len(first) :]
        if len(left) < 2:
            return first + [self._record_batch(b) for b in left]
        with process_map.run_in_background(lambda: list(self._record_serialized(left[1::2]))) as serialized:
            # Which error is reported must not depend on the order: it is met again below.
            with suppress(Exception):
                for b in left[::2]:
                    self._known.record_ahead(b)
            for data, b in zip(serialized(), left[1::2], strict=False):
                self._known.adopt_recording(b, load_recording(data))
        return first + [self._record_batch(b) for b in left]

    def _record_serialized(self, batches: Sequence[ProbeBatch]) -> Iterator[bytes]:
        """Yields recordings as bytes, up to the first one that fails."""
        with suppress(Exception):
            for b in batches:
                yield dump_recording(self._known.record(b))

    def _samples_with_new_conditions(
        self, recordings: Sequence[ObservedRecording]
    ) -> list[tuple[Sample, Sample | None]]:
        """Returns samples that alone meet conditions that `recordings` did not meet on any path, or only on
        paths that do not show what sizes do (by chance two sounds make equally many features); each with one
        of other sizes that meets the same, if the largest sample does."""
        by_path = defaultdict[object, list[ObservedRecording]](list)
        for o in recordings:
            by_path[path_signature(o.recording)].append(o)
        often = [o for path in by_path.values() if self._shows_sizes(path, recordings) for o in path]
        places = {place for o in recordings for place, _ in _read_conditions(o)}
        known_conditions = {condition for o in often for condition in _read_conditions(o)}
        others: list[tuple[Sample, Sample | None]] = []
        samples = sort_by_volume(self._survey.kept_samples(self._pattern))
        for sample in samples:
            places |= {place for place, _ in known_conditions}
            if len(known_conditions) == 2 * len(places):
                break
            alone = self._record_alone(sample)
            if alone is not None and not _read_conditions(alone) <= known_conditions:
                known_conditions |= _read_conditions(alone)
                largest = self._record_alone(samples[-1])
                alike = largest is not None and path_signature(largest.recording) == path_signature(
                    alone.recording
                )
                differs = largest is not None and largest.sizes != alone.sizes
                others.append((sample, samples[-1] if alike and differs else None))
        return others

    def _shows_sizes(
        self, path: Sequence[ObservedRecording], recordings: Sequence[ObservedRecording]
    ) -> bool:
        """Whether the recordings of a path are enough to tell sizes from constants: several, and not of long
        sounds of nearly one length where others differ."""

        def spread(name: str, observed: Sequence[ObservedRecording]) -> int:
            sizes = [o.sizes[name] for o in observed]
            return max(sizes) - min(sizes)

        long = [n for n in self.padded_symbols if max(o.sizes[n] for o in recordings) >= LONG_WIDTH]
        return len(path) >= MIN_CAPTURES and all(2 * spread(n, path) >= spread(n, recordings) for n in long)

    def _record_alone(self, sample: Sample) -> ObservedRecording | None:
        """Records a sample by itself; None if only several samples together have this pattern."""
        batch = self._collate([sample])
        return (
            self._record_batch(batch) if batch.batch.keys() == self.ragged_batches[0].batch.keys() else None
        )

    def record_with_sample_shapes(self, fewest: bool = False) -> list[ObservedRecording]:
        """Records all micro-batches, or the fewest that show what sizes do, with the labelled shapes of their
        samples recorded alone."""
        if fewest:
            seen = [self._record_batch(b) for b in self.ragged_batches[:MIN_CAPTURES]]
        else:
            seen = [self._record_batch(b) for b in (*self.ragged_batches, *self.even_batches)]
            seen += [o for _, o in self._record_crossed_widths()]
        return list(map(self._add_sample_shapes, seen))

    def _add_sample_shapes(self, observed: ObservedRecording) -> ObservedRecording:
        """Returns a recording with the labelled shapes of its samples recorded alone."""
        return replace(observed, sample_shapes=tuple(map(self._known.shapes_of_sample, observed.samples)))

    def _record_batch(self, b: ProbeBatch) -> ObservedRecording:
        self._check_time()
        recording = fold_joins(self._known.record(b), self._folded_loops)
        self._folded_loops |= recording.folded_loops
        observed = ObservedRecording(recording, b.sizes, samples=tuple(b.samples))
        return read_orders(observed, self._deciding_pairs)

    def __call__(self, name: str, size: int) -> ObservedRecording | None:
        """Records the ragged micro-batch that is narrowest along the width symbol `name`, padded to
        `size`; None if that is not possible."""
        return self._record_padded(min(self.ragged_batches, key=lambda b: b.sizes[name]), name, size)

    def record_padded(self, known: ObservedRecording, name: str, size: int) -> ObservedRecording | None:
        """Records the micro-batch of a recording padded to `size` along the width symbol `name`; None if that
        is not possible."""
        return self._record_padded(self._collate([*known.samples]), name, size) if known.samples else None

    def _record_padded(self, b: ProbeBatch, name: str, size: int) -> ObservedRecording | None:
        wider = self._pad_batch(b, name, size)
        found = None if wider is None else self._record_if_accepted(wider)
        return None if found is None else self._add_sample_shapes(found)

    def _record_crossed_widths(self) -> list[tuple[ProbeBatch, ObservedRecording]]:
        """Records ragged micro-batches with one width padded beyond another where the ragged ones never have
        the two in that order.

        What depends on the wider of two widths (chosen and rejected answers padded to one length) would
        otherwise look like a function of either. An order that no drawn sample has is recorded if the widths
        are of inputs alike, as a sample that was not drawn may have it.
        """
        found = list[tuple[ProbeBatch, ObservedRecording]]()
        for wide, narrow in permutations(self._padded_widths(), 2):
            if any(b.sizes[wide.name] > b.sizes[narrow.name] for b in self.ragged_batches):
                continue
            drawn = any(sizes[wide.name] > sizes[narrow.name] for sizes in self._inputs.sample_sizes)
            if drawn or self._are_alike(wide, narrow):
                wider = (
                    self._pad_batch(b, wide.name, b.sizes[narrow.name] + more)
                    for b, more in zip(self.ragged_batches, _EXTRA_WIDTHS, strict=False)
                )
                found += [
                    (b, o) for b in wider if b is not None and (o := self._record_if_accepted(b)) is not None
                ]
        return found

    def _are_alike(self, a: Symbol, b: Symbol) -> bool:
        """Whether two widths are the same dim of inputs with the same dtype and number of dims."""
        inputs = {i.key: i for i in self._inputs.inputs}
        x, y = inputs[a.key], inputs[b.key]
        return (x.dtype, len(x.dims), a.dim) == (y.dtype, len(y.dims), b.dim)

    def _pad_batch(self, b: ProbeBatch, name: str, size: int) -> ProbeBatch | None:
        """Returns a micro-batch padded to a width; None if collate's padding does not show how."""
        try:
            return ProbeBatch(
                pad_batch(b.batch, self._inputs.inputs, {name: size}), {**b.sizes, name: size}, b.samples
            )
        except (UserError, ValueError):
            return None

    def _record_if_accepted(self, b: ProbeBatch) -> ObservedRecording | None:
        """Records a changed micro-batch; None if the model refuses its width or its masks. It may warn of
        sizes that no batch of the user's has: that is not shown."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self._record_batch(b)
            except (UserError, ValueError):
                return None

    def record_other_widths(self, name: str, size: int) -> Iterator[ObservedRecording]:
        """Yields recordings of micro-batches in which the width `name` is not `size`: of one sample each, of
        the two samples in which it is farthest from `size`; then of several samples in which it is equal, so
        that only other inputs are padded."""
        alone = {id(s): self._collate([s]).sizes for s in self._survey.kept_samples(self._pattern)}
        others = [s for s in self._survey.kept_samples(self._pattern) if alone[id(s)].get(name, size) != size]
        others.sort(key=lambda s: (-abs(alone[id(s)][name] - size), alone[id(s)][name]))
        for sample, even in product(others[:2], (False, True)):
            for samples in self._survey.compose_batches(self._pattern, even, of=sample)[:2]:
                yield self._record_batch(self._collate(samples))
        equal = [list(g) for _, g in groupby(others, key=lambda s: alone[id(s)][name])]
        for samples in sorted(equal, key=len, reverse=True)[:_EQUAL_WIDTHS]:
            yield self._record_batch(self._collate(samples[: max(BATCH_SAMPLE_COUNTS)]))

    def record_held_out(self) -> Iterator[ObservedRecording]:
        """Yields recordings of ragged micro-batches that were not captured, with other samples."""
        for samples in self._survey.compose_batches(self._pattern, rotation=self._rotation + 1):
            yield self._add_sample_shapes(self._record_batch(self._collate(samples)))

    def record_with_repeats(self, recordings: Sequence[ObservedRecording]) -> Iterator[ObservedRecording]:
        """Yields recordings of the smallest of these micro-batches with one of its samples twice or three
        times, for each sample: they differ in how many rows values pick, and take the same path."""
        smallest = sorted((o for o in recordings if o.samples), key=lambda o: len(o.samples))
        for known in smallest[:_REPEATED_BATCHES]:
            for sample, times in product(known.samples, (1, 2)):
                found = self._record_if_accepted(self._collate([*known.samples, *[sample] * times]))
                if found is not None:
                    yield found

    def record_samples_alone(self) -> Iterator[ObservedRecording]:
        """Yields recordings of the samples of the first ragged micro-batch, each in its own micro-batch."""
        return (self._record_batch(self._collate([s])) for s in self.ragged_batches[0].samples)

    def record_without_rows(self) -> Iterator[ObservedRecording]:
        """Yields recordings of the first ragged micro-batch with all labels ignored, or with one mask
        empty, which may leave no rows to count; with all of these at once where forward refuses one of them,
        as where it compares rows that two masks pick."""
        first, labels = self.ragged_batches[0], self._inputs.labels_key
        replacements = (
            {labels: torch.full_like(first.batch[labels], IGNORED_LABEL)} if labels in first.batch else {}
        )
        replacements |= {
            key: torch.zeros_like(value)
            for key, value in first.batch.items()
            if key != labels and _is_mask(value)
        }
        is_refused = False
        for key, value in replacements.items():
            found = self._record_if_accepted(
                replace(first, batch={**first.batch, key: value}, changed=(key,))
            )
            is_refused |= found is None
            if found is not None:
                yield found
        if is_refused:
            found = self._record_if_accepted(
                replace(first, batch={**first.batch, **replacements}, changed=tuple(replacements))
            )
            if found is not None:
                yield found


def _is_mask(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not value.is_floating_point()
        and bool(((value == 0) | (value == 1)).all())
    )


def _condition_outcomes(observed: ObservedRecording) -> tuple[bool, ...]:
    """Returns the outcomes of all conditions that Python read, in order."""
    return tuple(r.value for r in observed.recording.reads if isinstance(r.value, bool))


def _read_conditions(observed: ObservedRecording) -> set[tuple[tuple[str, int], bool]]:
    """Returns the conditions that Python read: (place, value). A place is a line, with a number that tells
    apart the first times that it read one: a library's test whether a mask is full is made for each mask."""
    found, times = set[tuple[tuple[str, int], bool]](), Counter[str]()
    for read in observed.recording.reads:
        if isinstance(read.value, bool):
            found.add(((read.where, min(times[read.where], _READS_OF_A_LINE)), read.value))
            times[read.where] += 1
    return found


def _pick_most_independent(turns: Iterable[tuple[int, list[ProbeBatch]]]) -> tuple[int, list[ProbeBatch]]:
    """Returns the micro-batches in which fewest sizes follow from others by chance (26 tokens minus one
    for each sample), with their rotation."""
    best, most = (0, list[ProbeBatch]()), 0
    for turn, batches in turns:
        rows = torch.tensor([[1, *b.sizes.values()] for b in batches], dtype=torch.float64)
        moving = 1 + sum(len(set(column)) > 1 for column in rows.T.tolist())
        rank = int(torch.linalg.matrix_rank(rows))
        if rank > most:
            best, most = (turn, batches), rank
        if rank == min(moving, len(batches)):
            break
    return best
