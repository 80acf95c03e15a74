"""What a simulated step holds is within what the allocation counts: both have one account of memory."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from secc.alloc.problem.workload import Workload
from secc.alloc.refine.in_flight_limits import in_flight_bytes
from secc.cluster import Cluster, parse_cluster
from secc.cost.model.memory import RankMemory, rank_memory
from secc.cost.model.section_cost import SectionCost
from secc.report.plan_warnings import plan_warnings
from secc.runtime.plan.schema import ModelRef, Plan
from secc.runtime.schedule.scheduler import schedule_batch
from secc.simulate.simulator import simulate
from secc.simulate.step_measures import measure_step, memory_over_time
from tests.runtime.schedule.plan_strategies import (
    limit_bytes,
    make_plan,
    make_sample,
    make_stages,
    stage_edges,
)

FLOAT = 4


def float32_cost(entries: int) -> SectionCost:
    """A section of so many trained float32 parameters."""
    return SectionCost(
        flops="0",
        backward_flops="0",
        work="0",
        backward_work="0",
        saved="0",
        glue_bytes="0",
        ops=0,
        params=entries,
        trainable=entries,
        param_bytes=FLOAT * entries,
        trainable_bytes=FLOAT * entries,
        dtype="f32",
        label="counted",
    )


def with_usable_memory(usable: int) -> Cluster:
    """One node of CPUs with `usable` bytes each for tensors."""
    cluster = parse_cluster("1x8xcpu")
    device = dataclasses.replace(cluster.device, memory=usable, reserved=0, memory_margin=0)
    return dataclasses.replace(cluster, device=device)


def plan_of_stages(
    memories: list[RankMemory], entries: list[int], room: list[int], in_flight: list[int], **options: Any
) -> Plan:
    """Stages with parameters, and rooms for micro-batches that keep a byte for each position, and half as
    much between the parts of a split backward."""
    sharding, dp, split, cluster = (options[k] for k in ("sharding", "dp", "split", "cluster"))
    count = len(memories)
    stages = make_stages(
        "lm",
        [[d * count + i for d in range(dp)] for i in range(count)],
        in_flight=tuple(in_flight),
        forward="10*S",
        backward="20*S",
    )
    stages = [
        dataclasses.replace(
            limit_bytes(s, size, "S", "S//2" if split else ""),
            params=(f"{s.name}.w",),
            sharding=sharding,
            working_bytes=memory.transient_bytes(sharding),
            weight_permille=500 if split else 0,
        )
        for s, size, memory in zip(stages, room, memories, strict=True)
    ]
    plan = make_plan(stages, stage_edges(stages), count * dp)
    table = {f"{s.name}.w": f"float32[{n}] train" for s, n in zip(stages, entries, strict=True)}
    return dataclasses.replace(plan, model=ModelRef("", "", table), cluster=json.loads(cluster.to_json()))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_step_holds_no_more_than_its_ranks_may(data: st.DataObject) -> None:
    """Mean micro-batches of 40 bytes, drawn ones of up to 60; ranks have some bytes more than the allocation
    counts for the least that they must hold."""
    dp, count = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    sharding = data.draw(st.sampled_from(["none", "zero1", "zero2"]))
    split = data.draw(st.booleans())
    entries = data.draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    micro_batches = data.draw(st.integers(1, 6))
    in_flight = [min(micro_batches, data.draw(st.integers(count - i, 6))) for i in range(count)]
    working = data.draw(st.integers(0, 9))
    memories = [
        rank_memory(float32_cost(n), 40, working, dp, sharding, micro_batches, largest=60) for n in entries
    ]
    memories = [m._replace(kept_between=20) for m in memories] if split else memories
    needed = [m.total_bytes(n) for m, n in zip(memories, in_flight, strict=True)]
    cluster = with_usable_memory(max(needed) + data.draw(st.integers(0, 100)))
    work = Workload.__new__(Workload)
    object.__setattr__(work, "cluster", cluster)
    room = [in_flight_bytes(work, m, n, 0, 1) for m, n in zip(memories, in_flight, strict=True)]
    plan = plan_of_stages(
        memories, entries, room, in_flight, sharding=sharding, dp=dp, split=split, cluster=cluster
    )
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=micro_batches * dp))
    samples = [make_sample(i, length=n) for i, n in enumerate(lengths)]
    schedule = schedule_batch(plan, samples)
    assume(not schedule.over_memory)
    step = simulate(plan, samples, schedule)
    for rank in range(plan.world_size):
        assert max(size for _, size in memory_over_time(step, rank) or ()) <= cluster.device.usable_memory
    assert not measure_step(step).beyond_memory


def test_ranks_that_hold_too_much_are_named() -> None:
    cluster = with_usable_memory(900)
    memory = rank_memory(float32_cost(50), 40)
    plan = plan_of_stages([memory], [50], [400], [6], sharding="none", dp=1, split=False, cluster=cluster)
    step = simulate(plan, samples := [make_sample(0, length=600)], schedule_batch(plan, samples))
    excess = measure_step(step).beyond_memory
    assert excess.startswith("rank 0 (lm_0) holds 1.118e-06 GiB of the 8.382e-07 GiB")
    shown = dataclasses.replace(plan, prediction={"simulated": {"beyond_memory": excess}})
    assert any(excess in w.text and "recompute=full" in w.remedy for w in plan_warnings(shown))
    assert all("tensors may take" not in w.text for w in plan_warnings(plan))


@pytest.mark.parametrize(("sharding", "at_the_end"), [("none", 2), ("zero1", 1 + 0.5), ("zero2", 0.5)])
def test_sums_are_there_from_the_last_backward_on(sharding: str, at_the_end: float) -> None:
    """On a rank of two with 100 entries and three micro-batches: weights and states, then its own gradients,
    and at the end the sums of its part, or of all parameters in buckets on their way."""
    cluster = with_usable_memory(10**6)
    memory = rank_memory(float32_cost(100), 40, dp=2, sharding=sharding)
    plan = plan_of_stages([memory], [100], [0], [1], sharding=sharding, dp=2, split=False, cluster=cluster)
    samples = [make_sample(i, length=40) for i in range(6)]
    step = simulate(plan, samples, schedule_batch(plan, samples))
    held = memory_over_time(step, 0) or []
    constant = 400 + 800 // (1 if sharding == "none" else 2)
    assert held[0] == (0, constant) and held[1][1] == constant + 40
    first_end = min(c.end for c in step.compute_by_rank[0] if c.kind == "B")
    assert max(size for time, size in held if time < first_end) == constant + 40
    buckets = 400 if sharding != "none" else 0
    assert held[-1][1] == constant + int(400 * at_the_end) + buckets
