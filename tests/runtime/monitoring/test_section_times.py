"""The closing lines of a run: measured and predicted step time, and warnings that the plan no longer fits."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch

from secc.runtime.host.cpu_cores import available_cores
from secc.runtime.monitoring.run_summary import (
    SAMPLE_SECONDS_KEY,
    drift_warning,
    predict_sample_seconds,
    summary_lines,
)
from secc.runtime.monitoring.section_times import (
    SECTION_TIMES_FILE,
    UNCOUNTED_STEPS,
    MeasuredStep,
    SectionStopwatch,
    SectionTimesLog,
    predict_section_seconds,
)
from secc.runtime.monitoring.throughput import section_shares
from secc.runtime.schedule.scheduler import schedule_batch
from tests.runtime.schedule.plan_strategies import (
    make_edge,
    make_plan,
    make_sample,
    make_section,
    make_stages,
)

SECTIONS = [
    make_section("vision", [0], forward="100*S", backward="200*S"),
    *make_stages("lm", [[1], [2]], forward="100*S", backward="200*S"),
]
PLAN = make_plan(SECTIONS, [make_edge("vision", "lm_0")], 3)
SAMPLES = [make_sample(i, length=10 + i) for i in range(4)]
PREDICTED = predict_section_seconds(PLAN, SAMPLES, schedule_batch(PLAN, SAMPLES))


def times(factor: float) -> dict[tuple[str, str], float]:
    """Returns the predicted times, with those of the encoder scaled by `factor`."""
    return {
        (name, kind): seconds * (factor if name == "vision" else 1.0)
        for (name, kind), seconds in PREDICTED.items()
    }


def test_predicted_times_include_all_stages_and_replicas() -> None:
    assert PREDICTED == {
        ("vision", "F"): 4600e-9,
        ("vision", "B"): 9200e-9,
        ("lm", "F"): 9200e-9,
        ("lm", "B"): 18400e-9,
    }


def taken(factor: float) -> MeasuredStep:
    return MeasuredStep(0.5, times(factor), PREDICTED, SAMPLES)


def test_no_warning_if_all_sections_scale_together() -> None:
    for slower in (1.0, 5.0):
        steps = [MeasuredStep(0.5, {key: slower * s for key, s in PREDICTED.items()}, PREDICTED, SAMPLES)] * 3
        assert list(drift_warning(PLAN, steps, Path("plan/logs"))) == []


def test_slow_section_is_named_with_the_possible_gain() -> None:
    lines = list(drift_warning(PLAN, [taken(4.0)] * 3, Path("plan/logs")))
    assert "vision are busy 2.00 times as long" in lines[0]
    assert "a plan for these times could be up to 50% faster" in lines[0]
    assert lines[1].endswith("secc drift plan plan/logs")


def test_one_slow_step_is_no_drift() -> None:
    assert list(drift_warning(PLAN, [taken(9.0), taken(1.0), taken(1.0)], Path("logs"))) == []


@pytest.mark.parametrize(("with_images", "before", "said"), [(4, 4, False), (4, 1, True), (4, 3, True)])
def test_another_mix_of_samples_is_reported(with_images: int, before: int, said: bool) -> None:
    """Times are as predicted for these samples, but the plan expected fewer images."""
    vision = make_section("vision", [0], when=("images",), forward="400*I", backward="800*I")
    lm = make_section("lm", [1], forward="100*S", backward="200*S")
    made = make_plan([vision, lm], [make_edge("vision", "lm")], 2)

    def batch(count: int):
        return [make_sample(i, *(["images"] if i < count else []), images=10, length=10) for i in range(4)]

    made = dataclasses.replace(
        made, prediction={SAMPLE_SECONDS_KEY: predict_sample_seconds(made, batch(before))}
    )
    expected = predict_section_seconds(made, batch(with_images), schedule_batch(made, batch(with_images)))
    found = list(
        drift_warning(made, [MeasuredStep(0.5, expected, expected, batch(with_images))] * 3, Path("logs"))
    )
    assert bool(found) is said
    assert not said or ("the ranks of vision" in found[0] and "a plan for these samples could be" in found[0])


def test_noisy_steps_are_no_drift() -> None:
    """The median is slightly above the prediction, but by less than the steps scatter."""
    assert list(drift_warning(PLAN, [taken(1.2)] * 5, Path("logs"))) != []
    assert list(drift_warning(PLAN, [taken(f) for f in (0.1, 0.6, 1.2, 2.5, 4.0)], Path("logs"))) == []


def test_summary_has_measured_and_predicted_step_time() -> None:
    plan = dataclasses.replace(PLAN, prediction={"step_time_s": 0.4, "simulated": {"step_time_s": 0.45}})
    assert list(summary_lines(plan, [taken(1.0)] * 3, Path("logs"))) == [
        "0.5 s a step, the median of the last 3; predicted 0.45 s (1.11 times as long)"
    ]
    assert list(summary_lines(PLAN, [taken(1.0)], Path("logs"))) == ["0.5 s a step, the median of the last 1"]
    assert list(summary_lines(PLAN, [], Path("logs"))) == []


def test_a_wrong_prediction_is_explained() -> None:
    plan = dataclasses.replace(PLAN, prediction={"step_time_s": 0.1})
    first, costs, cores = summary_lines(plan, [taken(1.0)] * 3, Path("logs"), processes=available_cores() + 1)
    assert "5.00 times as long" in first and "default costs: secc profile" in costs
    assert f"share {available_cores()} cores" in cores
    measured = tuple(
        dataclasses.replace(s, cost=dataclasses.replace(s.cost, label="measured")) for s in plan.sections
    )
    plan = dataclasses.replace(plan, sections=measured)
    assert len(list(summary_lines(plan, [taken(1.0)] * 3, Path("logs"), processes=1))) == 1


def test_first_steps_are_not_counted(tmp_path: Path) -> None:
    log, waits = SectionTimesLog(tmp_path, PLAN), {("lm", "R"): 0.25, ("lm", "C"): 0.5, ("lm", "E"): 0.125}
    for step in range(UNCOUNTED_STEPS + 2):
        log.log_step(
            7 + step,
            0.5,
            times(9.0 if step < UNCOUNTED_STEPS else 1.0) | waits,
            SAMPLES,
            schedule_batch(PLAN, SAMPLES),
        )
    rows = [json.loads(line) for line in (tmp_path / SECTION_TIMES_FILE).read_text().splitlines()]
    assert log.steps == (taken(1.0),) * 2 and len(rows) == UNCOUNTED_STEPS + 2
    assert rows[0]["mix"] == [{"when": [], "count": 4, "sizes": {"B": 4, "S": 46, "I": 0}}]
    assert rows[0]["sections"]["lm"]["predicted_backward_s"] == PREDICTED["lm", "B"]
    assert rows[0]["sections"]["lm"]["wait_s"] == 0.25
    assert rows[0]["sections"]["lm"]["exposed_s"] == 0.625


def test_shares_of_sections_count_replicas() -> None:
    section = PLAN.user_sections[0]
    replicas = len(section.mesh.ranks) / section.mesh.replica_size
    kinds = {"F": 1.0, "B": 2.0, "R": 0.5, "C": 1.0, "E": 0.5}
    shares = section_shares(PLAN, {(section.name, k): s * replicas for k, s in kinds.items()}, 4.0)
    expected = {"busy": 0.5, "wait": 0.125, "exposed_communication": 0.375}
    for name, share in expected.items():
        assert shares[f"section/{section.name}/{name}"] == share


def test_collectives_count_inside_of_computations_and_outside() -> None:
    stopwatch = SectionStopwatch(torch.device("cpu"))
    for kind in "FBWR":
        with stopwatch.time_section("lm", kind), stopwatch.time_collective("lm"):
            time.sleep(0.001)
    with stopwatch.paused(), stopwatch.time_section("lm", "F"), stopwatch.time_collective("vision"):
        pass
    seconds = stopwatch.take_seconds()
    assert {key for key, s in seconds.items() if s > 0} == {("lm", kind) for kind in "FBRCE"}
    assert seconds["lm", "C"] >= 0.003 and seconds["lm", "F"] + seconds["lm", "B"] >= seconds["lm", "C"]
    assert 0.001 <= seconds["lm", "E"] <= seconds["lm", "R"] and stopwatch.take_seconds() == {}
