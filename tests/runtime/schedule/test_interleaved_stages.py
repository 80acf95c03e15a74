"""Pipelines with several chunks of layers on each rank: their plans, programs and times."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secc.bounds.bounds import schedule_bound
from secc.errors import UserError
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import PLACEMENTS, Plan, plan_digest, plan_to_json
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import SampleMeta
from secc.runtime.schedule import pipeline_order
from secc.runtime.schedule.micro_batches import MicroBatchComposer
from secc.runtime.schedule.scheduler import schedule_with_makespan
from secc.runtime.schedule.upstream_estimate import critical_pipeline_load
from secc.runtime.validation.full_check import check_schedule
from secc.simulate.simulator import simulate
from tools import schedule_mixes
from tools.schedule_mixes import PipelineShape


@pytest.mark.parametrize(("placement", "ranks"), [("loop", [0, 1, 0, 1]), ("v", [0, 1, 1, 0])])
def test_plan_json_has_stages_that_share_ranks(placement: str, ranks: list[int], tmp_path: Path) -> None:
    p = _language_model(PipelineShape(2, chunks=2, placement=placement))
    sections = tuple(replace(s, module=f"sections/{s.name}.py") for s in p.sections)
    p = replace(p, global_batch=4, sections=sections)
    assert [s.mesh.ranks[0] for s in p.sections] == ranks
    (tmp_path / "plan.json").write_text(plan_to_json(p))
    assert load_plan(tmp_path).sections == p.sections
    whole = json.loads(plan_to_json(p))["sections"]["lm"]
    assert (whole["mesh"]["pp"], whole["mesh"]["ranks"], len(whole["stages"])) == (2, [0, 1], 4)

    moved: dict[str, Any] = json.loads(plan_to_json(p))
    moved["sections"]["lm"]["stages"][3]["mesh"]["ranks"] = [1 - ranks[3]]
    del moved["digest"]
    (tmp_path / "plan.json").write_text(json.dumps(moved | {"digest": plan_digest(moved)}))
    with pytest.raises(UserError, match="ranks of stage"):
        load_plan(tmp_path)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_several_chunks_on_a_rank_fill_and_drain_in_smaller_pieces(placement: str) -> None:
    samples = _texts([100] * 8)
    one, several = (
        schedule_with_makespan(_language_model(shape), samples)[1]
        for shape in (PipelineShape(4), PipelineShape(4, chunks=2, placement=placement))
    )
    micro_batch = 3 * 100 * schedule_mixes.TOKEN_NS
    assert one == (8 + 3) * micro_batch  # 1F1B: a stage waits once for each of the three others
    assert 8 * micro_batch < several < one


@st.composite
def interleaved_steps(draw: st.DrawFn, images: float) -> tuple[Plan, list[SampleMeta]]:
    """Draws a language model in several chunks on each rank, and with images an encoder that feeds it."""
    ranks, chunks = draw(st.integers(2, 4)), draw(st.integers(2, 3))
    limit = draw(st.sampled_from([0, ranks, 2 * ranks]))
    shape = PipelineShape(ranks, limit, draw(st.booleans()), chunks, draw(st.sampled_from(PLACEMENTS)))
    samples = schedule_mixes.multimodal_batch(draw(st.integers(4, 24)), images, draw(st.integers(0, 1000)))
    return schedule_mixes.vlm_plan(samples, 2, draw(st.integers(1, 3)), 0.8, pipeline=shape), samples


@given(interleaved_steps(images=0.5))
@settings(max_examples=30, deadline=None)
def test_programs_take_the_planned_time_and_no_less_than_the_bound(
    step: tuple[Plan, list[SampleMeta]],
) -> None:
    p, samples = step
    schedule, makespan = schedule_with_makespan(p, samples)
    check_schedule(p, samples, schedule)
    assert schedule_bound(p, samples).ns <= simulate(p, samples, schedule).end <= makespan


@given(interleaved_steps(images=0.0))
@settings(max_examples=30, deadline=None)
def test_a_replica_alone_starts_as_many_micro_batches_as_it_may(step: tuple[Plan, list[SampleMeta]]) -> None:
    p, samples = step
    planned = critical_pipeline_load(MicroBatchComposer(p, samples, SectionGraph(p)))
    assert planned is not None
    load, _ = planned
    replica = load.replica
    orders = pipeline_order.plan_orders(load, pipeline_order.LIKELIEST_STRATEGY)
    for order, timeline in zip(orders.orders, orders.timelines, strict=True):
        forwards, backwards, weights = timeline.task_ends
        for s, limit in enumerate(replica.max_in_flight):
            starts = [end - replica.forward_ns[s][m] for end, m in zip(forwards[s], order, strict=True)]
            releases = (weights or backwards)[s]
            held = [sum(end > start for end in releases[: k + 1]) for k, start in enumerate(starts)]
            assert max(held, default=0) <= (limit or len(order))
        tasks: dict[int, list[tuple[int, int]]] = {}
        parts = (replica.forward_ns, replica.backward_ns, replica.weight_ns)
        for ends, times in zip(timeline.task_ends, parts, strict=True):
            for s, of_stage in enumerate(ends):
                own = [(end - times[s][m], end) for end, m in zip(of_stage, order, strict=True)]
                tasks.setdefault(replica.rank_of_stage[s], []).extend(own)
        for on_rank in map(sorted, tasks.values()):  # a rank runs one task at a time
            assert all(end <= start for (_, end), (start, _) in pairwise(on_rank))


def _texts(lengths: list[int]) -> list[SampleMeta]:
    return [schedule_mixes.text_sample(i, tokens) for i, tokens in enumerate(lengths)]


def _language_model(shape: PipelineShape) -> Plan:
    """A language model on one replica."""
    section = schedule_mixes.linear_section("lm", range(1), "T", schedule_mixes.TOKEN_NS)
    stages = shape.split_section(section)
    names = [s.name for s in stages]
    return schedule_mixes.build_plan(stages, list(pairwise(names)))
