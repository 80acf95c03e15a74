"""Planned orders of pipeline replicas: the simulation of one replica, the decoupled simulation, assignment,
and distance from the bound.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secc.bounds.bounds import schedule_bound
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.schedule import pipeline_order
from secc.runtime.schedule.emit_programs import emit_programs
from secc.runtime.schedule.list_scheduler import simulate_tasks
from secc.runtime.schedule.memory_bound import find_memory_excesses
from secc.runtime.schedule.micro_batches import MicroBatchComposer
from secc.runtime.schedule.pipeline_replica_sim import PipelineReplica
from secc.runtime.schedule.scheduler import pipeline_order_candidate, schedule_with_makespan
from secc.runtime.schedule.task_graph import build_step_tasks
from secc.runtime.schedule.upstream_estimate import critical_pipeline_load
from secc.runtime.validation.full_check import check_schedule
from tests.runtime.schedule.plan_strategies import limit_bytes
from tools import schedule_mixes


def test_a_replica_runs_backwards_first_and_weight_gradients_when_idle():
    """Two stages, two micro-batches: the first stage computes weight gradients while it waits for the second
    backward.
    """
    times = [[10, 10], [10, 10]]
    timeline = PipelineReplica(times, times, times, [0, 0]).simulate([0, 1], [0, 0])
    assert (timeline.end, timeline.starts, timeline.backward_ends) == (70, [0, 10], [40, 60])


def test_a_replica_waits_for_inputs_and_for_the_in_flight_limit():
    times = [[10, 10], [10, 10]]
    assert PipelineReplica(times, times, (), [0, 0]).simulate([1, 0], [34, 5]).starts == [5, 34]
    assert PipelineReplica(times, times, (), [1, 1]).simulate([0, 1], [0, 0]).starts == [0, 40]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=9),
    st.integers(2, 4),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([0, 50, 90, 120]),
    st.sampled_from(["", "T//2", "2*T"]),
)
@settings(max_examples=150)
def test_a_replica_alone_takes_as_long_as_in_the_whole_step(lengths, stages, room, split, size, between):
    """One replica without upstream; a token saves one byte, with a limit of `size` bytes unless 0, and with a
    split backward `between` more between its parts. Memory is kept if each sample alone keeps to it."""
    samples = [schedule_mixes.text_sample(i, n) for i, n in enumerate(lengths)]
    p = schedule_mixes.vlm_plan(
        samples, 1, 1, 0.5, pipeline=schedule_mixes.PipelineShape(stages, room, split)
    )
    limited = (limit_bytes(s, size, "T", between if split else "") for s in p.sections)
    p = dataclasses.replace(p, sections=tuple(limited))
    composer = MicroBatchComposer(p, samples, SectionGraph(p))
    load, micro_batches = critical_pipeline_load(composer)
    order = pipeline_order.pyramid_order(range(len(micro_batches)), load)
    tables = composer.compose_by_order([[micro_batches[m] for m in order]], [0] * len(samples))
    messages = {e.name: [(m, m) for m in range(len(samples))] if e.src != "vision" else [] for e in p.edges}
    step = build_step_tasks(p, composer.graph, tables, messages, in_order=())
    simulated = simulate_tasks(step.graph)
    assert load.replica.simulate(order, [0] * len(samples)).end == simulated.makespan
    if size and split and (3 if between == "2*T" else 1.5) * max(lengths) <= size:
        assert find_memory_excesses(p, tables, step.ranges, simulated.order) == ()


@given(st.data(), st.integers(1, 4), st.integers(1, 8), st.booleans(), st.booleans())
@settings(max_examples=150)
def test_a_changed_order_is_simulated_from_where_it_differs_until_it_is_too_late(
    data: st.DataObject, stages: int, count: int, split: bool, bounded: bool
):
    """The rest of a simulation gives the times of the whole one, and ends only where the end is too late."""
    times = st.lists(
        st.lists(st.integers(1, 20), min_size=count, max_size=count), min_size=stages, max_size=stages
    )
    limits = st.lists(st.integers(1, 40), min_size=stages, max_size=stages)
    replica = PipelineReplica(
        data.draw(times),
        data.draw(times),
        data.draw(times) if split else (),
        data.draw(st.lists(st.integers(0, count), min_size=stages, max_size=stages)),
        data.draw(times) if bounded else (),
        data.draw(limits) if bounded else (),
        between_bytes=data.draw(times) if bounded and split else (),
    )
    ready = data.draw(st.lists(st.integers(0, 100), min_size=count, max_size=count))
    order, changed = (data.draw(st.permutations(range(count))) for _ in range(2))
    if data.draw(st.booleans()):  # one micro-batch more or less, as where one moves to another replica
        changed = changed[:-1]
    whole, known = replica.simulate(changed, ready), replica.simulate(order, ready)
    for latest_end in (whole.end, whole.end + 5):
        assert replica.simulate_within(changed, ready, latest_end, order, known) == whole
    assert replica.simulate_within(changed, ready, whole.end - 1, order, known) in (None, whole)
    assert replica.simulate_within(changed, ready, whole.end // 2) in (None, whole)


@pytest.mark.parametrize(
    ("replicas", "stages", "split"), [(1, 4, True), (1, 2, False), (2, 3, True), (3, 2, True)]
)
def test_planned_orders_predict_the_end_of_the_step(replicas, stages, split):
    """With a trained encoder, the order of its backwards is an estimate: mostly exact, seldom far off."""
    errors = sorted(abs(_end_over_plan(seed, replicas, stages, split) - 1) for seed in range(15))
    assert errors[7] < 0.001 and errors[12] < 0.03 and errors[-1] < 0.1


def test_planned_orders_predict_the_end_with_encoders_that_take_several_samples():
    """Samples take less time together than alone, and a gradient returns when all of them have theirs."""
    errors = sorted(abs(_end_over_plan(seed, 2, 3, True, together=4) - 1) for seed in range(15))
    assert errors[7] < 0.001 and errors[12] < 0.03 and errors[-1] < 0.1


def _end_over_plan(seed, replicas, stages, split, together=1):
    samples = schedule_mixes.multimodal_batch(16, 0.5, seed)
    p = schedule_mixes.vlm_plan(
        samples, 2, replicas, 0.8, pipeline=schedule_mixes.PipelineShape(stages, 16, split)
    )
    if together > 1:
        vision, *lm = p.sections
        forward, backward = (
            f"{schedule_mixes.TOKEN_NS * 2000}+({text})//2"
            for text in (vision.cost.forward_ns, vision.cost.backward_ns)
        )
        cost = dataclasses.replace(vision.cost, forward_ns=forward, backward_ns=backward)
        p = dataclasses.replace(
            p, sections=(dataclasses.replace(vision, micro_batch=together, cost=cost), *lm)
        )
    composer = MicroBatchComposer(p, samples, SectionGraph(p))
    load, micro_batches = critical_pipeline_load(composer)
    planned = (
        pipeline_order.improve_last_order(
            load, pipeline_order.plan_orders(load, pipeline_order.LIKELIEST_STRATEGY)
        )
        if seed % 2
        else pipeline_order.plan_orders(load, pipeline_order.LIKELIEST_STRATEGY)
    )
    return pipeline_order_candidate(composer, load, micro_batches, planned).makespan / planned.end


@pytest.mark.parametrize("mode", ["train", "forward"])
@pytest.mark.parametrize(("stages", "split", "together"), [(2, True, 1), (3, False, 3), (4, True, 2)])
def test_decoupled_simulation_agrees_with_simulating_all_tasks(mode, stages, split, together):
    """Each task waits only for its rank and its inputs: none ends later than the decoupled simulation says,
    and no sample is missing.
    """
    for seed in range(4):
        samples = schedule_mixes.multimodal_batch(24, 0.5, seed)
        p = schedule_mixes.vlm_plan(
            samples, 2, 3, 0.9, mode=mode, pipeline=schedule_mixes.PipelineShape(stages, stages, split)
        )
        p = dataclasses.replace(
            p, sections=(dataclasses.replace(p.sections[0], micro_batch=together), *p.sections[1:])
        )
        composer = MicroBatchComposer(p, samples, SectionGraph(p))
        load, micro_batches = critical_pipeline_load(composer)
        candidate = pipeline_order_candidate(
            composer, load, micro_batches, pipeline_order.plan_orders(load, pipeline_order.LIKELIEST_STRATEGY)
        )
        assert "step_tasks" not in vars(candidate)
        graph, ready, free = candidate.step_tasks.graph, [0] * candidate.task_count, [0] * p.world_size
        assert sorted(candidate.task_order) == list(range(candidate.task_count))
        predecessors_left = graph.predecessor_count.copy()
        for task in candidate.task_order:
            assert predecessors_left[task] == 0
            free[graph.rank_of[task]] = end = (
                max(free[graph.rank_of[task]], ready[task]) + graph.duration_ns[task]
            )
            for successor in graph.successors[task]:
                ready[successor], predecessors_left[successor] = (
                    max(ready[successor], end),
                    predecessors_left[successor] - 1,
                )
        assert max(free) <= candidate.makespan <= 1.1 * simulate_tasks(graph).makespan
        check_schedule(
            p,
            samples,
            emit_programs(
                p,
                composer.graph,
                candidate.tables,
                candidate.messages,
                candidate.task_ranges,
                candidate.task_order,
            ),
        )


def test_a_pipeline_with_inputs_to_a_later_stage_is_simulated_together():
    """A teacher feeds the student's last stage, which the decoupled simulation does not cover."""
    samples = schedule_mixes.distillation_batch(16, 0)
    p = schedule_mixes.teacher_student_plan(samples, 2, 2, 0.8, schedule_mixes.PipelineShape(2, 4, True))
    composer = MicroBatchComposer(p, samples, SectionGraph(p))
    load, micro_batches = critical_pipeline_load(composer)
    candidate = pipeline_order_candidate(
        composer, load, micro_batches, pipeline_order.plan_orders(load, pipeline_order.LIKELIEST_STRATEGY)
    )
    assert "step_tasks" in vars(candidate)
    simulated = simulate_tasks(candidate.step_tasks.graph)
    assert (candidate.task_order, candidate.makespan) == (simulated.order, simulated.makespan)


