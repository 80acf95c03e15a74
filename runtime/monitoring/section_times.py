"""Measures what sections take in a run, next to what the plan predicts.

Each rank times its forwards and backwards. The times are summed over ranks together with the other sums of a
step, and rank 0 writes one object per step to `times.jsonl` in the log directory, with the plan's predictions
for the same micro-batches and the step's mix of samples:

    {"step": 7,
     "sections": {"teacher": {"forward_s": 1.9, "backward_s": 0.0,
                              "predicted_forward_s": 1.2, "predicted_backward_s": 0.0,
                              "wait_s": 0.1, "exposed_s": 0.3}, …},
     "mix": [{"when": ["pixel_values"], "count": 11, "sizes": {"S": 8100, "n_pixel_values": 19}}, …]}

Seconds are sums over replicas, sizes are sums over samples; `wait_s` is waiting for messages of other
sections, `exposed_s` waiting for collectives among the section's own ranks: inside its forwards and
backwards, which count it too, and around them for its gradients and parameters. At the end of a run rank 0
summarises the times (`secc.runtime.monitoring.run_summary`). To find a better plan for the measured times and
mix, run `secc drift PLAN/ LOGDIR/` (`secc.driver.replan_from_run`).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from secc.runtime.monitoring.json_lines import JsonLinesFile
from secc.runtime.plan.json_shapes import integer, items_of, mapping_of, number, record, text
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import COMPUTE_KINDS, SampleMeta, Schedule, weight_backward_ns

SECTION_TIMES_FILE = "times.jsonl"
UNCOUNTED_STEPS = 2  # the first steps of a run allocate memory and compile kernels
MAX_KEPT_STEPS = 200  # the summary is about the last ones of a run
_MIX = record({"when": items_of(text), "count": integer(0), "sizes": mapping_of(number())})
SECTION_TIMES_LINE = record(  # the shape of a line of the file
    {"step": integer(0), "sections": mapping_of(mapping_of(number())), "mix": items_of(_MIX)}
)
# (user's section, kind) -> seconds; kinds are F and B (forwards, backwards), R (waiting for messages), and
# waiting for collectives: C inside of F and B, E outside
SectionSeconds = dict[tuple[str, str], float]


class SectionStopwatch:
    """Times the computations of one rank; on a GPU with events, which are read at the end of a step."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_computing, self._is_paused = device, False, False
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._events: list[tuple[tuple[str, str], torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def time_section(self, section: str, kind: str) -> Iterator[None]:
        """Times the body as part of the forwards or, for kinds "B" and "W", of the backwards of a section;
        with kind "R", as waiting for a message."""
        outer, self._is_computing = self._is_computing, kind in COMPUTE_KINDS
        with self._time(section, "B" if kind == "W" else kind):
            yield
        self._is_computing = outer

    def time_collective(self, section: str) -> AbstractContextManager[None]:
        """Times the body as waiting for other ranks of a section: kind "C" inside a computation, "E" outside
        of one. On a GPU this is how long the computing stream waits, not how long the collective takes."""
        return self._time(section, "C" if self._is_computing else "E")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Times nothing in the body: it does not belong to the programs of training."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @contextmanager
    def _time(self, section: str, kind: str) -> Iterator[None]:
        key = section, kind
        if self._is_paused:
            yield
            return
        if self._device.type != "cuda":
            start = time.perf_counter()
            yield
            self._seconds[key] += time.perf_counter() - start
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._events.append((key, first, last))

    def take_seconds(self) -> SectionSeconds:
        """Returns the seconds since the last call, after waiting for the timed work."""
        for key, first, last in self._events:
            last.synchronize()
            self._seconds[key] += first.elapsed_time(last) / 1e3
        seconds, self._seconds, self._events = dict(self._seconds), defaultdict(float), []
        return seconds


def section_time_columns(plan: Plan) -> list[tuple[str, str, int]]:
    """Returns (section, kind, ranks of a replica) of the times that a run sums, in the same order on all
    ranks."""
    return [
        (s.name, kind, s.mesh.replica_size)
        for s in plan.user_sections
        for kind in ("FRCE" if s.mode == "forward" else "FBRCE")
    ]


def predict_section_seconds(plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule) -> SectionSeconds:
    """Returns the plan's prediction for all computations of a step; the ranks of a replica count once."""
    costs, total_ns = PredictedCosts(plan, samples, schedule.own_samples), Counter[tuple[str, str]]()
    first_ranks = {s.name: set(s.mesh.ranks[:: s.mesh.replica_size]) for s in plan.sections}
    for section in plan.sections:
        forward, backward = costs.micro_batch_times(
            section, [m.samples for m in schedule.micro_batches[section.name]]
        )
        for rank in first_ranks[section.name]:
            for i in schedule.programs[rank]:
                if i.kind in COMPUTE_KINDS and i.section == section.name:
                    whole = i.micro in schedule.whole_backwards.get(section.name, ())
                    weight_ns = weight_backward_ns(section, backward[i.micro], whole)
                    ns = {"F": forward[i.micro], "B": backward[i.micro] - weight_ns, "W": weight_ns}[i.kind]
                    total_ns[section.user_section_name, "F" if i.kind == "F" else "B"] += ns
    return {key: ns / 1e9 for key, ns in total_ns.items()}


class MeasuredStep(NamedTuple):
    """Times of one step: all of it, its sections as measured and as predicted (seconds), and its samples."""

    seconds: float
    measured: SectionSeconds
    predicted: SectionSeconds
    samples: Sequence[SampleMeta]


class SectionTimesLog:
    """Writes `times.jsonl` and keeps the last steps for the summary; used by rank 0."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self._plan, self._file = plan, JsonLinesFile(directory / SECTION_TIMES_FILE)
        self._first_step, self._steps = 0, deque[MeasuredStep](maxlen=MAX_KEPT_STEPS)
        self._latest_prediction: tuple[Schedule, SectionSeconds] | None = None

    @property
    def steps(self) -> Sequence[MeasuredStep]:
        """The last steps, without the uncounted first ones of the run."""
        return tuple(self._steps)

    def log_step(
        self,
        step: int,
        seconds: float,
        spent: SectionSeconds,
        samples: Sequence[SampleMeta],
        schedule: Schedule,
    ) -> None:
        """Writes the times of a step; `samples` are the samples that `schedule` refers to."""
        # A schedule object is reused for steps with equal sizes, and predictions depend on sizes alone.
        if self._latest_prediction is None or self._latest_prediction[0] is not schedule:
            self._latest_prediction = schedule, predict_section_seconds(self._plan, samples, schedule)
        expected = self._latest_prediction[1]
        self._first_step = self._first_step or step
        computing = {key: s for key, s in spent.items() if key[1] in "FB"}
        if step >= self._first_step + UNCOUNTED_STEPS:
            self._steps.append(MeasuredStep(seconds, computing, expected, samples[: schedule.own_samples]))
        sections: dict[str, dict[str, float]] = defaultdict(dict)
        for (name, kind), seconds in computing.items():
            field = {"F": "forward_s", "B": "backward_s"}[kind]
            sections[name] |= {field: seconds, f"predicted_{field}": expected.get((name, kind), 0.0)}
        for (name, kind), seconds in spent.items():
            if kind not in "FB":
                field = "wait_s" if kind == "R" else "exposed_s"
                sections[name][field] = sections[name].get(field, 0.0) + seconds
        entry = {"step": step, "sections": sections, "mix": _sample_mix(samples[: schedule.own_samples])}
        self._file.write(entry)


def _sample_mix(samples: Sequence[SampleMeta]) -> list[dict[str, Any]]:
    """Sums the samples' sizes by input pattern."""
    patterns: defaultdict[frozenset[str], list[SampleMeta]] = defaultdict(list)
    for s in samples:
        patterns[s.pattern].append(s)
    mix: list[dict[str, Any]] = []
    for pattern, members in sorted(patterns.items(), key=lambda x: sorted(x[0])):
        total: Counter[str] = Counter()
        for s in members:
            total.update(s.sizes)
        mix.append({"when": sorted(pattern), "count": len(members), "sizes": dict(total)})
    return mix
