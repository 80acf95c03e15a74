"""Prices of dealt samples: the times of listed samples are those of the plan's expressions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from secc.alloc.problem.build_problem import build_problem
from secc.alloc.problem.micro_batch_times import (
    micro_batch_ns_of_samples,
    micro_batch_time_expressions,
    subgroup_costs,
    subgroup_loads,
)
from secc.alloc.problem.pins import parse_pins
from secc.alloc.problem.section_load import SectionLoad
from secc.runtime.plan.expr_eval import evaluate_expr
from tests.alloc.problem.test_row_parts import LONG, build_long_workload


@pytest.mark.parametrize("sharding", ["zero1", "zero3"])
def test_times_of_samples_are_those_of_the_expressions(sharding: str) -> None:
    work = build_long_workload(LONG)
    problem = build_problem(work, 8, "auto", parse_pins(["lm.cp=4", f"lm.sharding={sharding}"], ["lm"]))
    load, values = work.loads["lm"], {"B": 2, "S": 100}
    c = next(c for c in problem.sections["lm"] if c.dp > 1)
    dealing = replace(c, cp_per="micro_batch")
    rank = work.rank_load(load, c.shape)

    def sum_passes(times: tuple[str, str]) -> list[int]:
        return [sum(evaluate_expr(text, values) for text in times)]

    def times_of(own: SectionLoad) -> list[int]:
        return micro_batch_ns_of_samples(work, own, c, rank, lambda text: [evaluate_expr(text, values)])

    assert times_of(rank) == sum_passes(
        micro_batch_time_expressions(work, rank, c.dp, c.sharding, c.recompute)
    )
    subgroups = subgroup_costs(work, load, dealing)
    assert len(subgroups) == 2
    for (ranks, own, saved), subgroup in zip(subgroup_loads(work, load, dealing), subgroups, strict=True):
        assert (ranks, saved) == (subgroup.ranks, subgroup.cost.saved)
        assert times_of(own) == sum_passes((subgroup.cost.forward_ns, subgroup.cost.backward_ns))