def test_a_search_finds_the_better_of_two_orders():
    """A long micro-batch that needs the encoder is first in the initial order, so all others wait for it."""
    samples = schedule_mixes.multimodal_batch(6, 0.5, 1)
    p = schedule_mixes.vlm_plan(samples, 1, 1, 0.8, pipeline=schedule_mixes.PipelineShape(2, 2, False))
    load, _ = critical_pipeline_load(MicroBatchComposer(p, samples, SectionGraph(p)))
    plan = pipeline_order._evaluate_orders(
        load, [sorted(range(6), key=lambda m: (not load.needs_upstream[m], -load.work_ns[m]))]
    )
    found = pipeline_order.search_orders(load, plan, 200)
    assert found.end < plan.end and sorted(found.orders[0]) == list(range(6))
    assert (
        pipeline_order.search_orders(load, plan, 200).orders == found.orders
        and pipeline_order.search_orders(load, plan, 0) is plan
    )


def test_long_micro_batches_go_to_few_replicas():
    assigned = pipeline_order.assign_by_aims([9, 8, 7, 6, 1, 1, 1, 1, 1, 1], [18, 18], share=900)
    assert [[m for m in micro_batches if m < 4] for micro_batches in assigned] == [[0], [1, 2, 3]] or sorted(
        assigned[0]
    )[:1] == [0]
    assert [sum([9, 8, 7, 6, 1, 1, 1, 1, 1, 1][m] for m in micro_batches) for micro_batches in assigned] == [
        18,
        18,
    ]


