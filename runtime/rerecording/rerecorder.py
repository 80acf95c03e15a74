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
from secc.runtime.plan.batch_sizes import sizes_of
from secc.runtime.plan.schema import Plan, is_label
from secc.runtime.recorder import Recorder
from secc.runtime.recorder.fold_joins import fold
from secc.runtime.recorder.glue_program import Program, input_of, programs
from secc.runtime.recorder.loss_loops import rolled
from secc.runtime.recorder.outline import Outline
from secc.runtime.rerecording.outline_case import RecordedCase, agreed, call_of
from secc.runtime.rerecording.recording_cache import Decides, Kept
from secc.runtime.sections.base import RECORDED, Case, Section


class Extent(NamedTuple):
    """Stands in a batch for a tensor of which only the shape is known."""

    shape: tuple[int, ...]


class Spent(NamedTuple):
    """When something was done, in the machine's monotonic nanoseconds."""

    start: int
    end: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end - self.start) / 1e9

    def shared(self, other: Spent) -> float:
        """Seconds that both took."""
        return max(0, min(self.end, other.end) - max(self.start, other.start)) / 1e9


@dataclass(frozen=True)
class Glue:
    """The recorded glue of one micro-batch, for a case of the plan. `spent`: when it was recorded, None where
    the cache had it."""

    case: str
    programs: Mapping[str, Program]
    planned: Mapping[str, Sequence[str]]
    spent: Spent | None

    def run(
        self, section: Section, batch: Mapping[str, Any], label: str, sources: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The tensor with this label; `sources` are those that the plan has for it."""
        given = dict(zip(self.planned[label], sources, strict=True))
        self._check(label, given)

        def source(name: str) -> torch.Tensor:
            if name in given:
                return given[name]
            kind, _, rest = name.partition(" ")
            return input_of(batch, rest) if kind == "input" else section.value(rest)

        return self.programs[label].run(source, section)

    def _check(self, label: str, given: Mapping[str, torch.Tensor]) -> None:
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
class _Want:
    """What sections want of a micro-batch's recording: labels, or with None all of them, and the call it may
    end with."""

    pattern: frozenset[str]
    bodies: Sequence[Sequence[Case]] = ()
    labels: frozenset[str] | None = None
    until: int | None = None

    def kind(self, samples: int) -> Hashable:
        """What recordings of so many samples that can stand for each other have in common."""
        return self.pattern, self.labels, self.until, samples


@dataclass(frozen=True)
class Found:
    """A recording as its micro-batch needs it. `case` has the name of the plan's, "" if none was asked for.

    `decides`: what decided it, None where it is not to be kept.
    """

    case: str
    programs: Mapping[str, Program]
    extents: Mapping[str, Extent]
    decides: Decides | None

    @property
    def nbytes(self) -> int:
        """The memory of its values."""
        return sum(p.nbytes for p in self.programs.values())


class Rerecorder:
    """Records micro-batches anew. `model` makes a model of its own when the first is recorded; `sections` are
    those that will run them."""

    def __init__(
        self, plan: Plan, model: Callable[[], nn.Module], sections: Callable[[nn.Module], Sequence[Section]]
    ) -> None:
        self.plan, self._make, self._make_sections = plan, model, sections
        self._when = {s.name: frozenset(s.when) for s in plan.sections}
        self._optional = frozenset(i.key for i in plan.inputs if i.optional)
        self._counted = [s for s in plan.symbols if is_label(s.key)]
        # These calls run, since rows of their results count.
        self._counting = {call_of(s.key) for s in self._counted if s.key.startswith("result ")}
        self._plain = [s for s in plan.symbols if not is_label(s.key)]
        self._cases = [RecordedCase(c) for c in plan.recorded]
        self._recorder: Recorder | None = None
        self._sections: Sequence[Section] = ()
        self._kept = Kept[Found]()
        self._numbered: dict[
            frozenset[str], bool
        ] = {}  # patterns: whether the plan's calls are the forward's
        self.recordings = 0

    def with_rows(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A sample's batch with the numbers of rows that values decide, if the plan has such symbols."""
        if not self._counted:
            return batch
        pattern = self._optional.intersection(batch)
        ends = [c.last(s.key for s in self._counted) for c in self._cases_of(pattern)]
        return {
            **batch,
            **self._found(batch, 1, _Want(pattern, (), frozenset(), max(ends, default=None))).extents,
        }

    def with_glue(self, batch: dict[str, Any], samples: int, section: str = "") -> dict[str, Any]:
        """A micro-batch of so many samples with its recording, where `section` ("": any) needs it. Raises
        UserError where it goes another way."""
        want = self._wanted(batch, section)
        if want is None:
            return batch
        start, before = time.monotonic_ns(), self.recordings
        found = self._found(batch, samples, want)
        return self._with(
            batch, found, Spent(start, time.monotonic_ns()) if self.recordings > before else None
        )

    def kept_glue(self, batch: dict[str, Any], samples: int, section: str) -> dict[str, Any] | None:
        """The same where nothing has to be recorded for it, else None."""
        want = self._wanted(batch, section)
        if want is None:
            return batch
        found = self._kept.get(want.kind(samples), batch)
        return None if found is None else self._with(batch, found, None)

    def record(self, batch: dict[str, Any], samples: int, section: str) -> tuple[Found, Spent]:
        """The recording of a micro-batch that another process asks for, and keeps."""
        want = self._wanted(batch, section)
        assert want is not None
        start = time.monotonic_ns()
        return self._recorded(batch, samples, want), Spent(start, time.monotonic_ns())

    def keep(
        self, batch: dict[str, Any], samples: int, section: str, found: Found, spent: Spent
    ) -> dict[str, Any]:
        """The micro-batch with the recording that another process made of it."""
        want = self._wanted(batch, section)
        assert want is not None
        self._keep(want.kind(samples), batch, found)
        return self._with(batch, found, spent)

    def _with(self, batch: dict[str, Any], found: Found, spent: Spent | None) -> dict[str, Any]:
        sources = next(c.sources for c in self._cases if c.name == found.case)
        return {**batch, **found.extents, RECORDED: Glue(found.case, found.programs, sources, spent)}

    def _cases_of(self, pattern: frozenset[str]) -> list[RecordedCase]:
        return [c for c in self._cases if c.when == pattern]

    def _wanted(self, batch: Mapping[str, Any], section: str) -> _Want | None:
        """What a section ("": any) wants of a micro-batch's recording, None if it wants none."""
        pattern = self._optional.intersection(batch)
        cases = self._cases_of(pattern)
        asked = [s for s in self._ready() if section in ("", s.name)] if cases else []
        active = (s for s in asked if not self._when[s.name] or self._when[s.name] & pattern)
        bodies = [found for s in active if (found := s.anew(batch))]
        if not bodies:
            return None
        labels = frozenset(label for body in bodies for case in body for label in case.takes)
        if any(case.whole for body in bodies for case in body):
            return _Want(pattern, bodies, labels)
        return _Want(
            pattern, bodies, labels, max(c.last([*labels, *(s.key for s in self._counted)]) for c in cases)
        )

    def _ready(self) -> Sequence[Section]:
        if self._recorder is None:
            model = self._make()
            self._sections = self._make_sections(model)
            self._recorder = Recorder(
                model, {*self.plan.fused, *(b for s in self.plan.sections for b in s.blocks)}
            )
        return self._sections

    def _found(self, batch: Mapping[str, Any], samples: int, want: _Want) -> Found:
        kind = want.kind(samples)
        found = self._kept.get(kind, batch)
        if found is None:
            found = self._recorded(batch, samples, want)
            self._keep(kind, batch, found)
        return found

    def _keep(self, kind: Hashable, batch: Mapping[str, Any], found: Found) -> None:
        if found.decides is not None:
            self._kept.put(kind, batch, found, found.decides, found.nbytes)

    def _recorded(self, batch: Mapping[str, Any], samples: int, want: _Want) -> Found:
        """Record as little of a micro-batch as will do."""
        self._ready()
        cases = self._cases_of(want.pattern)
        numbered = self._numbered.get(want.pattern, False)
        rules = agreed([c.rules(sizes_of(batch, self._plain, samples)) for c in cases]) if numbered else {}
        rules = {call: shapes for call, shapes in rules.items() if call not in self._counting}
        outline = self._outline(batch, rules, want.until if numbered else None)
        if outline.recording.ended:
            found = self._fitting(outline, batch, samples, want) if self._tells_rows(outline, cases) else None
            if found is not None:
                return found
            outline = self._outline(batch, rules, None)
        first = (
            want.until is not None and want.pattern not in self._numbered
        )  # more decides it than what is recorded next
        self._numbered[want.pattern] = not outline.recording.idle and self._numbered.get(want.pattern, True)
        found = self._fitting(outline, batch, samples, want)
        assert found is not None
        return replace(found, decides=None) if first else found

    def _tells_rows(self, outline: Outline, cases: Sequence[RecordedCase]) -> bool:
        """Whether a recording that ended early has all numbers of rows that there are in a case of the
        plan."""
        shapes = outline.shapes()
        return all(s.key in shapes or not any(c.has(s.key) for c in cases) for s in self._counted)

    def _outline(self, batch: Mapping[str, Any], rules: Any, until: int | None) -> Outline:
        assert self._recorder is not None
        self.recordings += 1
        recording = fold(self._recorder.record(batch, rules, until))
        loops = any(c.has_loops for c in self._cases_of(self._optional.intersection(batch)))
        return Outline.of(rolled(recording) if loops and not recording.ended else recording)

    def _fitting(self, outline: Outline, batch: Mapping[str, Any], samples: int, want: _Want) -> Found | None:
        """What is found of a micro-batch that goes the way of a case of the plan. Of a recording that ended
        early None if it is not clear which, of a whole one UserError if it goes none's."""
        shapes, ended = outline.shapes(), outline.recording.ended
        extents = {s.key: Extent(shapes[s.key]) for s in self._counted if s.key in shapes}
        made, read = programs(outline, batch, want.labels)
        sizes = sizes_of({**batch, **extents}, self.plan.symbols, samples)
        name = ""
        if want.bodies:
            problems = {c: c.problem(outline, made, sizes) for c in self._cases_of(want.pattern)}
            fitting = [c for c, problem in problems.items() if problem is None]
            if ended and len({c.way(want.bodies, want.labels) for c in fitting}) != 1:
                return None
            if not fitting:
                raise next(iter(problems.values())) or UserError("no case of the plan fits")
            name = fitting[0].name
        return Found(name, made, extents, Decides.of(outline.recording, read))
