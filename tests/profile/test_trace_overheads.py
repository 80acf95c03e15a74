"""What a run's trace says of the time that ranks spend beside computing."""

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
from secc.runtime.plan.schema import Plan, load_plan
from tests.runtime.captioner_plans import APART, write_plan
from tests.simulate.test_simulator import cluster, trained, vlm

# of rank 0: an order of 80 us, two jobs of which each has 30 us beside its computation, a message of 7 us, an
# update
STEP_US = (
    ("PROGRAM", 0, 1000), ("F", 10, 400), ("SEND", 420, 7), ("B", 450, 533), ("GRADIENTS", 1000, 3), ("NORM", 1003, 20),
    ("TOTALS", 1023, 40), ("OPTIMIZER", 1063, 80), ("GAUGE", 1145, 5), ("METADATA", 1150, 60), ("PLAN", 1210, 80),
)  # fmt: skip
STEP_LENGTH_US = 1300


def plan(samples: int) -> Plan:
    return dataclasses.replace(trained(vlm(cluster=cluster(), mode="forward"), lm=1), global_batch=samples)


def events(rank: int, longer: dict[str, int]) -> list[dict[str, Any]]:
    """The same step again and again; kinds in `longer` last so much longer."""
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


def test_each_part_of_a_step_goes_where_it_belongs() -> None:
    """Rank 0 waits longer than rank 1 for what both do together, which is therefore not its overhead."""
    found = overheads_from_trace(events(0, {"TOTALS": 5}) + events(1, {"METADATA": 8}), plan(samples=4))
    rest = STEP_LENGTH_US - (1000 + 3 + 20 + 40 + 80 + 5 + 60 + 80) - 8
    assert found == Overheads(30_000, 7_000, 100_000 - 28, 20_000, (60 + 40 + rest) * 1000, "measured")


def test_overheads_are_given_at_the_speed_of_the_blocks() -> None:
    """Where steps ran while the processor took half as long as when blocks were timed, all takes twice as
    long beside these."""
    trained = StepTimes([1.0] * 4, [[9, 9, 10, 10], [9, 9, 10, 10]])
    assert scale_overheads(
        Overheads(1, 2, 3, 4, 5, "measured"), 20 / trained.mean_gauge_ns(warm_up=2)
    ) == Overheads(2, 4, 6, 8, 10, "measured")


def test_a_processor_of_two_speeds_has_their_mean() -> None:
    """Half of the time it takes three times as long: so much work takes one and a half times as long. Ranks
    count as they compute."""
    trained = StepTimes([1.0] * 4, [[9, 9, 10, 30], [9, 9, 30, 30]])
    assert trained.mean_gauge_ns(2, [1.0, 0.0]) == pytest.approx(15)
    assert (trained.mean_gauge_ns(2), trained.mean_gauge_ns(2, [3.0, 3.0])) == pytest.approx((20, 20))
    assert StepTimes([1.0], [[0], [0]]).mean_gauge_ns(0) == 0


@pytest.mark.slow
def test_a_real_run_has_all_of_them(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan", APART)
    trained = train_plan(
        tmp_path / "plan", 2, PROFILED_STEPS, tmp_path, ["--trace", str(tmp_path / "trace.json")]
    )
    found = overheads_from_trace(
        json.loads((tmp_path / "trace.json").read_text())["traceEvents"], load_plan(tmp_path / "plan")
    )
    assert min(found.job, found.message, found.sample, found.step) > 0 and found.label == "measured"
    assert len(trained.seconds) == PROFILED_STEPS and trained.mean_gauge_ns(WARMUP_STEPS) > 0
