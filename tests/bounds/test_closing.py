"""What a step takes at least after its last backwards: no schedule is shorter than bounds with it."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secc.bounds.additive import is_subadditive
from secc.bounds.bounds import micro_batch_bound_of_work, plan_bound, schedule_bound
from secc.bounds.traffic import Traffic
from secc.bounds.work import BatchWork
from secc.cluster import parse_cluster
from secc.runtime.parameters.bucket_limits import BUCKET_BYTES
from secc.runtime.plan.schema import Cost, Edge, ModelRef, Plan, Section, SubgroupCost
from secc.runtime.plan.step_program import SampleMeta
from secc.runtime.schedule.scheduler import schedule_with_makespan
from secc.simulate.simulator import simulate
from tests.bounds.test_allocations import move_to_groups, replica_ranks
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
    size, text = (
        draw(st.integers(1, 3)),
        draw(st.sampled_from(["B", "B*S", "S", "7*B + B*S", "I", "5 + 3*I"])),
    )
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
    if draw(st.booleans()):  # the room limits micro-batches; in 15 bytes some cannot be split
        room = draw(st.sampled_from([15, 40, 200]))
        sections = [with_bytes(s, room) for s in sections]
    sharding = draw(st.sampled_from(["none", "zero1", "zero2"]))
    edges = stage_edges(sections) if count > 1 else []
    return trained(sections, edges, draw(st.sampled_from([1, 10, 40, 200])), sharding)


def with_bytes(section: Section, room: int) -> Section:
    """The section with 2 bytes for each row of a sample, another one between the parts of a split
    backward, and room for so many bytes."""
    subgroups = tuple(
        dataclasses.replace(s, cost=dataclasses.replace(s.cost, saved="4*I", kept_between="2*I"))
        for s in section.subgroups
    )
    cost = dataclasses.replace(section.cost, saved="2*I", kept_between="I")
    return dataclasses.replace(section, cost=cost, subgroups=subgroups, room_bytes=room, in_flight=2)


def samples_with_rows(lengths: list[int]) -> list[SampleMeta]:
    """Samples of these lengths, with as many rows of their own."""
    return [SampleMeta(i, frozenset(), {"B": 1, "S": n, "I": n}) for i, n in enumerate(lengths)]


@given(closing_plans(), st.lists(st.integers(1, 20), min_size=1, max_size=8))
@settings(max_examples=150, deadline=None)
def test_no_step_ends_before_its_sums(plan: Plan, lengths: list[int]) -> None:
    samples = samples_with_rows(lengths)
    step, _ = schedule_with_makespan(plan, samples)
    assert schedule_bound(plan, samples).ns <= simulate(plan, samples, step).end


@given(closing_plans(), st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_no_number_of_replicas_ends_before_its_sums(plan: Plan, lengths: list[int], replicas: int) -> None:
    samples = samples_with_rows(lengths)
    unit = replica_ranks(plan.sections)
    world = max(len(plan.sections[0].mesh.ranks) * len(plan.sections), replicas * unit)
    here, there = (
        move_to_groups(plan, [([plan.sections[0].user_section_name], n)], world)
        for n in (world // unit * unit, replicas * unit)
    )
    step, _ = schedule_with_makespan(there, samples)
    end = simulate(there, samples, step).end
    assert plan_bound(here, samples) <= end
    assert micro_batch_bound_of_work(BatchWork(here, samples)) <= end


def test_sums_that_several_replicas_wait_for_count_in_every_allocation() -> None:
    """Two stages with sums of 2 GiB: a last backward hides 2 ms of them, in any number of replicas."""
    lm = make_stages("lm", [[0, 2], [1, 3]], forward=f"{MS}*B", backward=f"{2 * MS}*B")
    plan = trained(lm, stage_edges(lm), 80, "none")
    samples = [make_sample(i) for i in range(8)]
    (sums, *_) = (reduction.sum_ns for reduction in Traffic(plan).timed_reductions)
    bound = micro_batch_bound_of_work(BatchWork(plan, samples))
    assert bound == pytest.approx(4 * 3 * MS + sums - 2 * MS, rel=1e-3)  # found to so many digits
    step, _ = schedule_with_makespan(plan, samples)
    assert schedule_bound(plan, samples).ns <= simulate(plan, samples, step).end


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3*B + 7", True),
        ("(5*B*19//34)//4 + max(2*S, 8)", True),
        ("B*S", False),
        ("B - 1", False),
        ("B + -2*S", False),
        ("8//B", False),
    ],
)
def test_what_adds_up_to_no_more_than_the_sum(text: str, expected: bool) -> None:
    assert is_subadditive(text) == expected
