"""Records the glue of a micro-batch again on a rank, if values of its inputs decide which ops the glue has.

The Rerecorder runs in the rank's loader, ahead of the step, and has a model of its own without weights, since
recording changes how modules are called. Its results travel with the batch: a program for each tensor that
glue makes for a block, and the numbers of rows that depend on values. A micro-batch that takes a path which
the plan does not have is rejected here, before its step.

Most of a forward need not run for that, and two shortcuts leave it out. Both number the calls of blocks as
the plan does, so they are used for an input pattern only after a whole recording of it has shown that forward
uses the results of all blocks it calls. First, blocks do not run if the plan knows the sizes of their
results. Second, a recording ends with the last block that gets recorded glue from one of the rank's sections.
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
from secc.runtime.plan.sample_predicates import is_active
from secc.runtime.plan.schema import Plan, is_tensor_label
from secc.runtime.recorder import Recorder
from secc.runtime.recorder.fold_joins import fold_joins
from secc.runtime.recorder.glue_program import GlueProgram, batch_tensor, write_programs
from secc.runtime.recorder.loss_loops import roll_loss_loops
from secc.runtime.recorder.outline import Outline
from secc.runtime.rerecording.outline_case import (
    RecordedCase,
    ResultShapes,
    call_of_label,
    common_shape_rules,
)
from secc.runtime.rerecording.recording_cache import RecordingCache, RecordingDependencies
from secc.runtime.sections.base import RECORDING_KEY, SectionCase, SectionModule


class ShapeOnly(NamedTuple):
    """Stands in a batch for a tensor if only its shape is known."""

    shape: tuple[int, ...]


class TimeSpan(NamedTuple):
    """Start and end of an activity, in nanoseconds of the machine's monotonic clock."""

    start: int
    end: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.end - self.start) / 1e9

    def overlap_seconds(self, other: TimeSpan) -> float:
        """Seconds that two spans have in common."""
        return max(0, min(self.end, other.end) - max(self.start, other.start)) / 1e9


