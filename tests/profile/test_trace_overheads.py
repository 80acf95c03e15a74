"""Overheads of ranks, computed from the trace of a run."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from secc.cluster import Overheads
from secc.profile.measured_training import StepTimes, train_plan
from secc.profile.trace_overheads import PROFILED_STEPS, WARMUP_STEPS, overheads_from_trace, scale_overheads
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import Plan
from tests.runtime.captioner_plans import APART, write_plan
from tests.simulate.test_simulator import cluster, trained, vlm

# (kind, start, duration) of rank 0: scheduling takes 80 us, two jobs have 30 us of overhead each, a message
# takes 7 us, then an update.
STEP_US = (
    ("PROGRAM", 0, 1000),
    ("F", 10, 400),
    ("SEND", 420, 7),
    ("B", 450, 533),
    ("GRADIENTS", 1000, 3),
    ("NORM", 1003, 20),
    ("TOTALS", 1023, 40),
    ("OPTIMIZER", 1063, 80),
    ("GAUGE", 1145, 5),
    ("METADATA", 1150, 60),
    ("PLAN", 1210, 80),
)
STEP_LENGTH_US = 1300


def plan(samples: int) -> Plan:
    return dataclasses.replace(trained(vlm(cluster=cluster(), mode="forward"), lm=1), global_batch=samples)


def events(rank: int, longer: dict[str, int]) -> list[dict[str, Any]]:
    """The same step repeatedly; events of the kinds in `longer` last longer by that many microseconds."""
    return [
        {
            "ph": "X",
            "pid": rank,
            "tid": 0,
            "cat": kind,
            "ts": k * STEP_LENGTH_US + start,
            "dur": duration + longer.get(kind, 0),
        }
        for k, (kind, start, duration) in itertools.product(range(WARMUP_STEPS + 3), STEP_US)
    ]


def test_parts_of_a_step_are_attributed() -> None:
    """Rank 0 waits longer than rank 1 in synchronized phases, so its time does not count as overhead."""
    found = overheads_from_trace(events(0, {"TOTALS": 5}) + events(1, {"METADATA": 8}), plan(samples=4))
    rest = STEP_LENGTH_US - (1000 + 3 + 20 + 40 + 80 + 5 + 60 + 80) - 8
    assert found == Overheads(30_000, 7_000, 100_000 - 28, 20_000, (60 + 40 + rest) * 1000, "measured")


def test_overheads_are_scaled_to_the_speed_of_block_timings() -> None:
    """If the gauge took half as long during steps as when blocks were timed, overheads are doubled."""
    trained = StepTimes([1.0] * 4, [[9, 9, 10, 10], [9, 9, 10, 10]])
    assert scale_overheads(
        Overheads(1, 2, 3, 4, 5, "measured"), 20 / trained.mean_gauge_ns(warm_up=2)
    ) == Overheads(2, 4, 6, 8, 10, "measured")


def test_gauge_time_at_mean_speed() -> None:
    """Half of the time the gauge takes three times as long, so mean speed makes it take 1.5 times as long.
    Ranks are weighted by their computation."""
    trained = StepTimes([1.0] * 4, [[9, 9, 10, 30], [9, 9, 30, 30]])
    assert trained.mean_gauge_ns(2, [1.0, 0.0]) == pytest.approx(15)
    assert (trained.mean_gauge_ns(2), trained.mean_gauge_ns(2, [3.0, 3.0])) == pytest.approx((20, 20))
    assert StepTimes([1.0], [[0], [0]]).mean_gauge_ns(0) == 0


@pytest.mark.slow
def test_overheads_of_a_real_run(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan", APART)
    trained = train_plan(
        tmp_path / "plan", 2, PROFILED_STEPS, tmp_path, ["--trace", str(tmp_path / "trace.json")]
    )
    found = overheads_from_trace(
        json.loads((tmp_path / "trace.json").read_text())["traceEvents"], load_plan(tmp_path / "plan")
    )
    assert min(found.job, found.message, found.sample, found.step) > 0 and found.label == "measured"
    assert len(trained.seconds) == PROFILED_STEPS and trained.mean_gauge_ns(WARMUP_STEPS) > 0
