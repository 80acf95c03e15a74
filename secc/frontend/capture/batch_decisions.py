"""Finds conditions that Python reads of a whole batch, which each micro-batch decides for itself.

Models skip a mask if `mask.all()`: a micro-batch may decide differently than the global batch and still
compute the same. Whether the loss depends on such a decision is shown numerically, on samples that decide
differently alone than together. They are searched in batches as large as the global batch, since the few
samples of other checks may not reach a threshold (`mask.sum() > 1000`). Decisions inside blocks are not
recorded; if a block reads values of its arguments, such a batch is compared as it is.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import sympy
from torch import fx

from secc.errors import UserError
from secc.frontend.capture.capture import Capture, CapturedCase
from secc.frontend.capture.control_flow_paths import ObservedRecording, find_first_difference, path_signature
from secc.frontend.dataset.survey import DatasetSurvey, InputPattern, sequence_length
from secc.ir.dialect.size_expr import size_symbol
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.batch_sizes import pad_batch, read_symbol_sizes
from secc.runtime.plan.sample_predicates import is_active
from secc.runtime.plan.schema import Plan
from secc.runtime.recorder import Recorder
from secc.runtime.recorder.fold_joins import fold_joins
from secc.runtime.recorder.nested_values import take_at_path
from secc.runtime.recorder.recorder import ResultShapeRules
from secc.runtime.rerecording.outline_case import ResultShapes, common_shape_rules
from secc.runtime.sections.base import SectionModule

MAX_BATCH_SAMPLES = 64
_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MAX_BATCH_SAMPLES)  # of samples that are compared
_FEW_COUNTS = (2, 4)
MAX_RECORDED_SAMPLES = 16  # where all glue is recorded, which is slower than evaluating guards

SampleList = list[dict[str, Any]]
ReadValue = Callable[[Mapping[str, Any]], object]
Item = TypeVar("Item")
Result = TypeVar("Result")


class DecisionCause(StrEnum):
    """What takes another way in a micro-batch than in the whole batch, as messages say it."""

    READ_VALUE = "the loss depends on a value that Python reads of the whole batch"
    SIZE = "the loss depends on what Python decides by the size of a batch"
    BLOCK_RESULT = "the loss depends on what a block computes of the whole batch"


class BatchDecisions:
    """Finds samples that decide differently alone than together, for the patterns of a plan's
    micro-batches."""

    def __init__(
        self,
        plan: Plan,
        user: UserModel,
        survey: DatasetSurvey,
        sections: Sequence[SectionModule],
        captured: Capture,
    ) -> None:
        self._plan, self._user, self._survey, self._sections = plan, user, survey, sections
        self._captured, self._follows_draws = captured, captured.recorder.follows_draws
        self._optional = {i.key for i in plan.inputs if i.optional}

    def find_differing_batches(
        self, pattern: InputPattern
    ) -> Iterator[tuple[DecisionCause, str, SampleList]]:
        """Yields, for each place where Python decides by the whole batch, what that is, its file:line and
        samples that decide differently alone."""
        samples = self._make_large_batches(pattern)
        for where, read in self._plan_guards(pattern):
            if (
                differing := next(
                    (few for pool in samples if (few := self._find_fewest_differing(pool, read))), None
                )
            ) is not None:
                yield DecisionCause.READ_VALUE, where, differing
        yield from self._find_other_path(pattern)
        if samples[0] and any(frozenset(c.when) == pattern and not c.spare for c in self._plan.recorded):
            yield from self._find_in_recordings(samples[0][:MAX_RECORDED_SAMPLES])
        if samples[0] and (place := self._find_value_reading_block(pattern)):
            larger = (p for p in self._survey.pattern_counts if pattern < p)
            if not any(self._find_value_reading_block(p) == place for p in larger):
                yield DecisionCause.BLOCK_RESULT, place, self._mix_patterns(pattern, samples[0])

    def _find_other_path(self, pattern: InputPattern) -> Iterator[tuple[DecisionCause, str, SampleList]]:
        """Yields a batch as large as a global one that takes another path than some of its samples, though
        Python reads the same conditions: sizes decide (`if len(x[mask]) > 100`), which no case is guarded by.
        The batch repeats few samples, so that it has their widths and conditions."""
        cases = [c for c in self._captured.cases if c.pattern == pattern and c.rerecord_reason is None]
        few = self._survey.compose_batches(pattern)[-1]
        count = min(self._plan.global_batch, MAX_BATCH_SAMPLES)
        if not cases or len(few) >= count or self._plan.checks.get("accepted"):
            return
        many = list(itertools.islice(itertools.cycle(few), count))
        try:
            recorder = self._prepare_recorder(self._follows_draws)
            batches = [self._user.collate(samples) for samples in (few, many)]
            recordings = [
                recorder.record(batch, self._known_shapes(cases, batch, len(samples)))
                for samples, batch in zip((few, many), batches, strict=True)
            ]
            if any(recording.has_idle_calls for recording in recordings):  # which cases do not count
                recordings = [recorder.record(batch) for batch in batches]
            small, large = (ObservedRecording(fold_joins(recording), {}) for recording in recordings)
        except (UserError, ValueError):
            return  # forward refuses these samples together, or left what cannot be copied on the model
        (path, conditions), (other, others) = (path_signature(o.recording) for o in (small, large))
        if path != other and conditions == others:
            place = find_first_difference([[small], [large]])
            yield DecisionCause.SIZE, place.where if place is not None else "", many

    def _known_shapes(
        self, cases: Sequence[CapturedCase], batch: Mapping[str, Any], samples: int
    ) -> ResultShapeRules:
        """Returns the shapes of blocks' results that follow from the sizes of a batch in all cases, so that
        blocks need not run for them."""
        known = [s for s in self._plan.symbols if s.kind != "data" and (not s.key or s.key in batch)]
        sizes = read_symbol_sizes(batch, known, samples)
        return common_shape_rules([_result_shapes(case.generic.graph, sizes) for case in cases])

    def _prepare_recorder(self, follows_draws: bool) -> Recorder:
        """Returns the recorder of the capture, which knows what blocks return, with the plan's blocks."""
        recorder = self._captured.recorder
        recorder.follows_draws = follows_draws
        recorder.use_blocks({*self._plan.fused, *(b for s in self._plan.sections for b in s.blocks)})
        recorder.keeps_scalars = recorder.shows_placed_rows = False
        return recorder

    def _mix_patterns(self, pattern: InputPattern, samples: SampleList) -> SampleList:
        """Returns as many samples, every second one of a smaller pattern where there are any: one batch, as
        runs have them, shows what a block decides of samples with and without optional inputs."""
        patterns = [p for p in self._survey.pattern_counts if p < pattern]
        smaller = [s for p in patterns for s in self._make_large_batches(p)[0]]
        if not smaller:
            return samples
        pairs = zip(samples, itertools.cycle(smaller), strict=False)
        return list(itertools.islice(itertools.chain.from_iterable(pairs), len(samples)))

    def _find_value_reading_block(self, pattern: InputPattern) -> str:
        """Returns the place of the first block that reads values of its arguments, since its decisions
        cannot be seen; "" if none does."""
        calls = (
            n
            for case in self._captured.cases
            if case.pattern == pattern
            for n in case.generic.graph.nodes
            if n.meta.get("reads")
        )
        return next((self._captured.blocks[str(n.target)].where for n in calls), "")

    def _make_large_batches(self, pattern: InputPattern) -> list[SampleList]:
        """Returns batches of the global batch's size: of samples as captures crop them, then of whole
        ones."""
        cropped = [s for batch in self._survey.compose_batches(pattern) for s in batch]
        count = max(2, min(self._plan.global_batch, MAX_BATCH_SAMPLES))
        pools = (
            [s for s in pool if self._pattern_of(self._user.collate([s])) == pattern]
            for pool in (cropped, self._survey.kept_samples(pattern))
        )
        return [list(itertools.islice(itertools.cycle(pool), count)) for pool in pools]

    def _pattern_of(self, batch: Mapping[str, Any]) -> InputPattern:
        return frozenset(self._optional & batch.keys())

    def _plan_guards(self, pattern: InputPattern) -> Iterator[tuple[str, ReadValue]]:
        """Yields place and method of each condition that compiled cases are valid under, each place once."""
        places_met: set[str] = set()
        working = [s for s in self._sections if is_active(self._plan.find_section(s.name).when, pattern)]
        for section in working:
            for case in section.cases:
                for name in case.guards if case.when == section.optional & pattern else ():
                    read: ReadValue = getattr(section, name)
                    if (where := (read.__doc__ or "").strip()) not in places_met:
                        places_met.add(where)
                        yield where, read

    def _find_fewest_differing(self, samples: SampleList, read: ReadValue) -> SampleList | None:
        """Returns the fewest leading samples with one that alone has another value than all together; None
        if there are none. Where each is padded to the width of all, the longest is the only one that may be
        without padding: then any sample may be the longest, with the shorter ones behind it."""
        if self._plan.widths == "own":
            return self._find_leading(samples, read, _COUNTS)
        longest_first = sorted(samples, key=sequence_length, reverse=True)
        others = (self._find_leading(longest_first[k:], read, _FEW_COUNTS) for k in range(1, len(samples)))
        return self._find_leading(longest_first, read, _COUNTS) or next(filter(None, others), None)

    def _find_leading(self, samples: SampleList, read: ReadValue, counts: Sequence[int]) -> SampleList | None:
        """Returns the fewest leading samples, as many as one of `counts`, with one that has another value in
        a micro-batch of its own than all together."""
        batches = _compute_for_each(samples[: max(counts)], lambda sample: self._user.collate([sample]))
        alone = _compute_for_each(batches, read) if self._plan.widths == "own" else []
        for count in (n for n in counts if n < 2 * len(samples)):
            together = self._user.collate(samples[:count])
            if self._plan.widths != "own":
                sizes = read_symbol_sizes(together, self._plan.symbols)
                widths = {s.name: sizes[s.name] for s in self._plan.symbols if s.is_padded}
                alone = [read(pad_batch(batch, self._plan.inputs, widths)) for batch in batches[:count]]
            value = read(together)
            if any(own != value for own in alone[:count]):
                return samples[:count]
        return None

    def _find_in_recordings(self, samples: SampleList) -> Iterator[tuple[DecisionCause, str, SampleList]]:
        """Yields the same for re-recorded glue: conditions, and numbers that are sums over the samples."""
        recorder = self._prepare_recorder(follows_draws=False)
        together = self._record_reads(recorder, samples)
        alone = _compute_for_each(samples, lambda sample: self._record_reads(recorder, [sample]))
        for where, value in together.items():
            parts = [reads[where] for reads in alone if where in reads]
            conditions = all(isinstance(v, bool) for v in (value, *parts))
            if any(p != value for p in parts) if conditions else len(parts) > 1 and value == sum(parts):
                yield DecisionCause.READ_VALUE, where, samples

    def _record_reads(self, recorder: Recorder, samples: SampleList) -> dict[str, Any]:
        """Returns the values that Python reads of a batch, for places where it reads one number."""
        values_by_place: dict[str, list[Any]] = {}
        for read in recorder.record(self._user.collate(samples)).reads:
            values_by_place.setdefault(read.where, []).append(read.value)
        return {
            where: values[0]
            for where, values in values_by_place.items()
            if len(values) == 1 and isinstance(values[0], (bool, int, float))
        }


def _compute_for_each(items: Sequence[Item], compute: Callable[[Item], Result]) -> list[Result]:
    """Returns what `compute` gives for each item, computed once for an item that is repeated."""
    results = {key: compute(item) for key, item in {id(item): item for item in items}.items()}
    return [results[id(item)] for item in items]


def _result_shapes(graph: fx.Graph, sizes: Mapping[str, int]) -> ResultShapes:
    """Returns the shapes of blocks' results in a generic graph at these sizes, by label of the call and
    access path; but for what values of the inputs decide."""
    calls, labels = Counter[str](), dict[fx.Node, str]()
    shapes = dict[str, dict[str, tuple[int, ...]]]()
    numbers = {size_symbol(name): sympy.Integer(size) for name, size in sizes.items()}
    for node in graph.nodes:
        if node.op == "call_module":
            path = str(node.target)
            labels[node] = f"{path}#{calls[path]}" if calls[path] else path
            calls[path] += 1
        elif node.target is take_at_path:
            call, place = node.meta["args"]
            dims = [sympy.sympify(dim).xreplace(numbers) for dim in node.meta["shape"]]
            if all(dim.is_Integer for dim in dims):
                shapes.setdefault(labels[call], {})[str(place)] = tuple(map(int, dims))
    return shapes