def test_lost_time_is_interpolated_between_simulated_replicas():
    """All replicas have equal micro-batches and so end together."""
    samples = [schedule_mixes.text_sample(i, 100) for i in range(80)]
    p = schedule_mixes.vlm_plan(samples, 1, 20, 0.8, pipeline=schedule_mixes.PipelineShape(2, 4, True))
    found = critical_pipeline_load(MicroBatchComposer(p, samples, SectionGraph(p)))
    assert found is not None
    plan = pipeline_order.plan_orders(found[0], pipeline_order.LIKELIEST_STRATEGY)
    assert sorted(m for queue in plan.orders for m in queue) == list(range(80))
    assert {len(queue) for queue in plan.orders} == {4} and len(set(plan.ends)) == 1


def test_a_ready_micro_batch_passes_a_late_one():
    """The second micro-batch of the order is late, so the third takes its place."""
    assert pipeline_order._yield_late([2, 0, 1], [0, 10, 20], [25, 5, 0]) == [2, 1, 0]


def test_replicas_that_lose_more_time_get_less_work():
    samples = schedule_mixes.multimodal_batch(64, 0.33, 1)
    p = schedule_mixes.vlm_plan(samples, 1, 2, 0.8, pipeline=schedule_mixes.PipelineShape(4, 16, True))
    found = critical_pipeline_load(MicroBatchComposer(p, samples, SectionGraph(p)))
    assert found is not None
    load = found[0]
    plan = pipeline_order.plan_orders(load, pipeline_order.OTHER_STRATEGIES[0])
    longest = max(range(len(load.work_ns)), key=load.work_ns.__getitem__)
    work = [sum(load.work_ns[m] for m in queue) for queue in plan.orders]
    assert sorted(m for queue in plan.orders for m in queue) == list(range(64))
    assert work[0 if longest in plan.orders[0] else 1] == min(work)
    assert max(plan.ends) < 1.03 * min(plan.ends)


def test_moves_never_make_a_step_longer():
    samples = schedule_mixes.multimodal_batch(32, 0.5, 3)
    p = schedule_mixes.vlm_plan(samples, 1, 2, 0.8, pipeline=schedule_mixes.PipelineShape(4, 8, True))
    found = critical_pipeline_load(MicroBatchComposer(p, samples, SectionGraph(p)))
    assert found is not None
    plan = pipeline_order.plan_orders(found[0], pipeline_order.OrderStrategy(350, 1))
    moved = pipeline_order.improve_last_order(found[0], plan)
    assert moved.end <= plan.end
    assert sorted(m for queue in moved.orders for m in queue) == list(range(32))


def test_two_stages_with_a_split_backward_are_within_two_percent_of_the_bound():
    samples = schedule_mixes.multimodal_batch(64, 0.33, 0)
    p = schedule_mixes.vlm_plan(samples, 1, 2, 0.8, pipeline=schedule_mixes.PipelineShape(2, 8, True))
    assert schedule_with_makespan(p, samples)[1] <= 1.02 * schedule_bound(p, samples).ns


def test_orders_are_not_planned_for_stages_that_share_ranks_or_feed_others():
    samples = schedule_mixes.multimodal_batch(8, 0.5, 0)
    whole = schedule_mixes.vlm_plan(samples, 1, 2, 0.8)
    assert critical_pipeline_load(MicroBatchComposer(whole, samples, SectionGraph(whole))) is None
