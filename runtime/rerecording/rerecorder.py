"""Recording glue anew: what a rank's helper does for each micro-batch whose glue values of the inputs decide.

The helper has a model without weights of its own, since recording changes how modules are called. It runs
ahead of the step, where batches are loaded. What it finds goes with the batch: a program for each tensor that
glue makes for a block, and the numbers of rows that values decide. A micro-batch that goes another way than
the plan's is refused there, before its step.

Most of a forward need not run for that. Once a whole recording has shown that forward calls no block in vain,
so that the plan's calls are the forward's by number, blocks whose results have sizes that the plan knows do
not run, and a recording ends with the last block for which the rank's sections take recorded glue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from secc.runtime.errors import UserError
from secc.runtime.plan.batch_sizes import read_symbol_sizes
from secc.runtime.plan.schema import Plan, is_tensor_label
from secc.runtime.recorder import Recorder
from secc.runtime.recorder.fold_joins import fold_joins
from secc.runtime.recorder.glue_program import GlueProgram, batch_tensor, write_programs
from secc.runtime.recorder.loss_loops import roll_loss_loops
from secc.runtime.recorder.outline import Outline
from secc.runtime.rerecording.outline_case import RecordedCase, call_of_label, common_shape_rules
from secc.runtime.rerecording.recording_cache import RecordingCache, RecordingDependencies
from secc.runtime.sections.base import RECORDING_KEY, SectionCase, SectionModule


class ShapeOnly(NamedTuple):
    """Stands in a batch for a tensor of which only the shape is known."""

    shape: tuple[int, ...]


class TimeSpan(NamedTuple):
    """When something was done, in the machine's monotonic nanoseconds."""

    start: int
    end: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end - self.start) / 1e9

    def overlap_seconds(self, other: TimeSpan) -> float:
        """Seconds that both took."""
        return max(0, min(self.end, other.end) - max(self.start, other.start)) / 1e9


