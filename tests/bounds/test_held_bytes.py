"""Micro-batches of pipelines are as small as what stages hold asks for: of small pipelines all are tried."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from secc.bounds.bounds import plan_bound
from secc.bounds.held_bytes import StageHold, pipeline_holds
from secc.bounds.work import BatchWork
from secc.cluster import parse_cluster
from secc.runtime.plan.schema import Cost, ModelRef, Plan
from secc.runtime.plan.step_program import SampleMeta
from tests.bounds.test_allocations import all_partitions
from tests.runtime.schedule.plan_strategies import make_plan, make_sample, make_stages, stage_edges

Micros = tuple[tuple[int, ...], ...]  # positions of samples in each micro-batch
Stage = tuple[int, int, int]  # ns of a pass, ns for each position of a sample, bytes kept for each position


def staged_plan(stages: Sequence[Stage], room: int, replicas: int, split: bool = False) -> Plan:
    """A pipeline with backwards of twice a forward's additive time; a rank has `room` bytes next to its
    weights."""
    cluster = parse_cluster("1x8xcpu")
    device = dataclasses.replace(cluster.device, memory=400 + room, reserved=0, memory_margin=0)
    ranks = [range(i, len(stages) * replicas, len(stages)) for i in range(len(stages))]
    made = [
        dataclasses.replace(
            s,
            cost=Cost(f"{once} + {added}*B*S", f"{once} + {2 * added}*B*S", saved=f"{kept}*B*S"),
            room_bytes=room,
            params=(f"{s.name}.w",),
            weight_permille=500 if split else 0,
        )
        for s, (once, added, kept) in zip(make_stages("lm", ranks, micro_batch=8), stages, strict=True)
    ]
    plan = make_plan(made, stage_edges(made), len(stages) * replicas)
    return dataclasses.replace(
        plan,
        model=ModelRef("", "", {f"{s.name}.w": "float32[100]" for s in made}),
        cluster=json.loads(dataclasses.replace(cluster, device=device).to_json()),
    )


def passes_of(stage: Stage, length: int, split: bool) -> tuple[int, int, int]:
    """(forward, backward, second part of the backward) of a micro-batch with so many positions."""
    once, added, _ = stage
    whole = once + 2 * added * length
    return once + added * length, whole - whole // 2 * split, whole // 2 * split


def shortest_step(stages: Sequence[Stage], lengths: tuple[int, ...], room: int, split: bool) -> int | None:
    """The proven shortest step of one replica with micro-batches of so many positions, in any order; None
    where one does not fit."""
    if not lengths:
        return 0
    model, ends = cp_model.CpModel(), list[cp_model.IntVar]()
    horizon = sum(sum(passes_of(s, n, split)) for s in stages for n in lengths)
    busy: list[list[cp_model.IntervalVar]] = [[] for _ in stages]
    held: list[list[cp_model.IntervalVar]] = [[] for _ in stages]

    def start_after(earliest: cp_model.IntVar | int, duration: int, stage: int) -> cp_model.IntVar:
        start = model.new_int_var(0, horizon, "")
        model.add(start >= earliest)
        busy[stage].append(model.new_fixed_size_interval_var(start, duration, ""))
        return start

    for n in lengths:
        if any(kept * n > room for _, _, kept in stages):
            return None
        done: cp_model.IntVar | int = 0
        starts = list[cp_model.IntVar]()
        for i, stage in enumerate(stages):
            starts.append(start := start_after(done, passes_of(stage, n, split)[0], i))
            done = start + passes_of(stage, n, split)[0]
        for i, stage in reversed(list(enumerate(stages))):
            _, backward, second = passes_of(stage, n, split)
            done = start_after(done, backward, i) + backward
            end = model.new_int_var(0, horizon, "")
            model.add(end == (start_after(done, second, i) + second if second else done))
            length = model.new_int_var(0, horizon, "")
            held[i].append(model.new_interval_var(starts[i], length, end, ""))
            ends.append(end)
    for i, (_, _, kept) in enumerate(stages):
        model.add_no_overlap(busy[i])
        model.add_cumulative(held[i], [kept * n for n in lengths], room)
    step = model.new_int_var(0, horizon, "step")
    model.add_max_equality(step, ends)
    model.minimize(step)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)


def ways_to_divide(count: int, replicas: int) -> Iterator[list[Micros]]:
    """Yields, for each way to form micro-batches and to give them to replicas, those of each replica."""
    for groups in all_partitions([str(i) for i in range(count)]):
        micros = [tuple(map(int, own)) for own in groups]
        for owners in product(range(replicas), repeat=len(micros)):
            yield [
                tuple(m for m, owner in zip(micros, owners, strict=True) if owner == r)
                for r in range(replicas)
            ]


def shortest_of_all(
    stages: Sequence[Stage], lengths: Sequence[int], room: int, replicas: int, split: bool
) -> int | None:
    """The proven shortest step over all ways to form micro-batches, divide them and order them; widths are
    those of the longest sample in a micro-batch."""

    @cache
    def step_of(own: tuple[int, ...]) -> int | None:
        return shortest_step(stages, own, room, split)

    best: int | None = None
    for by_replica in ways_to_divide(len(lengths), replicas):
        own = [
            step_of(tuple(sorted(len(m) * max(lengths[i] for i in m) for m in micros)))
            for micros in by_replica
        ]
        if None not in own:
            longest = max(ns for ns in own if ns is not None)
            best = longest if best is None else min(best, longest)
    return best


def samples_of(lengths: Sequence[int]) -> list[SampleMeta]:
    return [make_sample(i, length=n) for i, n in enumerate(lengths)]


stages_drawn = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 6), st.integers(0, 9)), min_size=2, max_size=3
)


@given(
    stages_drawn,
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.integers(6, 80),
    st.integers(1, 2),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_no_micro_batches_and_orders_that_fit_are_shorter_than_the_plan_bound(
    stages: list[Stage], lengths: list[int], room: int, replicas: int, split: bool
) -> None:
    shortest = shortest_of_all(stages, lengths, room, replicas, split)
    if shortest is not None:
        bound = plan_bound(staged_plan(stages, room, replicas, split), samples_of(lengths))
        assert bound <= shortest


def test_a_stage_without_room_for_large_micro_batches_takes_more_of_them() -> None:
    """Twelve samples keep 100 bytes each. With room for all of them one micro-batch may have all; with less
    there are more, which take `once` more often, and more than as many as a rank has room for."""
    stages, samples = [(100, 1, 10)] * 3, samples_of([10] * 12)
    bounds = [plan_bound(staged_plan(stages, room, 1), samples) for room in (10_000, 700, 400)]
    assert bounds == sorted(bounds) and bounds[0] < bounds[1] < bounds[2]


@pytest.mark.parametrize(("time", "count"), [(10, None), (11, 100), (20, 10), (1000, 1)])
def test_the_number_of_micro_batches_falls_with_the_time_there_is(time: int, count: int | None) -> None:
    """Ten times the room is 100 bytes for 10 ns, which fixed times use up; the root is 10 times that."""
    assert StageHold(fixed=100, root=31, room=10).least_count(time) == (97 if count == 100 else count)


def test_pipelines_without_known_room_say_nothing() -> None:
    plan, samples = staged_plan([(10, 1, 1)] * 2, 100, 1), samples_of([5, 5])
    assert pipeline_holds(BatchWork(plan, samples), plan.sections, own_sizes=False) is not None
    unknown = tuple(dataclasses.replace(s, room_bytes=0) for s in plan.sections)
    plan = dataclasses.replace(plan, sections=unknown)
    assert pipeline_holds(BatchWork(plan, samples), plan.sections, own_sizes=False) is None
    assert pipeline_holds(BatchWork(plan, samples), plan.sections[:1], own_sizes=False) is None
