"""Orders of a pipeline's replicas where the sections in front of it decide when the step ends."""

from __future__ import annotations

import dataclasses

from secc.bounds.bounds import schedule_bound
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.schedule import pipeline_order
from secc.runtime.schedule.micro_batches import MicroBatchComposer
from secc.runtime.schedule.scheduler import schedule_with_makespan
from secc.runtime.schedule.upstream_estimate import critical_pipeline_load
from secc.runtime.validation.full_check import check_schedule
from tools import schedule_mixes


def test_micro_batches_that_owe_upstream_go_first_behind_a_few_that_need_nothing():
    """The order of sizes is 1, 3, 5, 7 of the micro-batches without and 2, 4, 6 of those with an encoder."""
    samples = [schedule_mixes.text_sample(i, 100 * n) for i, n in enumerate((1, 2, 3, 4, 5, 6, 7))]
    p = schedule_mixes.vlm_plan(samples, 1, 1, 0.8, pipeline=schedule_mixes.PipelineShape(2, 4, True))
    found = critical_pipeline_load(MicroBatchComposer(p, samples, SectionGraph(p)))
    assert found is not None
    owing = [m % 2 == 1 for m in range(7)]
    load = dataclasses.replace(found[0], needs_upstream=owing, upstream_ns=[9 * owes for owes in owing])
    assert pipeline_order.upstream_first_order(range(7), load, leading=2) == [0, 2, 1, 5, 3, 6, 4]


def test_micro_batches_that_owe_upstream_although_they_need_nothing_are_ordered_once():
    samples = [schedule_mixes.text_sample(i, 100 * n) for i, n in enumerate((1, 2, 3, 4))]
    p = schedule_mixes.vlm_plan(samples, 1, 1, 0.8, pipeline=schedule_mixes.PipelineShape(2, 4, True))
    found = critical_pipeline_load(MicroBatchComposer(p, samples, SectionGraph(p)))
    assert found is not None
    load = dataclasses.replace(found[0], needs_upstream=[False] * 4, upstream_ns=[9, 0, 9, 0])
    assert sorted(pipeline_order.upstream_first_order(range(4), load, leading=3)) == [0, 1, 2, 3]


def test_an_encoder_with_more_to_do_than_the_pipeline_gets_its_gradients_early():
    """Eight stages behind an encoder with 1.3 times the work of a stage; with orders by size alone, in which
    it waits for gradients, the two steps take 1.112 and 1.014 times their bounds."""
    ratios: list[float] = []
    for seed in (1, 3):
        samples = schedule_mixes.multimodal_batch(64, 0.5, seed)
        shape = schedule_mixes.PipelineShape(8, 16, True)
        p = schedule_mixes.vlm_plan(samples, 2, 2, 1.3, pipeline=shape)
        schedule, makespan = schedule_with_makespan(p, samples)
        check_schedule(p, samples, schedule)
        ratios.append(makespan / schedule_bound(p, samples).ns)
    assert sum(ratios) / 2 < 1.045


def test_many_replicas_behind_a_busy_encoder_end_together():
    """With orders by size alone, and no micro-batch moved to another replica, the two steps take 1.072 and
    1.071 times their bounds."""
    ratios: list[float] = []
    for seed in (0, 3):
        samples = schedule_mixes.multimodal_batch(512, 0.5, seed)
        p = schedule_mixes.vlm_plan(samples, 4, 20, 0.9, pipeline=schedule_mixes.PipelineShape(4, 8, True))
        ratios.append(schedule_with_makespan(p, samples)[1] / schedule_bound(p, samples).ns)
    assert sum(ratios) / 2 < 1.055


def test_orders_for_a_busy_encoder_are_tried_where_it_ends_about_as_late_as_the_pipeline():
    samples = schedule_mixes.multimodal_batch(32, 0.5, 1)
    p = schedule_mixes.vlm_plan(samples, 2, 2, 0.9, pipeline=schedule_mixes.PipelineShape(4, 8, True))
    found = critical_pipeline_load(MicroBatchComposer(p, samples, SectionGraph(p)))
    assert found is not None
    load = dataclasses.replace(found[0], upstream_work_ns=sum(found[0].work_ns))
    known = pipeline_order.plan_orders(load, pipeline_order.LIKELIEST_STRATEGY)

    def tried(permille: int, upstream_work_ns: int) -> int:
        ends = dataclasses.replace(known, upstream_end=max(known.ends) * permille // 1000)
        busy = dataclasses.replace(load, upstream_work_ns=upstream_work_ns)
        return len(pipeline_order.plans_for_upstream(busy, ends))

    every = len(pipeline_order.UPSTREAM_STRATEGIES)
    assert [tried(permille, load.upstream_work_ns) for permille in (900, 970, 1100)] == [0, every, every]
    assert tried(1100, 0) == 0
