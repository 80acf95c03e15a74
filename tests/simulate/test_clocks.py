"""The estimates of step time agree with the simulator, which executes the programs, on random steps.

docs/internals/scheduler.md lists them with what each is for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from secc.alloc.refine.schedule_evaluation import replay_order
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import SampleMeta, Schedule
from secc.runtime.schedule import pipeline_order
from secc.runtime.schedule.emit_programs import emit_programs
from secc.runtime.schedule.micro_batches import MicroBatchComposer
from secc.runtime.schedule.scheduler import ScheduleCandidate, find_candidate, pipeline_order_candidate
from secc.runtime.schedule.upstream_estimate import critical_pipeline_load
from secc.simulate.simulator import simulate
from tests.runtime.schedule.plan_strategies import random_batches, random_plans
from tests.simulate.test_simulator import cluster
from tools import schedule_mixes

LATENCY = 7
Step = tuple[Plan, Sequence[SampleMeta]]


def emit_candidate(candidate: ScheduleCandidate) -> Schedule:
    return emit_programs(
        candidate.composer.plan,
        candidate.composer.graph,
        candidate.tables,
        candidate.messages,
        candidate.task_ranges,
        candidate.task_order,
    )


@st.composite
def pipelined_steps(draw: st.DrawFn, images: float = 0.5) -> Step:
    """A language model in stages, and with images an encoder that feeds it."""
    stages, split = draw(st.integers(2, 4)), draw(st.booleans())
    in_flight = draw(st.sampled_from([0, stages, 2 * stages]))
    replicas, seed = draw(st.integers(1, 3)), draw(st.integers(0, 1000))
    samples = schedule_mixes.multimodal_batch(draw(st.integers(4, 24)), images, seed)
    shape = schedule_mixes.PipelineShape(stages, in_flight, split)
    return schedule_mixes.vlm_plan(samples, 2, replicas, 0.8, pipeline=shape), samples


def plan_pipeline(
    p: Plan, samples: Sequence[SampleMeta]
) -> tuple[pipeline_order.PipelineLoad, pipeline_order.PipelineOrders, ScheduleCandidate]:
    composer = MicroBatchComposer(p, samples, SectionGraph(p))
    found = critical_pipeline_load(composer)
    assert found is not None
    load, micro_batches = found
    orders = pipeline_order.plan_orders(load, pipeline_order.LIKELIEST_STRATEGY)
    return load, orders, pipeline_order_candidate(composer, load, micro_batches, orders)


@given(pipelined_steps())
@settings(max_examples=40, deadline=None)
def test_decoupled_simulation_is_what_programs_take(step: Step) -> None:
    p, samples = step
    _, _, candidate = plan_pipeline(p, samples)
    end = simulate(p, samples, emit_candidate(candidate)).end
    assert end <= candidate.makespan
    assert end == candidate.makespan or any(s.in_flight for s in p.sections)


@given(pipelined_steps(images=0.0))
@settings(max_examples=40, deadline=None)
def test_a_pipeline_replica_alone_is_what_its_ranks_take(step: Step) -> None:
    p, samples = step
    load, orders, candidate = plan_pipeline(p, samples)
    simulated = simulate(p, samples, emit_candidate(candidate))
    ready = [0] * len(load.work_ns)
    for replica, order in enumerate(orders.orders):
        ranks = {s.mesh.ranks[replica] for s in p.sections if s.pipeline}
        end = max((c.end for c in simulated.compute if c.rank in ranks), default=0)
        assert load.replica.simulate(order, ready).end == end


def test_upstream_estimate_tells_about_when_programs_end() -> None:
    """Exact in the median; the order of the encoders' backwards is guessed, so it may be off."""
    errors: list[float] = []
    for seed in range(24):
        samples = schedule_mixes.multimodal_batch(16, 0.5, seed)
        shape = schedule_mixes.PipelineShape(2 + seed % 3, 16, bool(seed % 2))
        p = schedule_mixes.vlm_plan(samples, 2, 1 + seed % 3, 0.8, pipeline=shape)
        _, orders, candidate = plan_pipeline(p, samples)
        errors.append(abs(orders.end / simulate(p, samples, emit_candidate(candidate)).end - 1))
    errors.sort()
    assert errors[12] < 0.001 and errors[20] < 0.05 and errors[-1] < 0.1


@given(st.one_of(st.tuples(random_plans(), random_batches), pipelined_steps()))
@settings(max_examples=80, deadline=None)
def test_replay_with_messages_is_what_programs_take_on_links_without_contention(step: Step) -> None:
    p, samples = step
    p = dataclasses.replace(p, cluster=cluster(LATENCY, gb_s=10**9, per_node=p.world_size))
    candidate = find_candidate(p, samples)
    names = {s.user_section_name for s in p.sections}
    _, ends = replay_order(candidate, {(a, b): LATENCY for a in names for b in names})
    replayed, end = max(ends, default=0), simulate(p, samples, emit_candidate(candidate)).end
    if any(s.mesh.replica_size > 1 for s in p.sections):
        # The replay sees only the first rank of a replica: it may add or miss messages of its other ranks.
        assert abs(end - replayed) <= LATENCY * len(candidate.task_order)
    elif p.pipelines:
        # A stage follows the one before it also where nothing is sent, and a micro-batch that the search
        # moves to another replica keeps its place in the old order: the replay may wait longer.
        assert end <= replayed
    else:
        assert end == replayed
