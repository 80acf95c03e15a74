"""What the tables of a plan say about its sections."""

from __future__ import annotations

from dataclasses import replace

import pytest

from secc.report.plan_tables import describe_work
from tests.runtime.schedule.plan_strategies import make_edge, make_plan, make_section


@pytest.mark.parametrize(
    ("tower", "weights", "stopped"),
    [("forward", "frozen", False), ("train", "frozen", True), ("forward", "train", True)],
    ids=["all frozen", "trained tower", "own weights"],
)
def test_a_section_without_backward_says_why(tower: str, weights: str, stopped: bool) -> None:
    """A teacher in stages after a tower; the second stage has no edge from the tower."""
    stages = [
        replace(make_section(f"teacher.{i}", range(i, i + 1), mode="forward"), pipeline="teacher", stage=i)
        for i in (1, 2)
    ]
    stages[1] = replace(stages[1], params=("teacher.out",))
    sections = [make_section("tower", range(1), mode=tower), *stages]
    edges = [make_edge("tower", "teacher.1", grad=False), make_edge("teacher.1", "teacher.2", grad=False)]
    plan = make_plan(sections, edges, 3)
    plan = replace(plan, model=replace(plan.model, parameters={"teacher.out": f"float32[4] {weights}"}))
    text = describe_work(plan, plan.user_sections[1])
    assert text.startswith("forward only: ")
    assert ("the model stops gradients here" in text) == stopped
