"""No step in which all stages of a pipeline keep one order is shorter than the bound on such steps: all steps
of small pipelines are tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import permutations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from secc.bounds.bounds import bound_without_prefetch, one_order_bound_of_work, schedule_bound
from secc.bounds.work import BatchWork
from secc.runtime.plan.schema import Cost, Plan
from tests.runtime.schedule.plan_strategies import make_plan, make_sample, make_stages, stage_edges

Task = tuple[bool, int]  # whether it is a forward, and the place of its sample in the order


def pipeline_plan(
    stages: int, replicas: int, factors: Sequence[tuple[int, int]], in_flight: int, room: int
) -> Plan:
    """A pipeline with these ns of forward and backward for each entry of a sample at each stage."""
    ranks = [range(s * replicas, (s + 1) * replicas) for s in range(stages)]
    sections = [
        dataclasses.replace(
            stage, cost=Cost(f"{forward}*S", f"{backward}*S", saved="S" if room else ""), room_bytes=room
        )
        for stage, (forward, backward) in zip(
            make_stages("lm", ranks, in_flight=[in_flight] * stages), factors, strict=False
        )
    ]
    return make_plan(sections, stage_edges(sections), stages * replicas)


def stage_programs(count: int, in_flight: int, sizes: Sequence[int], room: int) -> Iterator[tuple[Task, ...]]:
    """Yields the orders of a stage's tasks that keep its limits: forwards and backwards of `count` samples,
    both in one order. A sample that is larger than the room is held alone."""

    def extend(program: tuple[Task, ...], forwards: int, backwards: int) -> Iterator[tuple[Task, ...]]:
        if backwards == count:
            yield program
            return
        held = range(backwards, forwards)
        fits = len(held) < in_flight and (
            not room or not held or sum(sizes[backwards : forwards + 1]) <= room
        )
        if forwards < count and fits:
            yield from extend((*program, (True, forwards)), forwards + 1, backwards)
        if held:
            yield from extend((*program, (False, backwards)), forwards, backwards + 1)

    if count:
        yield from extend((), 0, 0)


def replica_end(
    programs: Sequence[Sequence[Task]], factors: Sequence[tuple[int, int]], sizes: Sequence[int]
) -> int:
    """When a replica ends with these programs of its stages, 1 << 60 if they wait for each other."""
    ends: dict[tuple[bool, int, int], int] = {}
    free, places, left = [0] * len(programs), [0] * len(programs), sum(map(len, programs))
    while left:
        before = left
        for s, program in enumerate(programs):
            while places[s] < len(program):
                is_forward, k = program[places[s]]
                after_forward = s == 0 or (True, s - 1, k) in ends
                after_backward = (False, s + 1, k) in ends or s == len(programs) - 1
                if not (after_forward if is_forward else after_backward):
                    break
                source = (True, s - 1, k) if is_forward else (False, s + 1, k)
                ns = factors[s][0 if is_forward else 1] * sizes[k]
                free[s] = ends[is_forward, s, k] = max(free[s], ends.get(source, 0)) + ns
                places[s], left = places[s] + 1, left - 1
        if left == before:
            return 1 << 60
    return max(ends.values(), default=0)


def shortest_replica_end(
    sizes: Sequence[int], factors: Sequence[tuple[int, int]], in_flight: int, room: int
) -> int:
    """The earliest end of a replica with samples of these sizes, over all orders and programs."""
    return min(
        (
            replica_end(programs, factors, order)
            for order in set(permutations(sizes))
            for programs in product(*([*stage_programs(len(order), in_flight, order, room)] for _ in factors))
        ),
        default=0,
    )


longer = st.tuples(
    st.lists(st.integers(1, 30), min_size=4, max_size=4),
    st.lists(st.tuples(st.integers(1, 2), st.integers(1, 8)), min_size=2, max_size=2),
    st.integers(2, 3),
    st.sampled_from([0, 20, 40]),
    st.just(1),
)
wider = st.tuples(
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 8)), min_size=2, max_size=3),
    st.integers(1, 3),
    st.sampled_from([0, 20, 40]),
    st.integers(1, 2),
)


@given(st.one_of(longer, wider))
@settings(max_examples=60, deadline=None)
def test_no_step_in_one_order_is_shorter_than_the_bound(case):
    sizes, factors, in_flight, room, replicas = case
    plan = pipeline_plan(len(factors), replicas, factors, in_flight, room)
    samples = [make_sample(i, length=size) for i, size in enumerate(sizes)]
    shares = product(range(replicas), repeat=len(sizes))
    optimum = min(
        max(
            shortest_replica_end(
                [x for x, r in zip(sizes, share, strict=True) if r == own], factors, in_flight, room
            )
            for own in range(replicas)
        )
        for share in shares
    )
    work = BatchWork(plan, samples)
    assert bound_without_prefetch(work).ns <= one_order_bound_of_work(work).ns <= optimum


def test_a_long_sample_delays_its_replica_by_its_way_back():
    """In memory for two samples, one more forward at the first stage hides the way back of the longest."""
    plan = pipeline_plan(2, 1, [(1, 2), (1, 2)], 2, 0)
    samples = [make_sample(i, length=size) for i, size in enumerate([2, 2, 10, 2, 2])]
    work = BatchWork(plan, samples)
    assert one_order_bound_of_work(work).ns == 2 + 3 * 18 + (20 - 2) + 0
    assert schedule_bound(plan, samples).ns < one_order_bound_of_work(work).ns
