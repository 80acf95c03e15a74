"""The lines that `secc compile` ends with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from secc.report.plan_brief import fullest_rank_gib, plan_brief
from secc.report.plan_tables import plan_summary
from tests.runtime.schedule.plan_strategies import make_edge, make_plan, make_section

BATCHES = "15 s on average over 2 drawn batches, 10 to 20 s"


@pytest.mark.parametrize(("steps", "shown"), [([10.0, 20.0], True), ([10.0, 10.2], False), ([], False)])
def test_steps_of_drawn_batches_are_shown_where_the_batch_decides(steps: list[float], shown: bool) -> None:
    names = [f"encoder{i}" for i in range(6)]
    sections = [*(make_section(name, [i]) for i, name in enumerate(names)), make_section("lm", [6, 7])]
    plan = make_plan(sections, [make_edge(name, "lm") for name in names], 8)
    plan = replace(plan, solver={"simulated_s": 15.0, "batch_steps_s": steps})
    lines = plan_brief(plan, Path("plan"), ("of the samples, 3 were not read",))
    assert (f"  batches  {BATCHES}" in lines) == shown and len(lines) <= 10
    assert (("steps of batches", BATCHES) in plan_summary(plan)) == shown


def test_ways_that_were_dropped_on_the_first_batch_are_named() -> None:
    plan = make_plan([make_section("lm", [0, 1])], [], 8)
    ways = {"sections": {"lm": {"section": 2.0, "any": 1.5}}, "dropped": {"lm": {"one_or_all": 1.25}}}
    plan = replace(plan, solver={"dynamic_cp": ways, "dropped": {"lm": {"loop": 1.5, "v": 0.0}}})
    facts = dict(plan_summary(plan))
    assert facts["dynamic cp"].endswith(
        "lm, dropped on the first batch: one rank or all for a sample 25% longer"
    )
    assert (
        facts["stages"]
        == "lm, dropped on the first batch: two in a loop 50% longer, two in a V too much memory"
    )


def test_the_fullest_rank_is_that_of_the_shown_step_where_its_samples_need_more() -> None:
    plan = make_plan([replace(make_section("lm", [0, 1]), memory_gib=51.0)], [], 2)
    assert fullest_rank_gib(plan) == 51.0
    plan = replace(plan, prediction={"simulated": {"peak_memory_gib": 74.0}})
    assert fullest_rank_gib(plan) == 74.0
    plan = replace(plan, prediction={"simulated": {"peak_memory_gib": None}})
    assert fullest_rank_gib(plan) == 51.0
