"""Queues of a pipeline's replicas: one replica alone runs as in the step, long micro-batches are dealt to
few, orders near the bound."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secc.bounds.bounds import schedule_bound
from secc.runtime.plan.section_graph import Graph
from secc.runtime.schedule import pipeline_order
from secc.runtime.schedule.emit_programs import emit
from secc.runtime.schedule.list_scheduler import run
from secc.runtime.schedule.micro_batches import Composer
from secc.runtime.schedule.pipeline_replica_sim import Lane
from secc.runtime.schedule.scheduler import queue_candidate, timed_schedule
from secc.runtime.schedule.task_graph import make
from secc.runtime.schedule.upstream_estimate import critical_load
from secc.runtime.validation.full_check import check
from tools import schedule_mixes


def test_a_lane_runs_backwards_first_and_weights_when_nothing_else_is_to_be_done():
    """Two stages of two micro-batches: the first stage has weights to compute while it waits for the second
    backward."""
    times = [[10, 10], [10, 10]]
    passage = Lane(times, times, times, [0, 0]).run([0, 1], [0, 0])
    assert (passage.end, passage.starts, passage.backs) == (70, [0, 10], [40, 60])


def test_a_lane_waits_for_what_is_not_ready_and_for_room():
    times = [[10, 10], [10, 10]]
    assert Lane(times, times, (), [0, 0]).run([1, 0], [34, 5]).starts == [5, 34]
    assert Lane(times, times, (), [1, 1]).run([0, 1], [0, 0]).starts == [0, 40]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=9),
    st.integers(2, 4),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([0, 50, 120]),
)
@settings(max_examples=60)
def test_a_lane_is_what_the_step_makes_of_the_same_queue(lengths, stages, room, split, size):
    """One replica without upstream; a word takes a byte where there are `size` bytes of room."""
    samples = [schedule_mixes.text(i, n) for i, n in enumerate(lengths)]
    p = schedule_mixes.vlm(samples, 1, 1, 0.5, pipeline=schedule_mixes.Pipeline(stages, room, split))
    bounded = (
        dataclasses.replace(s, room_bytes=size, cost=dataclasses.replace(s.cost, saved="T"))
        for s in p.sections
    )
    p = dataclasses.replace(p, sections=tuple(bounded))
    composer = Composer(p, samples, Graph(p))
    load, lots = critical_load(composer)
    queue = pipeline_order.pyramid(range(len(lots)), load)
    tables = composer.queued([[lots[m] for m in queue]], [0] * len(samples))
    messages = {e.name: [(m, m) for m in range(len(samples))] if e.src != "vision" else [] for e in p.edges}
    step = make(p, composer.graph, tables, messages, in_turn=())
    assert load.lane.run(queue, [0] * len(samples)).end == run(step.jobs)[1]


@pytest.mark.parametrize(
    ("replicas", "stages", "split"), [(1, 4, True), (1, 2, False), (2, 3, True), (3, 2, True)]
)
def test_planned_queues_tell_about_when_the_step_ends(replicas, stages, split):
    """With an encoder that trains, whose order of backwards is guessed, and room for all in flight: mostly
    exactly, seldom far off."""
    errors = sorted(abs(_end_over_plan(seed, replicas, stages, split) - 1) for seed in range(15))
    assert errors[7] < 0.001 and errors[12] < 0.03 and errors[-1] < 0.1


def _end_over_plan(seed, replicas, stages, split):
    samples = schedule_mixes.multimodal(16, 0.5, seed)
    p = schedule_mixes.vlm(samples, 2, replicas, 0.8, pipeline=schedule_mixes.Pipeline(stages, 16, split))
    composer = Composer(p, samples, Graph(p))
    load, lots = critical_load(composer)
    plan = (
        pipeline_order.move(load, pipeline_order.plan(load, pipeline_order.LIKELIEST))
        if seed % 2
        else pipeline_order.plan(load, pipeline_order.LIKELIEST)
    )
    return queue_candidate(composer, load, lots, plan).makespan / plan.end


@pytest.mark.parametrize("mode", ["train", "forward"])
@pytest.mark.parametrize(("stages", "split", "together"), [(2, True, 1), (3, False, 3), (4, True, 2)])
def test_a_step_run_in_parts_is_what_its_jobs_run_together_take(mode, stages, split, together):
    """Each job waits for its rank and for what it needs alone: none ends later than the parts said, and no
    sample is wanting."""
    for seed in range(4):
        samples = schedule_mixes.multimodal(24, 0.5, seed)
        p = schedule_mixes.vlm(
            samples, 2, 3, 0.9, mode=mode, pipeline=schedule_mixes.Pipeline(stages, stages, split)
        )
        p = dataclasses.replace(
            p, sections=(dataclasses.replace(p.sections[0], micro_batch=together), *p.sections[1:])
        )
        composer = Composer(p, samples, Graph(p))
        load, lots = critical_load(composer)
        found = queue_candidate(composer, load, lots, pipeline_order.plan(load, pipeline_order.LIKELIEST))
        assert "step" not in vars(found)
        jobs, ready, free = found.step.jobs, [0] * found.count, [0] * p.world_size
        assert sorted(found.order) == list(range(found.count))
        waits = jobs.waits.copy()
        for job in found.order:
            assert waits[job] == 0
            free[jobs.rank[job]] = end = max(free[jobs.rank[job]], ready[job]) + jobs.duration[job]
            for then in jobs.successors[job]:
                ready[then], waits[then] = max(ready[then], end), waits[then] - 1
        assert max(free) <= found.makespan <= 1.1 * run(jobs)[1]
        check(p, samples, emit(p, composer.graph, found.tables, found.messages, found.numbers, found.order))


def test_stages_that_others_feed_are_run_together():
    """What a teacher says comes to the student's last stage: the step is not one of parts."""
    samples = schedule_mixes.distillation(16, 0)
    p = schedule_mixes.teacher_student(samples, 2, 2, 0.8, schedule_mixes.Pipeline(2, 4, True))
    composer = Composer(p, samples, Graph(p))
    load, lots = critical_load(composer)
    found = queue_candidate(composer, load, lots, pipeline_order.plan(load, pipeline_order.LIKELIEST))
    assert "step" in vars(found) and (found.order, found.makespan) == run(found.step.jobs)


