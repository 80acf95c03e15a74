"""The simulated step of a fresh plan in the report, plan.json and trace.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from secc.cli import main
from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.step_preview import (
    MAX_DRAWN_COMPUTATIONS,
    count_computations,
    preview_step,
    simulate_drawn_step,
)
from secc.ir.analysis.sample_sizes import SHOWN_BATCH
from secc.ir.dialect.ops import graph_of
from secc.runtime.monitoring.run_summary import SAMPLE_SECONDS_KEY

MODELS = Path(__file__).parents[1] / "models"


def compiled(name: str, **options: str | int) -> CompiledPlan:
    return compile_model(MODELS / name, CompileOptions(cluster="local:2", **{"global_batch": 8, **options}))  # pyright: ignore[reportArgumentType]


def test_a_plan_directory_has_a_drawn_step_and_its_trace(tmp_path: Path):
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "compile",
                str(MODELS / "two_modalities.py"),
                "-o",
                str(tmp_path / "plan"),
                "--global-batch",
                "8",
                "--no-check",
            ]
        )
    assert not ended.value.code
    prediction = json.loads((tmp_path / "plan" / "plan.json").read_text())["prediction"]
    busy = {name: share["busy"] for name, share in prediction["sections"].items()}
    assert all(0 < b <= 1 for b in busy.values())
    assert prediction[SAMPLE_SECONDS_KEY].keys() == busy.keys() and all(
        seconds > 0 for seconds in prediction[SAMPLE_SECONDS_KEY].values()
    )
    assert prediction["simulated"]["step_time_s"] >= prediction["simulated"]["schedule_bound_s"] > 0
    events = json.loads((tmp_path / "plan" / "trace.json").read_text())["traceEvents"]
    assert {e["args"]["section"] for e in events if e["ph"] == "X" and e["args"]["kind"] in "FB"} == set(busy)
    assert "<svg" in (tmp_path / "plan" / "report.html").read_text()


def test_the_step_is_that_of_the_batch_closest_to_the_mean_of_the_search():
    made = compiled("two_modalities.py")
    graph = graph_of(made.module)
    steps = set[tuple[tuple[tuple[str, int], ...], ...]]()
    for batch in range(3):
        plan = replace(made.plan, solver={**made.plan.solver, SHOWN_BATCH: batch})
        step = simulate_drawn_step(plan, graph)
        assert step is not None
        steps.add(tuple(tuple(s.sizes.items()) for s in step.samples))
    assert len(steps) == 3 and 0 <= made.plan.solver[SHOWN_BATCH] < 4


def test_sizes_that_values_decide_are_estimated_from_captures():
    seen = preview_step(compiled("counts_rows.py"))
    assert seen.figures and seen.plan.predicted_step_s == seen.plan.prediction["simulated"]["step_time_s"]


def test_steps_of_very_many_computations_are_left_to_simulate(monkeypatch: pytest.MonkeyPatch):
    made = compiled("vocabulary.py")
    assert 0 < sum(count_computations(made.plan, s) for s in made.plan.sections) < MAX_DRAWN_COMPUTATIONS
    whole = preview_step(made)
    monkeypatch.setattr("secc.driver.step_preview.MAX_DRAWN_COMPUTATIONS", 1)
    undrawn = preview_step(made)
    assert whole.figures and (undrawn.figures, undrawn.files) == (None, {})
    assert undrawn.plan.prediction == whole.plan.prediction and "simulated" in whole.plan.prediction
    monkeypatch.setattr("secc.driver.step_preview.MAX_SIMULATED_COMPUTATIONS", 1)
    seen = preview_step(made)
    assert (seen.figures, seen.files) == (None, {})
    assert seen.plan.prediction.keys() - made.plan.prediction.keys() == {SAMPLE_SECONDS_KEY}
