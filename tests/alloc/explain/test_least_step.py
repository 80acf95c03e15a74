"""The least step of every plan, held against plans of small problems."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from secc.alloc.explain.least_step import bound_every_plan
from secc.alloc.problem import candidate_pruning
from secc.alloc.problem.build_problem import build_problem
from secc.alloc.problem.pins import Pins, parse_pins
from secc.alloc.problem.types import Assignment, Problem
from secc.alloc.problem.workload import Workload, build_workload
from secc.alloc.refine.schedule_evaluation import BatchSamples, PlanEvaluator
from secc.cluster import parse_cluster
from secc.ir.analysis import sample_sizes
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io import module_text
from tests.alloc.refine.test_local_search import VLM, hand_out_ranks, vlm_problem
from tests.alloc.test_allocate import with_cuttable_blocks


@pytest.fixture
def all_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps dominated candidates, as the bound holds for them, too."""
    monkeypatch.setattr(candidate_pruning, "prune_dominated", lambda found, *_: tuple(found))


def staged_problem(ranks: int) -> tuple[Workload, BatchSamples]:
    """An encoder and a language model that can be cut into stages and shards, on GPUs, for a batch of unlike
    samples."""
    text = with_cuttable_blocks(VLM.read_text()).replace(
        'optional ["pixel_values"]', 'optional ["pixel_values"] widths "own"'
    )
    graph = graph_of(module_text.parse_module(text))
    images = [(frozenset({"pixel_values"}), {"B": 1, "S": 40 + 60 * k, "n": 1 + k % 4}) for k in range(8)]
    texts = [(frozenset[str](), {"B": 1, "S": 20 + 20 * k, "n": 0}) for k in range(8)]
    graph.attributes[sample_sizes.SAMPLES_ATTRIBUTE] = sample_sizes.samples_attr(
        ["B", "S", "n"], images + texts
    )
    work = build_workload(graph, parse_cluster(f"1x{ranks}xH100"), 16)
    return work, sample_sizes.draw_batches(graph, 16, 1)[0]


def shortest_steps(asked: Problem, evaluator: PlanEvaluator, count: int) -> list[int]:
    """Steps on the first batch of `count` plans drawn from all with and without shared ranks, if they fit."""
    names = [*asked.sections]
    plans: list[Assignment] = []
    for i, a in enumerate(asked.sections[names[0]]):
        for k, b in enumerate(asked.sections[names[1]]):
            choice = dict(zip(names, (i, k), strict=True))
            if a.ranks + b.ranks <= asked.ranks:
                plans.append(Assignment(choice, {n: n for n in names}))
            if a.ranks == b.ranks:
                plans.append(Assignment(choice, dict.fromkeys(names, names[0])))
    drawn = random.Random(3).sample(plans, min(count, len(plans)))
    found = [evaluator.evaluate_batch(a, hand_out_ranks(asked, a)) for a in drawn]
    return sorted(e.time_ns for e in found if e.fits)


@pytest.mark.usefixtures("all_candidates")
@pytest.mark.parametrize("ragged", [False, True])
def test_no_plan_on_cpus_takes_less_than_the_least_step(ragged: bool) -> None:
    _, _, evaluator = vlm_problem(ragged, ranks=3)
    asked = build_problem(evaluator.work, 3, "auto", Pins())
    batch = evaluator.batches[0]
    least = bound_every_plan(evaluator.work, Pins(), 3, [batch])
    steps = shortest_steps(asked, evaluator, 80)
    assert least <= steps[0] < 1.3 * least


@pytest.mark.usefixtures("all_candidates")
def test_no_plan_of_shards_and_stages_takes_less_than_the_least_step() -> None:
    work, batch = staged_problem(4)
    asked = build_problem(work, 4, "auto", Pins())
    evaluator = PlanEvaluator(work, asked)
    least = bound_every_plan(work, Pins(), 4, [batch])
    shapes = {(c.tp, c.pp) for c in asked.sections["lm"]}
    assert {(1, 1), (1, 2), (2, 1)} <= shapes
    steps = shortest_steps(asked, evaluator, 150)
    assert 0 < least <= steps[0]


def test_pins_raise_the_least_step_and_other_degrees_do_not() -> None:
    """Shards compute what is replicated on every rank, so their work is more."""
    work, batch = staged_problem(4)
    free = bound_every_plan(work, Pins(), 4, [batch])
    pinned = bound_every_plan(work, parse_pins(["lm.tp=4"], work.loads), 4, [batch])
    assert free < pinned
    assert bound_every_plan(work, Pins(), 4, [batch, batch]) == free
    assert bound_every_plan(work, Pins(), 8, [batch]) <= free


def test_nothing_is_said_where_nothing_fits() -> None:
    work, batch = staged_problem(4)
    device = replace(work.cluster.device, memory=1 << 20)
    assert (
        bound_every_plan(replace(work, cluster=replace(work.cluster, device=device)), Pins(), 4, [batch]) == 0
    )
