"""One piece of a pipeline's layers on a rank or two: what the scheduled steps of all ways say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from xdsl.dialects.builtin import StringAttr

from secc.alloc.problem.build_problem import build_problem
from secc.alloc.problem.pins import Pins, parse_pins
from secc.alloc.problem.types import Assignment
from secc.alloc.problem.workload import build_workload
from secc.alloc.refine import interleaved_stages
from secc.alloc.refine.interleaved_stages import InterleavedPlan, choose_interleaving
from secc.alloc.refine.local_search import RefinedPlan
from secc.alloc.refine.schedule_evaluation import PlanEvaluator
from secc.cluster import parse_cluster
from secc.ir.analysis.sample_sizes import SAMPLES_ATTRIBUTE, samples_attr
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io.module_text import parse_module
from tests.alloc.explain.test_least_step import staged_problem
from tests.alloc.problem.test_row_parts import GRAPH
from tests.alloc.refine.test_local_search import hand_out_ranks

GROUPS = {"vision": "vision", "lm": "lm"}


def staged_steps(dp: int, ways: tuple[str, ...], pins: Pins) -> tuple[InterleavedPlan, dict[str, int]]:
    """The choice for a language model of two stages in `dp` replicas, and the steps of plans in which these
    ways ("one", "chunks=2", "placement=v") are pinned."""
    work, _ = staged_problem(2 * dp + 2)
    steps: dict[str, int] = {}
    chosen: InterleavedPlan | None = None
    for way in ways:
        texts = ["lm.pp=2", f"lm.dp={dp}", "lm.tp=1", "lm.micro_batch=1", "lm.sharding=none"]
        texts += ["lm.recompute=none", *([] if way == "one" else [f"lm.{way}"])]
        asked = build_problem(work, 2 * dp + 2, "apart", parse_pins(texts, work.loads))
        evaluator = PlanEvaluator(work, asked)
        vision = next(i for i, c in enumerate(asked.sections["vision"]) if c.ranks == 2)
        assignment = Assignment({"vision": vision, "lm": 0}, GROUPS)
        ranks = hand_out_ranks(asked, assignment)
        evaluation = evaluator.evaluate(assignment, ranks)
        steps[way] = evaluation.time_ns if evaluation.fits else 1 << 62
        if way == "one":
            chosen = choose_interleaving(evaluator, RefinedPlan(assignment, evaluation, 0, 1), ranks, pins)
    assert chosen is not None
    return chosen, steps


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_the_way_with_the_shortest_step_is_chosen(dp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaved_stages, "FIRST_BATCH_MARGIN", 1)
    monkeypatch.setattr(interleaved_stages, "MARGINS", dict.fromkeys(interleaved_stages.MARGINS, 0))
    chosen, steps = staged_steps(dp, ("one", "chunks=2", "placement=v"), Pins())
    assert {"one": steps["one"], "loop": steps["chunks=2"], "v": steps["placement=v"]} == chosen.step_ns["lm"]
    c = chosen.problem.sections["lm"][chosen.refined.assignment.choice["lm"]]
    way = "one" if c.chunks == 1 else c.placement
    assert chosen.step_ns["lm"][way] == min(steps.values()) == chosen.refined.evaluation.time_ns


def test_ways_that_are_clearly_longer_on_the_first_batch_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interleaved_stages, "FIRST_BATCH_MARGIN", -0.99)
    chosen, _ = staged_steps(2, ("one",), Pins())
    assert chosen.step_ns == {} and chosen.dropped["lm"].keys() == {"loop", "v"}
    assert all(0.1 < ratio < 10 for ratio in chosen.dropped["lm"].values())


def test_ways_that_are_longer_than_they_have_to_be_on_the_first_batch_are_not_tried_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, steps = staged_steps(2, ("one", "chunks=2", "placement=v"), Pins())
    least = min(steps["chunks=2"], steps["placement=v"]) / steps["one"]
    margin = 1 - 0.9 * least / (1 + interleaved_stages.FIRST_BATCH_MARGIN)
    monkeypatch.setattr(interleaved_stages, "MARGINS", {"one": 0, "loop": margin, "v": margin})
    chosen, _ = staged_steps(2, ("one",), Pins())
    assert chosen.step_ns == {} and chosen.dropped["lm"].keys() == {"loop", "v"}


def test_small_gains_pins_and_refusals_leave_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaved_stages, "MARGINS", {"one": 0, "loop": 0.9, "v": 0.9})
    chosen, _ = staged_steps(2, ("one",), Pins())
    assert chosen.problem.sections["lm"][0].chunks == 1
    for pins in parse_pins(["lm.chunks=1"], ["lm"]), parse_pins([], ["lm"], ["lm.chunks"]):
        chosen, _ = staged_steps(2, ("one",), pins)
        assert (chosen.step_ns, chosen.refined.evaluated_plans) == ({}, 1)


@pytest.mark.parametrize("cp_per", ["section", "micro_batch"])
def test_stages_with_cp_split_their_backward_where_the_step_is_shorter(
    cp_per: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interleaved_stages, "FIRST_BATCH_MARGIN", 1)
    lengths = [1024 * (1 + i % 8) for i in range(64)]
    text = GRAPH.format(mean=sum(lengths) // len(lengths))
    graph = graph_of(parse_module(text.replace("layers 1", "layers 24").replace("layers = 1", "layers = 24")))
    graph.attributes[SAMPLES_ATTRIBUTE] = samples_attr(
        ["B", "S"], [(frozenset[str](), {"B": 1, "S": n}) for n in lengths]
    )
    graph.widths = StringAttr("own")
    work = build_workload(graph, parse_cluster("1x8xH100"), 64)
    pins = parse_pins(["lm.cp=2", "lm.pp=4", "lm.dp=1", "lm.micro_batch=1", f"lm.cp_per={cp_per}"], ["lm"])
    asked = build_problem(work, 8, "auto", pins)
    evaluator, assignment = PlanEvaluator(work, asked), Assignment({"lm": 0}, {"lm": "lm"})
    ranks = hand_out_ranks(asked, assignment)
    won = RefinedPlan(assignment, evaluator.evaluate(assignment, ranks), 0, 1)
    whole = choose_interleaving(evaluator, won, ranks, pins)
    assert "split" not in whole.step_ns.get("lm", {})  # as where stages are pinned without cp
    pins = replace(pins, numbers={"lm": {k: n for k, n in pins.numbers["lm"].items() if k != "pp"}})
    chosen = choose_interleaving(evaluator, won, ranks, pins)
    steps = chosen.step_ns["lm"]
    assert steps["one"] == won.evaluation.time_ns and ("loop" in steps) == (cp_per == "section")
    c = chosen.problem.sections["lm"][0]
    assert (c.backward, c.cp_per) == ("split" if steps["split"] == min(steps.values()) else "whole", cp_per)
    assert chosen.refined.evaluation.time_ns == min(steps.values()) < won.evaluation.time_ns
