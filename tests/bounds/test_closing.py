"""What a step takes at least after its last backwards: no schedule is shorter than bounds with it."""

from __future__ import annotations

import dataclasses
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from secc.bounds.bounds import schedule_bound
from secc.bounds.traffic import Traffic
from secc.bounds.work import BatchWork
from secc.cluster import parse_cluster
from secc.runtime.parameters.bucket_limits import BUCKET_BYTES
from secc.runtime.plan.schema import Cost, Edge, ModelRef, Plan, Section, SubgroupCost
from secc.runtime.schedule.scheduler import schedule_with_makespan
from secc.simulate.simulator import simulate
from tests.runtime.schedule.plan_strategies import (
    make_plan,
    make_sample,
    make_section,
    make_stages,
    stage_edges,
)

MS = 1_000_000


def trained(sections: list[Section], edges: list[Edge], buckets: int, sharding: str) -> Plan:
    """The plan with a number of buckets of parameters in each section, on GPUs."""
    sections = [dataclasses.replace(s, params=(f"{s.name}.w",), sharding=sharding) for s in sections]
    world = 1 + max(r for s in sections for r in s.mesh.ranks)
    table = {f"{s.name}.w": f"float32[{buckets * BUCKET_BYTES // 4}] train" for s in sections}
    cluster = json.loads(parse_cluster("3x8xH100").to_json())
    return dataclasses.replace(
        make_plan(sections, edges, world), model=ModelRef("", "", table), cluster=cluster
    )


def test_sums_take_longer_than_a_short_last_backward() -> None:
    """Forty buckets are summed from the last backward on, which takes 2 ms at most."""
    lm = make_section("lm", [0, 1], forward=f"{MS}*B", backward=f"{2 * MS}*B")
    plan = trained([lm], [], 40, "none")
    samples = [make_sample(i) for i in range(4)]
    (reduction,) = Traffic(plan).timed_reductions
    assert reduction.sum_ns > 3 * MS
    work = BatchWork(plan, samples)
    assert work.closing_ns["lm"] == reduction.sum_ns - 2 * MS
    step, _ = schedule_with_makespan(plan, samples)
    assert schedule_bound(plan, samples).ns <= simulate(plan, samples, step).end


def with_dealt_samples(section: Section, cost: Cost, limit: int) -> Section:
    """The section on two ranks in the place of each, which may compute different samples of up to `limit`
    bytes."""
    ranks = tuple(r for k in section.mesh.ranks for r in (2 * k, 2 * k + 1))
    return dataclasses.replace(
        section,
        mesh=dataclasses.replace(section.mesh, ranks=ranks, cp=2),
        cp_per="micro_batch",
        subgroups=(SubgroupCost(1, cost),),
        subgroup_bytes=limit,
    )


@st.composite
def closing_plans(draw: st.DrawFn) -> Plan:
    """Draws a section or stages, whole or split backwards, with up to 40 buckets in each."""
    count, dp, split = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.booleans())
    size, text = draw(st.integers(1, 3)), draw(st.sampled_from(["B", "B*S", "S", "7*B + B*S"]))
    ranks = [[d * count + i for d in range(dp)] for i in range(count)]
    forward, backward = f"{MS // 10}*({text})", f"{MS // 5}*({text})"
    if count == 1:
        sections = [make_section("lm", ranks[0], micro_batch=size, forward=forward, backward=backward)]
    else:
        sections = make_stages("lm", ranks, micro_batch=size, forward=forward, backward=backward)
        sections = [dataclasses.replace(s, weight_permille=500 if split else 0) for s in sections]
    if draw(st.booleans()):  # ranks of cp may compute samples of their own
        cost = Cost(f"{MS // 6}*({text})", f"{MS // 3}*({text})", saved="S")
        limit = draw(st.sampled_from([5, 12, 100]))
        sections = [with_dealt_samples(s, cost, limit) for s in sections]
    sharding = draw(st.sampled_from(["none", "zero1", "zero2"]))
    edges = stage_edges(sections) if count > 1 else []
    return trained(sections, edges, draw(st.integers(1, 40)), sharding)


@given(closing_plans(), st.lists(st.integers(1, 20), min_size=1, max_size=8))
@settings(max_examples=150, deadline=None)
def test_no_step_ends_before_its_sums(plan: Plan, lengths: list[int]) -> None:
    samples = [make_sample(i, length=n) for i, n in enumerate(lengths)]
    step, _ = schedule_with_makespan(plan, samples)
    assert schedule_bound(plan, samples).ns <= simulate(plan, samples, step).end