def test_a_search_finds_the_better_of_two_orders():
    """A long micro-batch that needs the encoder stands first, so that all wait for it."""
    samples = schedule_mixes.multimodal(6, 0.5, 1)
    p = schedule_mixes.vlm(samples, 1, 1, 0.8, pipeline=schedule_mixes.Pipeline(2, 2, False))
    load, _ = critical_load(Composer(p, samples, Graph(p)))
    plan = pipeline_order._settled(load, [sorted(range(6), key=lambda m: (not load.needs[m], -load.size[m]))])
    found = pipeline_order.search(load, plan, 200)
    assert found.end < plan.end and sorted(found.queues[0]) == list(range(6))
    assert (
        pipeline_order.search(load, plan, 200).queues == found.queues
        and pipeline_order.search(load, plan, 0) is plan
    )


def test_long_micro_batches_are_dealt_to_few_replicas():
    dealt = pipeline_order.deal([9, 8, 7, 6, 1, 1, 1, 1, 1, 1], [18, 18], share=900)
    assert [[m for m in some if m < 4] for some in dealt] == [[0], [1, 2, 3]] or sorted(dealt[0])[:1] == [0]
    assert [sum([9, 8, 7, 6, 1, 1, 1, 1, 1, 1][m] for m in some) for some in dealt] == [18, 18]


def test_some_of_many_replicas_tell_what_all_lose():
    """Replicas of equal micro-batches: all end alike."""
    samples = [schedule_mixes.text(i, 100) for i in range(80)]
    p = schedule_mixes.vlm(samples, 1, 20, 0.8, pipeline=schedule_mixes.Pipeline(2, 4, True))
    found = critical_load(Composer(p, samples, Graph(p)))
    assert found is not None
    plan = pipeline_order.plan(found[0], pipeline_order.LIKELIEST)
    assert sorted(m for queue in plan.queues for m in queue) == list(range(80))
    assert {len(queue) for queue in plan.queues} == {4} and len(set(plan.ends)) == 1


def test_a_planned_queue_starts_with_what_is_there():
    """The second in the queue is late, so the third has its turn."""
    assert pipeline_order._yielding([2, 0, 1], [0, 10, 20], [25, 5, 0]) == [2, 1, 0]


def test_who_loses_more_gets_less():
    samples = schedule_mixes.multimodal(64, 0.33, 1)
    p = schedule_mixes.vlm(samples, 1, 2, 0.8, pipeline=schedule_mixes.Pipeline(4, 16, True))
    found = critical_load(Composer(p, samples, Graph(p)))
    assert found is not None
    load = found[0]
    plan = pipeline_order.plan(load, pipeline_order.OTHERS[0])
    longest = max(range(len(load.size)), key=load.size.__getitem__)
    work = [sum(load.size[m] for m in queue) for queue in plan.queues]
    assert sorted(m for queue in plan.queues for m in queue) == list(range(64))
    assert work[0 if longest in plan.queues[0] else 1] == min(work)
    assert max(plan.ends) < 1.03 * min(plan.ends)


def test_moves_never_make_a_step_longer():
    samples = schedule_mixes.multimodal(32, 0.5, 3)
    p = schedule_mixes.vlm(samples, 1, 2, 0.8, pipeline=schedule_mixes.Pipeline(4, 8, True))
    found = critical_load(Composer(p, samples, Graph(p)))
    assert found is not None
    plan = pipeline_order.plan(found[0], pipeline_order.Manner(350, 1))
    moved = pipeline_order.move(found[0], plan)
    assert moved.end <= plan.end
    assert sorted(m for queue in moved.queues for m in queue) == list(range(32))


def test_two_stages_with_a_split_backward_are_within_two_percent_of_the_bound():
    samples = schedule_mixes.multimodal(64, 0.33, 0)
    p = schedule_mixes.vlm(samples, 1, 2, 0.8, pipeline=schedule_mixes.Pipeline(2, 8, True))
    assert timed_schedule(p, samples)[1] <= 1.02 * schedule_bound(p, samples).ns


def test_stages_that_share_ranks_or_feed_others_are_left_to_the_other_order():
    samples = schedule_mixes.multimodal(8, 0.5, 0)
    whole = schedule_mixes.vlm(samples, 1, 2, 0.8)
    assert critical_load(Composer(whole, samples, Graph(whole))) is None
