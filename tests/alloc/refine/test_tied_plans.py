"""A plan that is hardly longer than the best one may become shorter when limits of samples are raised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from secc.alloc.refine.interleaved_stages import InterleavedPlan
from secc.alloc.refine.sample_limits import LimitedPlan
from secc.passes import allocate
from tests.alloc.test_allocate import allocate_model, graph_of


@pytest.mark.parametrize(("saved_permille", "raised"), [(10, 2), (30, 1)])
def test_limits_are_raised_in_plans_that_are_nearly_as_short(
    monkeypatch: pytest.MonkeyPatch, saved_permille: int, raised: int
) -> None:
    found = list[InterleavedPlan]()

    def shorten_plan(_: Any, own: InterleavedPlan, *__: Any) -> InterleavedPlan:
        """Another plan that is shorter before limits are raised."""
        ns = own.refined.evaluation.time_ns * (1000 - saved_permille) // 1000
        evaluation = replace(own.refined.evaluation, time_ns=ns)
        return replace(own, refined=replace(own.refined, evaluation=evaluation))

    def raise_limits(_: Any, solved: Any, plan: InterleavedPlan) -> LimitedPlan:
        """Only limits of the second plan save time."""
        found.append(plan)
        evaluation = replace(plan.refined.evaluation, time_ns=plan.refined.evaluation.time_ns // len(found))
        return LimitedPlan(plan.problem, replace(plan.refined, evaluation=evaluation), {})

    monkeypatch.setattr(allocate, "interleave_close_plans", shorten_plan)
    monkeypatch.setattr(allocate.Allocate, "_raise_sample_limits", raise_limits)
    graph = graph_of(allocate_model(cluster="1x4xH100", search=True))
    assert len(found) == raised
    shortest = min(p.refined.evaluation.time_ns // (i + 1) for i, p in enumerate(found))
    assert str(shortest / 10**9) in str(graph.attributes["solver"])