@dataclass(frozen=True)
class RecordedGlue:
    """The recorded glue of one micro-batch.

    case: name of the plan's case that the micro-batch follows. programs: by label of the tensor that each
    computes. planned_sources: by label, names of the tensors that the section passes. recorded_during: when
    it was recorded, None if it came from the cache.
    """

    case: str
    programs: Mapping[str, GlueProgram]
    planned_sources: Mapping[str, Sequence[str]]
    recorded_during: TimeSpan | None

    def run(
        self, section: SectionModule, batch: Mapping[str, Any], label: str, sources: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Compute the tensor `label`. `sources` are the tensors that the section passes for it, in the plan's
        order; raises UserError if their shapes differ from the recorded ones."""
        passed = dict(zip(self.planned_sources[label], sources, strict=True))
        self._check_shapes(label, passed)

        def source(name: str) -> torch.Tensor:
            if name in passed:
                return passed[name]
            kind, _, input_name = name.partition(" ")
            return batch_tensor(batch, input_name) if kind == "input" else section.value(input_name)

        return self.programs[label].run(source, section)

    def _check_shapes(self, label: str, passed: Mapping[str, torch.Tensor]) -> None:
        """Raise UserError if a block's result has another shape than in the recording. The recording may
        have its shape from the plan's expressions, without running the block."""
        for name, shape in self.programs[label].shapes.items():
            if name in passed and tuple(passed[name].shape) != shape:
                block = name.removeprefix("result ").strip()
                raise UserError(
                    f"block {block} returns a tensor of shape {tuple(passed[name].shape)}, "
                    f"but the plan expects {shape}",
                    remedy="name a larger module as the block: sizes that depend on values must not leave it",
                )


@dataclass(frozen=True)
class _RecordingRequest:
    """What the sections need from a micro-batch's recording.

    section_cases: for each section, the cases that may fit. labels: tensors to write programs for, None for
    all. last_call: number of the block call that the recording may end with, None for a whole recording.
    """

    pattern: frozenset[str]
    section_cases: Sequence[Sequence[SectionCase]] = ()
    labels: frozenset[str] | None = None
    last_call: int | None = None

    def cache_kind(self, samples: int) -> Hashable:
        """Key of the recordings of `samples` samples that can replace each other if their inputs agree."""
        return self.pattern, self.labels, self.last_call, samples


@dataclass(frozen=True)
class MicroBatchRecording:
    """The recording of a micro-batch, reduced to what sections need.

    case: name of the plan's case that it matches, "" if no section asked. known_shapes: by symbol key,
    tensors with a number of rows that depends on values. dependencies: inputs that decided the recording,
    None if it must not be cached.
    """

    case: str
    programs: Mapping[str, GlueProgram]
    known_shapes: Mapping[str, ShapeOnly]
    dependencies: RecordingDependencies | None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in its programs."""
        return sum(p.nbytes for p in self.programs.values())


class Rerecorder:
    """Records micro-batches and matches them with the plan's cases.

    `model` makes the model that is recorded, when the first micro-batch comes; `sections` makes the sections
    of this rank on it.
    """

    def __init__(
        self,
        plan: Plan,
        model: Callable[[], nn.Module],
        sections: Callable[[nn.Module], Sequence[SectionModule]],
    ) -> None:
        self.plan, self._build_model, self._build_sections = plan, model, sections
        self._predicates = {s.name: s.when for s in plan.sections}
        self._optional = frozenset(i.key for i in plan.inputs if i.optional)
        self._counted_symbols = [s for s in plan.symbols if is_tensor_label(s.key)]
        # These blocks always run: the numbers of rows of their results are asked for.
        self._calls_with_counted_rows = {
            call_of_label(s.key) for s in self._counted_symbols if s.key.startswith("result ")
        }
        self._known_symbols = [s for s in plan.symbols if not is_tensor_label(s.key)]
        self._cases = [RecordedCase(c) for c in plan.recorded]
        self._built: tuple[nn.Module, Sequence[SectionModule]] | None = None
        self._recorder: Recorder | None = None  # which copies the model
        self._cache = RecordingCache[MicroBatchRecording]()
        # By pattern: whether all whole recordings so far had no unused calls, so that forward's calls can be
        # numbered as the plan's are. A pattern without a whole recording is missing.
        self._has_planned_calls: dict[frozenset[str], bool] = {}
        self.recording_count = 0
        self.takes_any_float = False  # where model and plan run in wider floats than recorded

    def add_row_counts(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add the numbers of rows that depend on values to the batch of one sample, if the plan has such
        symbols."""
        if not self._counted_symbols:
            return batch
        pattern = self._optional.intersection(batch)
        keys = [s.key for s in self._counted_symbols]
        last_calls = [c.last_call_number(keys) for c in self._cases_of_pattern(pattern)]
        request = _RecordingRequest(pattern, (), frozenset(), max(last_calls, default=None))
        return {**batch, **self._recall_or_record(batch, 1, request).known_shapes}

    def add_recorded_glue(self, batch: dict[str, Any], samples: int, section: str = "") -> dict[str, Any]:
        """Add the recording to a micro-batch of `samples` samples if `section` ("": any section) needs one.

        Raises UserError if the micro-batch takes a path that the plan does not have.
        """
        request = self._recording_request(batch, section)
        if request is None:
            return batch
        start, before = time.monotonic_ns(), self.recording_count
        recording = self._recall_or_record(batch, samples, request)
        return self._attach_recording(
            batch, recording, TimeSpan(start, time.monotonic_ns()) if self.recording_count > before else None
        )

    def add_cached_glue(self, batch: dict[str, Any], samples: int, section: str) -> dict[str, Any] | None:
        """As `add_recorded_glue`, but return None if the micro-batch would have to be recorded."""
        request = self._recording_request(batch, section)
        if request is None:
            return batch
        recording = self._cache.get(request.cache_kind(samples), batch)
        return None if recording is None else self._attach_recording(batch, recording, None)

    def record_micro_batch(
        self, batch: dict[str, Any], samples: int, section: str
    ) -> tuple[MicroBatchRecording, TimeSpan]:
        """Record a micro-batch for another process, which passes the result to its own `cache_recording`."""
        request = self._recording_request(batch, section)
        assert request is not None
        start = time.monotonic_ns()
        return self._record_minimally(batch, samples, request), TimeSpan(start, time.monotonic_ns())

    def cache_recording(
        self,
        batch: dict[str, Any],
        samples: int,
        section: str,
        recording: MicroBatchRecording,
        spent: TimeSpan,
    ) -> dict[str, Any]:
        """Cache a recording that another process made, and add it to the micro-batch."""
        request = self._recording_request(batch, section)
        assert request is not None
        self._store_recording(request.cache_kind(samples), batch, recording)
        return self._attach_recording(batch, recording, spent)

    def _attach_recording(
        self, batch: dict[str, Any], recording: MicroBatchRecording, spent: TimeSpan | None
    ) -> dict[str, Any]:
        sources = next(c.sources for c in self._cases if c.name == recording.case)
        return {
            **batch,
            **recording.known_shapes,
            RECORDING_KEY: RecordedGlue(recording.case, recording.programs, sources, spent),
        }

    def _cases_of_pattern(self, pattern: frozenset[str]) -> list[RecordedCase]:
        return [c for c in self._cases if c.when == pattern]

    def _recording_request(self, batch: Mapping[str, Any], section: str) -> _RecordingRequest | None:
        """Return what `section` ("": any section) needs from a micro-batch's recording; None if it needs
        none."""
        pattern = self._optional.intersection(batch)
        cases = self._cases_of_pattern(pattern)
        sections = [s for s in self._ensure_model()[1] if section in ("", s.name)] if cases else []
        active = (s for s in sections if is_active(self._predicates[s.name], pattern))
        section_cases = [to_rerecord for s in active if (to_rerecord := s.cases_to_rerecord(batch))]
        if not section_cases:
            return None
        labels = frozenset(label for body in section_cases for case in body for label in case.recorded_labels)
        if any(case.needs_whole_recording for body in section_cases for case in body):
            return _RecordingRequest(pattern, section_cases, labels)
        wanted = [*labels, *(s.key for s in self._counted_symbols)]
        last_call = max(c.last_call_number(wanted) for c in cases)
        return _RecordingRequest(pattern, section_cases, labels, last_call)

    def _ensure_model(self) -> tuple[nn.Module, Sequence[SectionModule]]:
        if self._built is None:
            model = self._build_model()
            self._built = model, self._build_sections(model)
        return self._built

    def _ensure_recorder(self) -> Recorder:
        if self._recorder is None:
            blocks = (b for s in self.plan.sections for b in s.blocks)
            self._recorder = Recorder(self._ensure_model()[0], {*self.plan.fused, *blocks})
            self._recorder.keeps_scalars = any(c.keeps_scalars for c in self._cases)
            self._recorder.kept_tensors = [o.name for o in self.plan.outputs]
        return self._recorder

    def _recall_or_record(
        self, batch: Mapping[str, Any], samples: int, request: _RecordingRequest
    ) -> MicroBatchRecording:
        kind = request.cache_kind(samples)
        recording = self._cache.get(kind, batch)
        if recording is None:
            recording = self._record_minimally(batch, samples, request)
            self._store_recording(kind, batch, recording)
        return recording

    def _store_recording(
        self, kind: Hashable, batch: Mapping[str, Any], recording: MicroBatchRecording
    ) -> None:
        if recording.dependencies is not None:
            self._cache.put(kind, batch, recording, recording.dependencies, recording.nbytes)

    @torch.enable_grad()  # as captures are recorded; an evaluation may ask for it without gradients
    def _record_minimally(
        self, batch: Mapping[str, Any], samples: int, request: _RecordingRequest
    ) -> MicroBatchRecording:
        """Record as little of a micro-batch as its request needs."""
        cases = self._cases_of_pattern(request.pattern)
        numbered = self._has_planned_calls.get(request.pattern, False)
        rules: ResultShapes = {}
        if numbered:
            sizes = read_symbol_sizes(batch, self._known_symbols, samples)
            rules = common_shape_rules([c.shape_rules(sizes) for c in cases])
        rules = {call: shapes for call, shapes in rules.items() if call not in self._calls_with_counted_rows}
        # First try a recording that ends early. It may leave open which case the micro-batch follows, or may
        # end before a call if its rows are needed and this path reaches it later than the plan's cases do.
        # Then the whole forward is recorded.
        outline = self._record_outline(batch, samples, rules, request.last_call if numbered else None)
        if outline.recording.ends_early:
            if self._has_all_row_counts(outline, cases):
                recording = self._match_planned_case(outline, batch, samples, request)
                if recording is not None:
                    return recording
            outline = self._record_outline(batch, samples, rules, None)
        # The first whole recording of a pattern depends on more inputs than the short ones that follow. If it
        # were cached, it would add these inputs to the cache's keys for good, and later micro-batches would
        # rarely match.
        is_first = request.last_call is not None and request.pattern not in self._has_planned_calls
        self._has_planned_calls[request.pattern] = (
            not outline.recording.has_idle_calls and self._has_planned_calls.get(request.pattern, True)
        )
        recording = self._match_planned_case(outline, batch, samples, request)
        assert recording is not None
        return replace(recording, dependencies=None) if is_first else recording

    def _has_all_row_counts(self, outline: Outline, cases: Sequence[RecordedCase]) -> bool:
        """Whether a recording that ended early has all numbers of rows that any case of the plan has."""
        shapes = outline.known_shapes()
        expected = [s.key for s in self._counted_symbols if any(c.has_call_of(s.key) for c in cases)]
        return all(key in shapes for key in expected)

    def _record_outline(
        self, batch: Mapping[str, Any], samples: int, rules: Any, until: int | None
    ) -> Outline:
        self.recording_count += 1
        recording = fold_joins(self._ensure_recorder().record(batch, rules, until))
        loops = any(c.has_loops for c in self._cases_of_pattern(self._optional.intersection(batch)))
        return Outline.of_recording(
            roll_loss_loops(recording, samples == 1) if loops and not recording.ends_early else recording
        )

    def _match_planned_case(
        self, outline: Outline, batch: Mapping[str, Any], samples: int, request: _RecordingRequest
    ) -> MicroBatchRecording | None:
        """Match a recorded micro-batch with the plan's cases and write its programs.

        Returns None if the recording ended early and several cases that differ for the sections, or none,
        fit. Raises UserError if a whole recording fits no case.
        """
        shapes, ends_early = outline.known_shapes(), outline.recording.ends_early
        row_counts = {s.key: ShapeOnly(shapes[s.key]) for s in self._counted_symbols if s.key in shapes}
        programs, read_inputs = write_programs(outline, batch, request.labels)
        sizes = read_symbol_sizes({**batch, **row_counts}, self.plan.symbols, samples)
        name = ""
        if request.section_cases:
            cases = self._cases_of_pattern(request.pattern)
            mismatches = {c: c.find_mismatch(outline, programs, sizes, self.takes_any_float) for c in cases}
            fitting = [c for c, mismatch in mismatches.items() if mismatch is None]
            # Several cases may fit the part that was recorded. That does not matter as long as the sections
            # run the same bodies in all of them.
            paths = {c.section_paths(request.section_cases, request.labels) for c in fitting}
            if ends_early and len(paths) != 1:
                return None
            if not fitting:
                raise next(iter(mismatches.values())) or UserError(
                    "the plan has no case with the inputs of this micro-batch",
                    remedy="let dataset() show such samples earlier, or compile with more --stats-samples",
                )
            name = fitting[0].name
        dependencies = RecordingDependencies.of_recording(outline.recording, read_inputs)
        return MicroBatchRecording(name, programs, row_counts, dependencies)
