"""Reads what a run has logged, for the report: losses, times of steps and sections, and waits.

`metrics.jsonl` has a line for each step and evaluation, `times.jsonl` the times of sections. A resumed run
appends; a step that was trained again counts with its last line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Any

from secc.errors import UserError
from secc.runtime.monitoring.json_lines import read_lines
from secc.runtime.monitoring.metrics import METRICS_FILE, METRICS_LINE
from secc.runtime.monitoring.section_times import (
    MAX_KEPT_STEPS,
    SECTION_TIMES_FILE,
    SECTION_TIMES_LINE,
    UNCOUNTED_STEPS,
)
from secc.runtime.plan.schema import Plan

MAX_POINTS = 1000  # of a curve; of longer runs, neighbouring steps share a point
Point = tuple[float, float, float, float]  # step, mean, smallest and largest value around it
_REMEDY = "name the --log-dir of a run of this plan"


@dataclass(frozen=True)
class SectionTimes:
    """Mean seconds of a section in a step, summed over replicas, as measured and as predicted, and the mean
    shares of a step in which its ranks wait for messages and for collectives among themselves (None in logs
    without them)."""

    name: str
    measured_s: float
    predicted_s: float
    wait_share: float | None
    exposed_share: float | None


@dataclass(frozen=True)
class RunLog:
    """A run: the number of its steps, curves of loss and of seconds, losses of evaluations by set, and
    sections. `median_s`: the median step without the first ones."""

    steps: int
    losses: tuple[Point, ...]
    seconds: tuple[Point, ...]
    evaluations: dict[str, tuple[Point, ...]]
    first_loss: float
    last_loss: float
    median_s: float
    sections: tuple[SectionTimes, ...]


def read_run_log(plan: Plan, log_dir: Path) -> RunLog:
    """Reads the log directory of a run. Raises UserError if it has no steps, and for lines of another shape
    than a run writes."""
    path = log_dir / METRICS_FILE
    lines = list(read_lines(path, METRICS_LINE, _REMEDY))
    steps = {line["step"]: line for line in lines if "eval" not in line and _has_numbers(line)}
    if not steps:
        raise UserError("expected a run's metrics, found no steps", str(path), _REMEDY)
    rows = [steps[number] for number in sorted(steps)]
    evaluations: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for line in lines:
        if "eval" in line and _has_numbers(line):
            evaluations[line["eval"]][line["step"]] = float(line["loss"])
    counted = rows[UNCOUNTED_STEPS:] or rows
    return RunLog(
        len(rows),
        make_curve([(line["step"], line["loss"]) for line in rows]),
        make_curve([(line["step"], line["step_time_s"]) for line in rows]),
        {name: make_curve(sorted(values.items())) for name, values in evaluations.items()},
        float(rows[0]["loss"]),
        float(rows[-1]["loss"]),
        median(float(line["step_time_s"]) for line in counted[-MAX_KEPT_STEPS:]),
        tuple(_section_times(plan, log_dir, steps)),
    )


def make_curve(values: Sequence[tuple[float, float]]) -> tuple[Point, ...]:
    """Returns at most MAX_POINTS points of a curve, each the mean of neighbours with their extremes.
    Values that are no numbers are left out."""
    values = [(step, value) for step, value in values if isfinite(value)]
    size = -(-len(values) // MAX_POINTS) or 1
    buckets = (values[i : i + size] for i in range(0, len(values), size))
    return tuple(
        (float(bucket[-1][0]), fmean(v for _, v in bucket), *_extremes([v for _, v in bucket]))
        for bucket in buckets
    )


def _extremes(values: Sequence[float]) -> tuple[float, float]:
    return float(min(values)), float(max(values))


def _has_numbers(line: dict[str, Any]) -> bool:
    return all(line.get(key) is not None for key in ("loss", "step_time_s"))


def _section_times(plan: Plan, log_dir: Path, steps: dict[int, dict[str, Any]]) -> Iterator[SectionTimes]:
    """Yields means over the last steps of the log of section times; nothing if there is none."""
    path = log_dir / SECTION_TIMES_FILE
    lines = list(read_lines(path, SECTION_TIMES_LINE, _REMEDY)) if path.exists() else []
    logged = lines[UNCOUNTED_STEPS:][-MAX_KEPT_STEPS:]
    for s in plan.user_sections:
        own = [(line["step"], line["sections"][s.name]) for line in logged if s.name in line["sections"]]
        if not own:
            continue
        measured, predicted = (
            fmean(sum(t.get(f"{prefix}{way}_s", 0.0) for way in ("forward", "backward")) for _, t in own)
            for prefix in ("", "predicted_")
        )
        replicas = len(s.mesh.ranks) / s.mesh.replica_size
        wait, exposed = (
            [
                t[field] / (replicas * float(steps[step]["step_time_s"]))
                for step, t in own
                if field in t and step in steps and steps[step]["step_time_s"] > 0
            ]
            for field in ("wait_s", "exposed_s")
        )
        yield SectionTimes(
            s.name, measured, predicted, fmean(wait) if wait else None, fmean(exposed) if exposed else None
        )
