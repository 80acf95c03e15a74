"""What sections take in a run, beside what the plan predicts, and whether that has moved so far that another
plan may win.

Each rank times its forwards and backwards. Their sums travel with the step's other sums, and rank 0 writes
them to `times.jsonl` in the log directory, one object for each step, with what the plan's costs say of the
same micro-batches and with the step's mix of samples:

    {"step": 7, "sections": {"teacher": {"forward_s": 1.9, "backward_s": 0.0, "predicted_forward_s": 1.2,
    "predicted_backward_s": 0.0}, …},
     "mix": [{"when": ["pixel_values"], "count": 11, "sizes": {"S": 8100, "n_pixel_values": 19}}, …]}

Seconds are sums over replicas, sizes are sums over samples. At the end of a run rank 0 sums up what they say
(`runtime/monitoring/run_summary.py`). Which other plan would be faster, and by how much, needs the solver:
`secc drift PLAN/ LOGDIR/` plans again with the measured times and the measured mix
(`secc/driver/replan_from_run.py`).
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import COMPUTE_KINDS, SampleMeta, Schedule, weight_backward_ns

SECTION_TIMES_FILE = "times.jsonl"
UNCOUNTED_STEPS = 2  # first steps of a run, which allocate and compile and do not count
MAX_KEPT_STEPS = 200  # steps behind them that count at most
SectionSeconds = dict[
    tuple[str, str], float
]  # seconds of a whole section's forwards ("F") and backwards ("B")


class SectionStopwatch:
    """Times the computations of one rank; on a GPU by events, which are read at the step's end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._events: list[tuple[tuple[str, str], torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def time_section(self, section: str, kind: str) -> Iterator[None]:
        """Time the body as a forward or, whatever its part, a backward of a section."""
        key = section, "F" if kind == "F" else "B"
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
        """Seconds since the last call; what was timed has ended."""
        for key, first, last in self._events:
            last.synchronize()
            self._seconds[key] += first.elapsed_time(last) / 1e3
        found, self._seconds, self._events = dict(self._seconds), defaultdict(float), []
        return found


def section_time_columns(plan: Plan) -> list[tuple[str, str, int]]:
    """(section, kind, ranks that compute it together) of the sums that a run keeps, in one order on all
    ranks."""
    return [
        (s.name, kind, s.mesh.tp)
        for s in plan.user_sections
        for kind in (("F",) if s.mode == "forward" else ("F", "B"))
    ]


def predict_section_seconds(plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule) -> SectionSeconds:
    """What the plan's costs say of all computations of a step, each replica counted once."""
    costs, found = PredictedCosts(plan, samples, schedule.own_samples), Counter[tuple[str, str]]()
    first = {s.name: set(s.mesh.ranks[:: s.mesh.tp]) for s in plan.sections}
    for section in plan.sections:
        forward, backward = costs.micro_batch_times(
            section, [m.samples for m in schedule.micro_batches[section.name]]
        )
        for rank in first[section.name]:
            for i in schedule.programs[rank]:
                if i.kind in COMPUTE_KINDS and i.section == section.name:
                    later = weight_backward_ns(section, backward[i.micro])
                    ns = {"F": forward[i.micro], "B": backward[i.micro] - later, "W": later}[i.kind]
                    found[section.user_section_name, "F" if i.kind == "F" else "B"] += ns
    return {key: ns / 1e9 for key, ns in found.items()}


class MeasuredStep(NamedTuple):
    """What a step took: seconds of all of it, of its sections' computations as measured and as predicted, and
    its samples."""

    seconds: float
    measured: SectionSeconds
    predicted: SectionSeconds
    samples: Sequence[SampleMeta]


class SectionTimesLog:
    """Writes `times.jsonl`, and keeps what the run's last steps took. Of rank 0."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self._plan, self._file = plan, (directory / SECTION_TIMES_FILE).open("a")
        self._first_step, self._steps = 0, deque[MeasuredStep](maxlen=MAX_KEPT_STEPS)
        self._latest_prediction: tuple[Schedule, SectionSeconds] | None = None

    @property
    def steps(self) -> Sequence[MeasuredStep]:
        """The last steps behind the first ones of the run."""
        return tuple(self._steps)

    def log_step(
        self,
        step: int,
        seconds: float,
        spent: SectionSeconds,
        samples: Sequence[SampleMeta],
        schedule: Schedule,
    ) -> None:
        """Write a step's times; `samples` are those that the schedule speaks of."""
        if (
            self._latest_prediction is None or self._latest_prediction[0] is not schedule
        ):  # steps of one schedule are alike
            self._latest_prediction = schedule, predict_section_seconds(self._plan, samples, schedule)
        expected = self._latest_prediction[1]
        self._first_step = self._first_step or step
        if step >= self._first_step + UNCOUNTED_STEPS:
            self._steps.append(MeasuredStep(seconds, spent, expected, samples[: schedule.own_samples]))
        sections: dict[str, dict[str, float]] = defaultdict(dict)
        for (name, kind), seconds in spent.items():
            word = {"F": "forward_s", "B": "backward_s"}[kind]
            sections[name] |= {word: seconds, f"predicted_{word}": expected.get((name, kind), 0.0)}
        told = {"step": step, "sections": sections, "mix": _sample_mix(samples[: schedule.own_samples])}
        self._file.write(json.dumps(told) + "\n")
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        self._file.close()


def _sample_mix(samples: Sequence[SampleMeta]) -> list[dict[str, Any]]:
    """Of each pattern, its samples and their sizes added up."""
    patterns: defaultdict[frozenset[str], list[SampleMeta]] = defaultdict(list)
    for s in samples:
        patterns[s.pattern].append(s)
    found: list[dict[str, Any]] = []
    for pattern, some in sorted(patterns.items(), key=lambda x: sorted(x[0])):
        total: Counter[str] = Counter()
        for s in some:
            total.update(s.sizes)
        found.append({"when": sorted(pattern), "count": len(some), "sizes": dict(total)})
    return found