@dataclass(frozen=True)
class RecordedGlue:
    """The recorded glue of one micro-batch, for a case of the plan. `spent`: when it was recorded, None where
    the cache had it."""

    case: str
    programs: Mapping[str, GlueProgram]
    planned_sources: Mapping[str, Sequence[str]]
    recorded_during: TimeSpan | None

    def run(
        self, section: SectionModule, batch: Mapping[str, Any], label: str, sources: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The tensor with this label; `sources` are those that the plan has for it."""
        given = dict(zip(self.planned_sources[label], sources, strict=True))
        self._check_shapes(label, given)

        def source(name: str) -> torch.Tensor:
            if name in given:
                return given[name]
            kind, _, rest = name.partition(" ")
            return batch_tensor(batch, rest) if kind == "input" else section.value(rest)

        return self.programs[label].run(source, section)

    def _check_shapes(self, label: str, given: Mapping[str, torch.Tensor]) -> None:
        """Raises UserError where a block's result has another shape than it had in the recording, which may
        have it from the plan alone."""
        for name, shape in self.programs[label].shapes.items():
            if name in given and tuple(given[name].shape) != shape:
                block = name.removeprefix("result ").strip()
                message = f"block {block} returns a tensor of shape {tuple(given[name].shape)}, where sizes say {shape}"
                raise UserError(
                    message, remedy="name a larger module as the block: what values decide is not to leave it"
                )


@dataclass(frozen=True)
class _RecordingRequest:
    """What sections want of a micro-batch's recording: labels, or with None all of them, and the call it may
    end with."""

    pattern: frozenset[str]
    section_cases: Sequence[Sequence[SectionCase]] = ()
    labels: frozenset[str] | None = None
    last_call: int | None = None

    def cache_kind(self, samples: int) -> Hashable:
        """What recordings of so many samples that can stand for each other have in common."""
        return self.pattern, self.labels, self.last_call, samples


@dataclass(frozen=True)
class MicroBatchRecording:
    """A recording as its micro-batch needs it. `case` has the name of the plan's, "" if none was asked for.

    `decides`: what decided it, None where it is not to be kept.
    """

    case: str
    programs: Mapping[str, GlueProgram]
    known_shapes: Mapping[str, ShapeOnly]
    dependencies: RecordingDependencies | None

    @property
    def nbytes(self) -> int:
        """The memory of its values."""
        return sum(p.nbytes for p in self.programs.values())


class Rerecorder:
    """Records micro-batches anew. `model` makes a model of its own when the first is recorded; `sections` are
    those that will run them."""

    def __init__(
        self,
        plan: Plan,
        model: Callable[[], nn.Module],
        sections: Callable[[nn.Module], Sequence[SectionModule]],
    ) -> None:
        self.plan, self._build_model, self._build_sections = plan, model, sections
        self._section_keys = {s.name: frozenset(s.when) for s in plan.sections}
        self._optional = frozenset(i.key for i in plan.inputs if i.optional)
        self._counted_symbols = [s for s in plan.symbols if is_tensor_label(s.key)]
        # These calls run, since rows of their results count.
        self._calls_with_counted_rows = {
            call_of_label(s.key) for s in self._counted_symbols if s.key.startswith("result ")
        }
        self._known_symbols = [s for s in plan.symbols if not is_tensor_label(s.key)]
        self._cases = [RecordedCase(c) for c in plan.recorded]
        self._recorder: Recorder | None = None
        self._sections: Sequence[SectionModule] = ()
        self._cache = RecordingCache[MicroBatchRecording]()
        self._has_planned_calls: dict[
            frozenset[str], bool
        ] = {}  # patterns: whether the plan's calls are the forward's
        self.recording_count = 0

    def add_row_counts(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A sample's batch with the numbers of rows that values decide, if the plan has such symbols."""
        if not self._counted_symbols:
            return batch
        pattern = self._optional.intersection(batch)
        ends = [
            c.last_call_number(s.key for s in self._counted_symbols) for c in self._cases_of_pattern(pattern)
        ]
        return {
            **batch,
            **self._recall_or_record(
                batch, 1, _RecordingRequest(pattern, (), frozenset(), max(ends, default=None))
            ).known_shapes,
        }

    def add_recorded_glue(self, batch: dict[str, Any], samples: int, section: str = "") -> dict[str, Any]:
        """A micro-batch of so many samples with its recording, where `section` ("": any) needs it. Raises
        UserError where it goes another way."""
        want = self._recording_request(batch, section)
        if want is None:
            return batch
        start, before = time.monotonic_ns(), self.recording_count
        found = self._recall_or_record(batch, samples, want)
        return self._attach_recording(
            batch, found, TimeSpan(start, time.monotonic_ns()) if self.recording_count > before else None
        )

    def add_cached_glue(self, batch: dict[str, Any], samples: int, section: str) -> dict[str, Any] | None:
        """The same where nothing has to be recorded for it, else None."""
        want = self._recording_request(batch, section)
        if want is None:
            return batch
        found = self._cache.get(want.cache_kind(samples), batch)
        return None if found is None else self._attach_recording(batch, found, None)

    def record_micro_batch(
        self, batch: dict[str, Any], samples: int, section: str
    ) -> tuple[MicroBatchRecording, TimeSpan]:
        """The recording of a micro-batch that another process asks for, and keeps."""
        want = self._recording_request(batch, section)
        assert want is not None
        start = time.monotonic_ns()
        return self._record_minimally(batch, samples, want), TimeSpan(start, time.monotonic_ns())

    def cache_recording(
        self, batch: dict[str, Any], samples: int, section: str, found: MicroBatchRecording, spent: TimeSpan
    ) -> dict[str, Any]:
        """The micro-batch with the recording that another process made of it."""
        want = self._recording_request(batch, section)
        assert want is not None
        self._store_recording(want.cache_kind(samples), batch, found)
        return self._attach_recording(batch, found, spent)

    def _attach_recording(
        self, batch: dict[str, Any], found: MicroBatchRecording, spent: TimeSpan | None
    ) -> dict[str, Any]:
        sources = next(c.sources for c in self._cases if c.name == found.case)
        return {
            **batch,
            **found.known_shapes,
            RECORDING_KEY: RecordedGlue(found.case, found.programs, sources, spent),
        }

    def _cases_of_pattern(self, pattern: frozenset[str]) -> list[RecordedCase]:
        return [c for c in self._cases if c.when == pattern]

    def _recording_request(self, batch: Mapping[str, Any], section: str) -> _RecordingRequest | None:
        """What a section ("": any) wants of a micro-batch's recording, None if it wants none."""
        pattern = self._optional.intersection(batch)
        cases = self._cases_of_pattern(pattern)
        asked = [s for s in self._ensure_recorder() if section in ("", s.name)] if cases else []
        active = (s for s in asked if not self._section_keys[s.name] or self._section_keys[s.name] & pattern)
        bodies = [found for s in active if (found := s.cases_to_rerecord(batch))]
        if not bodies:
            return None
        labels = frozenset(label for body in bodies for case in body for label in case.recorded_labels)
        if any(case.needs_whole_recording for body in bodies for case in body):
            return _RecordingRequest(pattern, bodies, labels)
        return _RecordingRequest(
            pattern,
            bodies,
            labels,
            max(c.last_call_number([*labels, *(s.key for s in self._counted_symbols)]) for c in cases),
        )

    def _ensure_recorder(self) -> Sequence[SectionModule]:
        if self._recorder is None:
            model = self._build_model()
            self._sections = self._build_sections(model)
            self._recorder = Recorder(
                model, {*self.plan.fused, *(b for s in self.plan.sections for b in s.blocks)}
            )
        return self._sections

    def _recall_or_record(
        self, batch: Mapping[str, Any], samples: int, want: _RecordingRequest
    ) -> MicroBatchRecording:
        kind = want.cache_kind(samples)
        found = self._cache.get(kind, batch)
        if found is None:
            found = self._record_minimally(batch, samples, want)
            self._store_recording(kind, batch, found)
        return found

    def _store_recording(self, kind: Hashable, batch: Mapping[str, Any], found: MicroBatchRecording) -> None:
        if found.dependencies is not None:
            self._cache.put(kind, batch, found, found.dependencies, found.nbytes)

    def _record_minimally(
        self, batch: Mapping[str, Any], samples: int, want: _RecordingRequest
    ) -> MicroBatchRecording:
        """Record as little of a micro-batch as will do."""
        self._ensure_recorder()
        cases = self._cases_of_pattern(want.pattern)
        numbered = self._has_planned_calls.get(want.pattern, False)
        rules = (
            common_shape_rules(
                [c.shape_rules(read_symbol_sizes(batch, self._known_symbols, samples)) for c in cases]
            )
            if numbered
            else {}
        )
        rules = {call: shapes for call, shapes in rules.items() if call not in self._calls_with_counted_rows}
        outline = self._record_outline(batch, rules, want.last_call if numbered else None)
        if outline.recording.ends_early:
            found = (
                self._match_planned_case(outline, batch, samples, want)
                if self._has_all_row_counts(outline, cases)
                else None
            )
            if found is not None:
                return found
            outline = self._record_outline(batch, rules, None)
        first = (
            want.last_call is not None and want.pattern not in self._has_planned_calls
        )  # more decides it than what is recorded next
        self._has_planned_calls[want.pattern] = (
            not outline.recording.has_idle_calls and self._has_planned_calls.get(want.pattern, True)
        )
        found = self._match_planned_case(outline, batch, samples, want)
        assert found is not None
        return replace(found, dependencies=None) if first else found

    def _has_all_row_counts(self, outline: Outline, cases: Sequence[RecordedCase]) -> bool:
        """Whether a recording that ended early has all numbers of rows that there are in a case of the
        plan."""
        shapes = outline.known_shapes()
        return all(
            s.key in shapes or not any(c.has_call_of(s.key) for c in cases) for s in self._counted_symbols
        )

    def _record_outline(self, batch: Mapping[str, Any], rules: Any, until: int | None) -> Outline:
        assert self._recorder is not None
        self.recording_count += 1
        recording = fold_joins(self._recorder.record(batch, rules, until))
        loops = any(c.has_loops for c in self._cases_of_pattern(self._optional.intersection(batch)))
        return Outline.of_recording(
            roll_loss_loops(recording) if loops and not recording.ends_early else recording
        )

    def _match_planned_case(
        self, outline: Outline, batch: Mapping[str, Any], samples: int, want: _RecordingRequest
    ) -> MicroBatchRecording | None:
        """What is found of a micro-batch that goes the way of a case of the plan. Of a recording that ended
        early None if it is not clear which, of a whole one UserError if it goes none's."""
        shapes, ended = outline.known_shapes(), outline.recording.ends_early
        extents = {s.key: ShapeOnly(shapes[s.key]) for s in self._counted_symbols if s.key in shapes}
        made, read = write_programs(outline, batch, want.labels)
        sizes = read_symbol_sizes({**batch, **extents}, self.plan.symbols, samples)
        name = ""
        if want.section_cases:
            problems = {
                c: c.find_mismatch(outline, made, sizes) for c in self._cases_of_pattern(want.pattern)
            }
            fitting = [c for c, problem in problems.items() if problem is None]
            if ended and len({c.section_paths(want.section_cases, want.labels) for c in fitting}) != 1:
                return None
            if not fitting:
                raise next(iter(problems.values())) or UserError("no case of the plan fits")
            name = fitting[0].name
        return MicroBatchRecording(
            name, made, extents, RecordingDependencies.of_recording(outline.recording, read)
        )
