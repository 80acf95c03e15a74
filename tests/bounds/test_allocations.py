"""No allocation with the same layouts is shorter than the plan bound: of small plans all are tried."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secc.alloc.exact.optimal_schedule import solve_schedule
from secc.bounds.bounds import micro_batch_bound_of_work, plan_bound, schedule_bound
from secc.bounds.machine_bounds import BoundJob, MachinePool, best_set_bound, packing_bound
from secc.bounds.work import BatchWork
from secc.cluster import parse_cluster
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.schema import Cost, ModelRef, Plan, Section, SubgroupCost, rank_position
from secc.runtime.plan.step_program import SampleMeta
from secc.runtime.schedule.scheduler import schedule_with_makespan
from secc.simulate.simulator import simulate
from tests.runtime.schedule.plan_strategies import (
    make_edge,
    make_plan,
    make_sample,
    make_section,
    make_stages,
    random_batches,
    random_plans,
    stage_edges,
)

IMAGE = ("images",)


def sections_of(plan: Plan) -> dict[str, list[Section]]:
    found: dict[str, list[Section]] = {}
    for s in sorted(plan.sections, key=lambda s: s.stage):
        found.setdefault(s.user_section_name, []).append(s)
    return found


def replica_ranks(stages: Sequence[Section]) -> int:
    return stages[0].mesh.replica_size * (len(stages) // stages[0].chunks)


def move_to_groups(plan: Plan, groups: Sequence[tuple[Sequence[str], int]], world: int) -> Plan:
    """The plan with these groups of sections, each on so many ranks of its own."""
    sections, start, moved = sections_of(plan), 0, dict[str, Section]()
    for names, ranks in groups:
        for name in names:
            stages = sections[name]
            unit, size = replica_ranks(stages), stages[0].mesh.replica_size
            for s in stages:
                place = rank_position(s.stage, unit // size, s.placement)
                own = [start + d * unit + place * size + i for d in range(ranks // unit) for i in range(size)]
                mesh = dataclasses.replace(s.mesh, dp=ranks // unit, ranks=tuple(own), ep=1)
                moved[s.name] = dataclasses.replace(s, mesh=mesh)
        start += ranks
    assert start <= world
    return dataclasses.replace(plan, sections=tuple(moved[s.name] for s in plan.sections), world_size=world)


def all_partitions(names: Sequence[str]) -> Iterator[list[list[str]]]:
    if not names:
        yield []
        return
    for rest in all_partitions(names[1:]):
        yield [[names[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [names[0], *rest[i]], *rest[i + 1 :]]


def every_allocation(plan: Plan, world: int) -> Iterator[Plan]:
    sections = sections_of(plan)

    def ranks_of(groups: list[list[str]], left: int) -> Iterator[list[int]]:
        if not groups:
            yield []
            return
        unit = lcm(*(replica_ranks(sections[name]) for name in groups[0]))
        for ranks in range(unit, left + 1, unit):
            for rest in ranks_of(groups[1:], left - ranks):
                yield [ranks, *rest]

    for groups in all_partitions(list(sections)):
        for ranks in ranks_of(groups, world):
            yield move_to_groups(plan, list(zip(groups, ranks, strict=True)), world)


@st.composite
def two_allocations(draw: st.DrawFn) -> tuple[Plan, Plan]:
    """Draws two allocations with the same layouts on as many ranks."""
    plan = draw(random_plans())
    plan = dataclasses.replace(
        plan,
        sections=tuple(
            dataclasses.replace(s, in_flight=draw(st.sampled_from([s.in_flight, 0]))) for s in plan.sections
        ),
    )
    least = sum(map(replica_ranks, sections_of(plan).values()))
    world = least + draw(st.integers(0, 3))
    found = list(every_allocation(plan, world))
    return draw(st.sampled_from(found)), draw(st.sampled_from(found))


@given(two_allocations(), random_batches)
@settings(max_examples=200)
def test_no_allocation_is_shorter_than_the_plan_bound(plans: tuple[Plan, Plan], samples: list[SampleMeta]):
    plan, other = plans
    step, time = schedule_with_makespan(other, samples)
    bound = plan_bound(plan, samples)
    assert bound <= min(time, simulate(other, samples, step).end)
    assert bound == plan_bound(other, samples)
    own_sizes = micro_batch_bound_of_work(BatchWork(plan, samples))
    # `bound` counts what micro-batches keep, `own_sizes` how many samples they have: either may be larger.
    assert own_sizes <= min(time, simulate(other, samples, step).end)
    assert own_sizes <= schedule_bound(plan, samples).ns


def staged_vlm(image: int, forwards: Sequence[int]) -> Plan:
    """An encoder and a language model in stages, with these ns for an image and for a position."""
    vision = make_section("vision", [0], when=IMAGE, forward=f"{image}*I", backward=f"{2 * image}*I")
    lm = [
        dataclasses.replace(s, cost=Cost(f"{f}*S", f"{2 * f}*S"))
        for s, f in zip(make_stages("lm", [[1 + i] for i in range(len(forwards))]), forwards, strict=True)
    ]
    return make_plan(
        [vision, *lm], [make_edge("vision", "lm_0"), *stage_edges(lm)], 1 + len(forwards), widths="own"
    )


@pytest.mark.parametrize(
    ("image", "forwards", "lengths", "world"),
    [
        (10, (1, 1), (10, 10, 10), 3),
        (10, (1, 2), (10, 5, 5), 4),
        (40, (1, 1), (10, 10), 4),
        (5, (3,), (10, 10, 10, 10, 10), 4),
        (0, (1, 1, 1), (20, 10, 10), 4),
    ],
)
def test_the_best_order_of_every_allocation_is_no_shorter(
    image: int, forwards: tuple[int, ...], lengths: tuple[int, ...], world: int
) -> None:
    """All allocations are tried, each with a proven bound on its best order."""
    plan = staged_vlm(image, forwards)
    samples = [make_sample(i, *(IMAGE if i % 2 == 0 else ()), length=n) for i, n in enumerate(lengths)]
    shortest = 1 << 60
    for other in every_allocation(plan, world):
        order = schedule_with_makespan(other, samples)[1]
        exact = solve_schedule(BatchWork(other, samples), limit=0.5, hint_ns=order)
        assert exact is not None
        shortest = min(shortest, exact.bound_ns)
    bounds = {plan_bound(other, samples) for other in every_allocation(plan, world)}
    assert len(bounds) == 1 and max(bounds) <= shortest


def test_whole_replicas_and_the_ends_of_stages_count() -> None:
    """Two stages and five ranks: two replicas do two of four samples each, and the last stage waits for the
    first forward, 10 + 2 * 30 + 20."""
    lm = make_stages("lm", [[0, 2], [1, 3]], forward="B*S", backward="2*B*S")
    plan = make_plan(lm, stage_edges(lm), 5)
    samples = [make_sample(i, length=10) for i in range(4)]
    assert 4 * 2 * 30 // 5 == 48
    assert plan_bound(plan, samples) == pytest.approx(90, abs=1)


@pytest.mark.parametrize(("weights", "shared"), [(400, True), (700, False)])
def test_sections_that_do_not_fit_together_do_not_share_ranks(weights: int, shared: bool) -> None:
    """Two sections on four ranks. If they share all, work is spread evenly; apart, each has two, and nine
    samples take as long as ten."""
    cluster = parse_cluster("1x8xcpu")
    device = dataclasses.replace(cluster.device, memory=1000, reserved=0, memory_margin=0)
    cluster = dataclasses.replace(cluster, device=device)
    sections = [
        dataclasses.replace(make_section(name, ranks, forward="100*B", backward="0"), params=(f"{name}.w",))
        for name, ranks in (("a", [0, 1]), ("b", [2, 3]))
    ]
    table = {f"{s.name}.w": f"float32[{weights // 4}]" for s in sections}
    plan = make_plan(sections, [], 4)
    plan = dataclasses.replace(plan, model=ModelRef("", "", table), cluster=json.loads(cluster.to_json()))
    samples = [make_sample(i) for i in range(6)]
    assert plan_bound(plan, samples) == pytest.approx(300, abs=1)
    samples += [make_sample(i) for i in (6, 7, 8)]
    assert plan_bound(plan, samples) == pytest.approx(450 if shared else 500, abs=1)


def test_sections_that_share_some_ranks_have_no_such_bound() -> None:
    a, b = make_section("a", [0, 1], forward="100*B"), make_section("b", [1, 2], forward="100*B")
    plan = make_plan([a, b], [], 3)
    samples = [make_sample(i) for i in range(4)]
    assert plan_bound(plan, samples) == 4 * 300 * 2 // 3


jobs = st.lists(
    st.builds(BoundJob, st.integers(0, 50), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=90
)


@given(jobs, st.integers(1, 100))
def test_pools_know_the_bounds_for_all_numbers_of_machines(drawn: list[BoundJob], machines: int) -> None:
    pool = MachinePool(drawn, 100)
    assert pool.bound_time(machines) == max(best_set_bound(drawn, machines), packing_bound(drawn, machines))


def test_dealt_samples_do_not_delay_each_other() -> None:
    """Ranks of cp compute short samples one each, which does not take as long as one after the other."""
    stages = make_stages("lm", [[0, 1], [2, 3]], cp=2, forward="10*S", backward="20*S")
    subgroups = (SubgroupCost(1, Cost("12*S", "24*S", saved="0")),)
    stages = [
        dataclasses.replace(s, cp_per="micro_batch", subgroups=subgroups, subgroup_bytes=10**6)
        for s in stages
    ]
    plan = make_plan(stages, stage_edges(stages), 4)
    samples = [make_sample(i, length=30 if i == 0 else 10) for i in range(17)]
    step, time = schedule_with_makespan(plan, samples)
    assert schedule_bound(plan, samples).ns <= min(time, simulate(plan, samples, step).end)


def test_what_fits_in_one_section_does_not_change_another_with_the_same_costs() -> None:
    """In "a" a rank may compute a sample alone, which takes no time; in "b" it lacks the memory."""
    subgroups = (SubgroupCost(1, Cost("0", "0", saved="10*S")),)
    a, b = (
        dataclasses.replace(
            make_section(name, ranks, cp=2, forward="0", backward="3*S"),
            cp_per="micro_batch",
            subgroups=subgroups,
            subgroup_bytes=size,
        )
        for name, ranks, size in (("a", [0, 1], 100), ("b", [2, 3], 0))
    )
    plan = make_plan([a, b], [], 4)
    samples = [make_sample(0, length=1), make_sample(1, length=1)]
    assert schedule_bound(plan, samples).ns == 6 == schedule_with_makespan(plan, samples)[1]


def section_with_room(fixed: int, added: int, kept: int, room: int) -> Plan:
    """A section on one rank: a micro-batch takes `fixed` ns there and back, and `added` for each position,
    which keeps `kept` bytes; a rank has `room` bytes besides its weights."""
    cluster = parse_cluster("1x1xcpu")
    device = dataclasses.replace(cluster.device, memory=400 + room, reserved=0, memory_margin=0)
    section = dataclasses.replace(
        make_section("a", [0], micro_batch=8),
        cost=Cost(f"{fixed} + {added}*B*S", f"{fixed} + {2 * added}*B*S", saved=f"{kept}*B*S"),
        room_bytes=room,
        params=("a.w",),
    )
    plan = make_plan([section], [], 1, widths="own")
    return dataclasses.replace(
        plan,
        model=ModelRef("", "", {"a.w": "float32[100]"}),
        cluster=json.loads(dataclasses.replace(cluster, device=device).to_json()),
    )


def fastest_micro_batches(plan: Plan, samples: list[SampleMeta], kept: int, room: int) -> int:
    """The shortest time in which one rank does all samples, over all ways to form micro-batches: those of
    several samples keep at most `room` bytes."""
    (section,) = plan.sections
    costs, best = PredictedCosts(plan, samples), 1 << 60
    names = [str(i) for i in range(len(samples))]
    for partition in all_partitions(names):
        micros = [[int(i) for i in own] for own in partition]
        longest = (max(samples[i].sizes["S"] for i in own) for own in micros)
        if any(
            len(own) > 1 and kept * len(own) * most > room for own, most in zip(micros, longest, strict=True)
        ):
            continue
        forward, backward = costs.micro_batch_times(section, micros)
        best = min(best, sum(forward) + sum(backward))
    return best


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(0, 200),
    st.integers(0, 20),
    st.integers(1, 30),
    st.integers(20, 600),
)
@settings(max_examples=150, deadline=None)
def test_no_micro_batches_that_fit_are_shorter_than_the_plan_bound(
    lengths: list[int], fixed: int, added: int, kept: int, room: int
) -> None:
    plan = section_with_room(fixed, added, kept, room)
    samples = [make_sample(i, length=n) for i, n in enumerate(lengths)]
    assert plan_bound(plan, samples) <= fastest_micro_batches(plan, samples, kept, room)


def test_what_takes_time_once_counts_as_often_as_memory_asks_for() -> None:
    """Of six samples that keep 100 bytes each, two fit together: three micro-batches, in place of one."""
    samples = [make_sample(i, length=10) for i in range(6)]
    for room, micro_batches in ((200, 3), (600, 1), (60, 6)):
        plan = section_with_room(fixed=500, added=1, kept=10, room=room)
        expected = 2 * 500 * micro_batches + 6 * 30
        assert plan_bound(plan, samples) == pytest.approx(expected, abs=12)
        assert fastest_micro_batches(plan, samples, 10, room) == expected
