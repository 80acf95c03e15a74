"""Micro-batches whose samples are dealt to the ranks of a replica: who computes what, when, and within which
memory. Random plans of the other tests of this folder have such sections, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from secc.bounds.bounds import schedule_bound
from secc.runtime.plan.dealt_samples import DealtMicroBatches
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.schema import Cost, Plan, SubgroupCost
from secc.runtime.plan.step_program import SampleMeta
from secc.runtime.schedule.batch_packing import pack_replicas
from secc.runtime.schedule.dealt_runs import INFEASIBLE_NS, DealtRuns
from secc.runtime.schedule.scheduler import schedule_with_makespan
from secc.runtime.validation.full_check import check_schedule
from secc.simulate.simulator import simulate
from tests.runtime.schedule.plan_strategies import make_plan, make_sample, make_section


def dealing_plan(
    replicas: int = 1,
    cp: int = 4,
    micro_batch: int = 1,
    exchange: int = 20,
    most_bytes: int = 100,
    sharding: str = "none",
    degrees: Sequence[int] = (1,),
) -> Plan:
    """A decoder on ranks that exchange keys and values for each micro-batch, the longer the more of
    them share its rows. A rank has room for `most_bytes` tokens of dealt samples."""
    lm = make_section(
        "lm",
        range(replicas * cp),
        cp=cp,
        micro_batch=micro_batch,
        forward=f"{exchange} + B*S//{cp}",
        backward=f"{2 * exchange} + 2*B*S//{cp}",
        sharding=sharding,
    )
    lm = dataclasses.replace(
        lm,
        cp_per="micro_batch",
        subgroups=tuple(
            SubgroupCost(
                n,
                Cost(
                    f"{exchange * (n - 1) // (cp - 1)} + B*S//{n}",
                    f"{2 * (exchange * (n - 1) // (cp - 1))} + 2*B*S//{n}",
                    saved=f"B*S//{n}",
                ),
            )
            for n in degrees
        ),
        subgroup_bytes=most_bytes,
    )
    return make_plan([lm], [], replicas * cp)


def static(p: Plan) -> Plan:
    return dataclasses.replace(
        p, sections=tuple(dataclasses.replace(s, cp_per="section") for s in p.sections)
    )


def make_samples(lengths: Sequence[int]) -> list[SampleMeta]:
    return [make_sample(i, length=n) for i, n in enumerate(lengths)]


def test_a_long_sample_is_divided_and_short_ones_are_computed_side_by_side() -> None:
    p, samples = dealing_plan(), make_samples([400, 40, 40, 40, 40])
    step, makespan = schedule_with_makespan(p, samples)
    assert sorted(m.samples for m in step.micro_batches["lm"]) == [(0,), (1, 2, 3, 4)]
    assert makespan == (60 + 3 * 100) + 3 * 40
    assert schedule_with_makespan(static(p), samples)[1] == (60 + 3 * 100) + 4 * (60 + 3 * 10)
    dealt = DealtMicroBatches(p, samples, None)
    long, short = sorted(step.micro_batches["lm"], key=lambda m: m.samples)
    assert [dealt.own_part(long, rank).samples for rank in range(4)] == [(0,)] * 4
    assert [dealt.own_part(short, rank).samples for rank in range(4)] == [(1,), (2,), (3,), (4,)]


def test_samples_that_fit_no_rank_whole_are_divided() -> None:
    p, samples = dealing_plan(most_bytes=30), make_samples([40, 40, 40, 40])
    step, _ = schedule_with_makespan(p, samples)
    assert sorted(m.samples for m in step.micro_batches["lm"]) == [(0,), (1,), (2,), (3,)]


def test_samples_that_fit_two_ranks_are_computed_by_pairs() -> None:
    """One of four ranks cannot hold the long ones, so two share each of them; short ones have one each."""
    p, samples = dealing_plan(degrees=(1, 2)), make_samples([150, 150, 60, 60, 60, 60])
    step, makespan = schedule_with_makespan(p, samples)
    assert sorted(m.samples for m in step.micro_batches["lm"]) == [(0, 1), (2, 3, 4, 5)]
    assert makespan == 3 * (6 + 75) + 3 * 60
    dealt = DealtMicroBatches(p, samples, None)
    long, short = sorted(step.micro_batches["lm"], key=lambda m: m.samples)
    assert [dealt.own_part(long, rank).samples for rank in range(4)] == [(0,), (0,), (1,), (1,)]
    assert [dealt.own_part(short, rank).samples for rank in range(4)] == [(2,), (3,), (4,), (5,)]
    assert (dealt.subgroup_size(long), dealt.subgroup_size(short)) == (2, 1)


def test_a_larger_subgroup_is_taken_where_ranks_would_be_idle() -> None:
    p, samples = dealing_plan(degrees=(1, 2)), make_samples([90, 80])
    step, makespan = schedule_with_makespan(p, samples)
    assert [m.samples for m in step.micro_batches["lm"]] == [(0, 1)] and makespan == 3 * (6 + 45)
    assert DealtMicroBatches(p, samples, None).subgroup_size(step.micro_batches["lm"][0]) == 2


def test_samples_are_divided_where_that_costs_no_exchange() -> None:
    """Of unequal samples, ranks with short ones would wait."""
    p, samples = dealing_plan(exchange=0), make_samples([80, 40, 20, 10])
    step, _ = schedule_with_makespan(p, samples)
    assert sorted(m.samples for m in step.micro_batches["lm"]) == [(0,), (1,), (2,), (3,)]


def test_ranks_without_a_sample_are_idle() -> None:
    p, samples = dealing_plan(), make_samples([40, 40])
    step, _ = schedule_with_makespan(p, samples)
    (both,) = step.micro_batches["lm"]
    dealt = DealtMicroBatches(p, samples, None)
    assert [dealt.own_part(both, rank).samples for rank in range(4)] == [(0,), (1,), (), ()]


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=24),
    st.sampled_from([1, 2]),
    st.sampled_from([2, 3, 4, 8]),
    st.integers(1, 3),
    st.sampled_from([0, 30, 100, 1000]),
    st.sampled_from(["none", "zero3"]),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_each_sample_is_computed_once_within_memory(
    lengths: list[int],
    replicas: int,
    cp: int,
    micro_batch: int,
    room: int,
    sharding: str,
    all_degrees: bool,
) -> None:
    degrees = [n for n in range(1, cp) if cp % n == 0] if all_degrees else [1]
    p = dealing_plan(replicas, cp, micro_batch, most_bytes=room, sharding=sharding, degrees=degrees)
    samples, section = make_samples(lengths), p.sections[0]
    step, makespan = schedule_with_makespan(p, samples)
    check_schedule(p, samples, step)
    assert schedule_bound(p, samples).ns <= min(makespan, simulate(p, samples, step).end)
    dealt, costs, seen = DealtMicroBatches(p, samples, None), PredictedCosts(p, samples), list[int]()
    for m in step.micro_batches["lm"]:
        first = m.replica * cp
        parts = [dealt.own_part(m, rank).samples for rank in range(first, first + cp)]
        (forward,), _ = costs.micro_batch_times(section, [m.samples])
        if parts[0] == m.samples:  # divided: all ranks compute all samples
            assert len(m.samples) <= micro_batch
            parts = parts[:1]
        else:
            size = dealt.subgroup_size(m)
            parts = parts[::size]
            tokens = [len(part) * max((lengths[p] for p in part), default=0) // size for part in parts]
            assert max(map(len, parts)) <= micro_batch and max(tokens) <= room
            assert forward == max(tokens) + 20 * (size - 1) // (cp - 1)
        seen += [p for part in parts for p in part]
    assert sorted(seen) == list(range(len(lengths)))


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=20),
    order=st.sampled_from(["sorted", "reversed", "alternating", "drawn"]),
    micro_batch=st.integers(1, 3),
    most_bytes=st.integers(20, 300),
    degrees=st.sampled_from([(1,), (1, 2), (1, 2, 4)]),
)
@settings(max_examples=100, deadline=None)
def test_runs_cost_what_each_of_them_costs_as_a_micro_batch(
    lengths: list[int], order: str, micro_batch: int, most_bytes: int, degrees: tuple[int, ...]
) -> None:
    p = dealing_plan(cp=8, micro_batch=micro_batch, most_bytes=most_bytes, degrees=degrees)
    costs, (section,) = PredictedCosts(p, make_samples(lengths)), p.sections
    group = list(range(len(lengths)))
    if order != "drawn":
        group.sort(key=lambda i: (-lengths[i], i))
    if order == "reversed":
        group.reverse()
    if order == "alternating":
        half = len(group) - len(group) // 2
        long, short = group[:half], group[half:][::-1]
        group = [x for pair in zip(long, [*short, None], strict=False) for x in pair if x is not None]
    runs = DealtRuns(costs, section, [group], range(1, len(group) + 1))
    for length in range(1, len(group) + 1):
        one_by_one = costs.price_dealt(
            section, [tuple(group[i : i + length]) for i in range(len(group) - length + 1)]
        )
        assert runs.run_times(length) == [INFEASIBLE_NS if d is None else d.total_ns for d in one_by_one]


@given(
    groups=st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=12), min_size=1, max_size=6),
    order=st.sampled_from(["sorted", "alternating", "drawn"]),
    micro_batch=st.integers(1, 3),
    most_bytes=st.integers(20, 300),
    deals=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_groups_are_packed_together_as_each_is_packed_alone(
    groups: list[list[int]], order: str, micro_batch: int, most_bytes: int, deals: bool
) -> None:
    lengths = [n for own in groups for n in own]
    p = dealing_plan(cp=4, micro_batch=micro_batch, most_bytes=most_bytes, degrees=(1, 2))
    p = p if deals else static(p)
    stages = [dataclasses.replace(s, room_bytes=0 if deals else 2 * most_bytes) for s in p.sections]
    costs, left = PredictedCosts(p, make_samples(lengths)), iter(range(len(lengths)))
    positions = [[next(left) for _ in own] for own in groups]
    if order != "drawn":
        positions = [sorted(own, key=lambda i: (-lengths[i], i)) for own in positions]
    if order == "alternating":
        positions = [[own[-(i // 2) - 1 if i % 2 else i // 2] for i in range(len(own))] for own in positions]
    together = pack_replicas(costs, stages, stages[0], positions)
    assert together == [pack_replicas(costs, stages, stages[0], [own])[0] for own in positions]
    assert [sorted(x for run, _ in own for x in run) for own in together] == [sorted(o) for o in positions]
