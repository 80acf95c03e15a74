"""The solver's choices under the scheduler that ranks run, and the local search among them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from xdsl.dialects.builtin import StringAttr

from secc.alloc.explain import plan_choices
from secc.alloc.problem import build_problem as problems
from secc.alloc.problem.build_problem import build_problem
from secc.alloc.problem.candidate_memory import memory_on_rank
from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.types import Assignment, Problem
from secc.alloc.problem.workload import build_workload
from secc.alloc.refine import local_search
from secc.alloc.refine import schedule_evaluation as trials
from secc.alloc.refine.local_search import (
    MOST_LIGHTER_PLANS,
    RefinedPlan,
    _LocalSearch,
    refine_by_simulation,
)
from secc.alloc.refine.schedule_evaluation import Evaluation, GroupRanks, PlanEvaluator
from secc.alloc.solver.cpsat_model import solve_allocation
from secc.cluster import parse_cluster
from secc.ir.analysis import sample_sizes
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io import module_text
from secc.passes.allocate import Allocate

VLM = Path(__file__).parents[2] / "passes" / "allocate_vlm.mlir"


def vlm_problem(ragged: bool = True, ranks: int = 4):
    """The example on CPUs: its module, problem and evaluator; half of the samples have images, one to four
    of them (`ragged`) or one."""
    module = module_text.parse_module(
        VLM.read_text().replace('optional ["pixel_values"]', 'optional ["pixel_values"] widths "own"')
    )
    graph = graph_of(module)
    if ragged:
        images = [(frozenset({"pixel_values"}), {"B": 1, "S": 40 + 20 * k, "n": 1 + k % 4}) for k in range(8)]
        texts = [(frozenset[str](), {"B": 1, "S": 20 + 20 * k, "n": 0}) for k in range(8)]
        graph.attributes[sample_sizes.SAMPLES_ATTRIBUTE] = sample_sizes.samples_attr(
            ["B", "S", "n"], images + texts
        )
    work = build_workload(graph, parse_cluster(f"1x{ranks}xcpu"), 32)
    asked = build_problem(work, ranks, "auto", Pins())
    return module, asked, PlanEvaluator(work, asked)


def hand_out_ranks(asked: Problem, a: Assignment) -> dict[str, list[int]]:
    """The ranks of the groups, one after the other."""
    found: dict[str, list[int]] = {}
    for g in dict.fromkeys(a.group.values()):
        start = sum(map(len, found.values()))
        found[g] = list(range(start, start + asked.sections[g][a.choice[g]].ranks))
    return found


def test_samples_print_and_parse_with_the_graph() -> None:
    module, _, evaluator = vlm_problem()
    graph = graph_of(module_text.parse_module(module_text.print_module(module)))
    assert sample_sizes.draw_batches(graph, 32, 4) == evaluator.batches and len(evaluator.batches) == 4
    for batch in evaluator.batches:
        assert sorted(s.sizes["n"] for s in batch) == sorted(
            2 * [0] * 8 + 4 * [1, 2, 3, 4]
        )  # all of them, twice
    assert sample_sizes.draw_batches(graph_of(module_text.parse_module(VLM.read_text())), 32, 4) == []


def test_without_waits_a_schedule_takes_the_closed_form_time() -> None:
    """All on one device, of mean samples: work is all there is."""
    _, asked, evaluator = vlm_problem(ragged=False, ranks=1)
    solution = solve_allocation(asked)
    assert solution is not None
    evaluation = evaluator.evaluate(solution.assignment, hand_out_ranks(asked, solution.assignment))
    assert evaluation.fits and evaluation.time_ns == pytest.approx(solution.time_ns, rel=0.01)


def test_starts_have_short_waits_where_closed_forms_leave_a_choice() -> None:
    """An encoder on more ranks than it needs takes small micro-batches: its consumer waits less."""
    _, asked, evaluator = vlm_problem()
    asked = replace(asked, strategy="apart")
    solution = solve_allocation(asked)
    assert solution is not None
    best = solution.assignment
    search = _LocalSearch(evaluator, asked, asked, 0.0, NotImplemented, NotImplemented)
    slow = [
        other
        for i, c in enumerate(asked.sections["vision"])
        if c.ranks == asked.sections["vision"][best.choice["vision"]].ranks
        and search._is_feasible(other := replace(best, choice={**best.choice, "vision": i}))
    ]
    waits = [fill_and_drain(asked, search._shorten_waits(a)) for a in slow]
    assert (
        max(waits)
        <= min(map(fill_and_drain, (asked for _ in slow), slow))
        < max(map(fill_and_drain, (asked for _ in slow), slow))
    )


@pytest.mark.parametrize(("overloaded", "other"), [("vision", "lm"), ("lm", "vision")])
def test_an_overloaded_section_gets_ranks(overloaded: str, other: str) -> None:
    """Whatever closed forms say of it: the schedule has shown that its ranks are busy all the time."""
    _, asked, evaluator = vlm_problem(ranks=8)
    asked = replace(asked, strategy="apart")
    index = {
        s: next(i for i, c in enumerate(cs) if (c.ranks, c.micro_batch) == (4, 1))
        for s, cs in asked.sections.items()
    }
    even = Assignment(index, {s: s for s in index})
    search = _LocalSearch(evaluator, asked, asked, 0.0, NotImplemented, NotImplemented)
    search.evaluated = [even]
    key = tuple(even.choice.values()), tuple(even.group.values())
    search.estimates[key] = Evaluation(10**9, True, 64, {overloaded: 990_000_000, other: 300_000_000})
    search.evaluate_here = lambda requests: [Evaluation(10**9, True, 64)] * len(requests)
    assert search._estimate_lighter_plans(even)
    for found in search.evaluated[1:]:
        ranks = {s: asked.sections[s][i].ranks for s, i in found.choice.items()}
        assert ranks[overloaded] > 4 > ranks[other] and sum(ranks.values()) <= 8
        assert search._expected_load(found, even) < search._expected_load(even, even)
    while search._estimate_lighter_plans(even):
        pass
    assert 1 < len(search.evaluated) <= 1 + MOST_LIGHTER_PLANS


def test_the_busiest_rank_of_each_section_is_known() -> None:
    _, asked, evaluator = vlm_problem(ranks=1)
    solution = solve_allocation(asked)
    assert solution is not None
    step = evaluator.evaluate(solution.assignment, hand_out_ranks(asked, solution.assignment))
    assert set(step.busy_ns) == set(asked.sections)
    assert 0.9 * step.time_ns < sum(step.busy_ns.values()) <= step.time_ns  # one rank computes all


def fill_and_drain(asked: Problem, a: Assignment) -> int:
    """Ns of fill and drain of the encoder."""
    c = asked.sections["vision"][a.choice["vision"]]
    return c.fill_ns + c.drain_ns


def test_micro_batches_in_flight_must_fit() -> None:
    _, asked, evaluator = vlm_problem()
    solution = solve_allocation(asked)
    assert solution is not None
    ranks = hand_out_ranks(asked, solution.assignment)
    assert evaluator.evaluate(solution.assignment, ranks).fits
    assert (
        not PlanEvaluator(evaluator.work, replace(asked, capacity=1 << 20))
        .evaluate(solution.assignment, ranks)
        .fits
    )


def test_a_second_micro_batch_is_expected_where_samples_outnumber_replicas() -> None:
    """Batches differ: with one micro-batch, gradients would take the place of its activations."""
    work = vlm_problem()[2].work
    load = work.loads["vision"]
    samples = work.active_sample_count(load)

    for replicas, expected in ((samples - 1, 2), (samples, 1)):
        memory = memory_on_rank(work, load, replicas, 8, "zero2", "none", 1)
        assert memory.micro_batches == expected
        assert memory == memory_on_rank(work, load, replicas, 8, "zero2", "none", expected)


def test_memory_holds_the_largest_listed_sample() -> None:
    """It has four images, the mean one has one."""
    mean, largest = (
        memory_on_rank(w, w.loads["vision"], 1, 1, "none", "none", 16)
        for w in (vlm_problem(ragged=False)[2].work, vlm_problem()[2].work)
    )
    assert mean.largest_sample == 0 < largest.activation == mean.activation
    assert (
        largest.largest_sample == 4 * largest.activation
        and largest.activation_bytes(2) == largest.activation_bytes(4) == largest.largest_sample
    )


@pytest.mark.parametrize("ragged", [False, True])
def test_the_winner_is_no_longer_than_the_solver_s_plan(ragged: bool) -> None:
    _, asked, evaluator = vlm_problem(ragged)
    solution = solve_allocation(asked)
    assert solution is not None

    def hand_out(a: Assignment) -> dict[str, list[int]]:
        return hand_out_ranks(asked, a)

    first = evaluator.evaluate(solution.assignment, hand_out(solution.assignment))
    refined = refine_by_simulation(evaluator, asked, solution.assignment, hand_out, 0.0)
    assert (
        refined.evaluation.time_ns <= first.time_ns * 1.002
        and refined.evaluation.fits
        and refined.evaluated_plans > 1
    )
    assert refined.closed_form_ns == evaluate_assignment(asked, refined.assignment).time_ns
    assert refined == refine_by_simulation(
        PlanEvaluator(evaluator.work, asked), asked, solution.assignment, hand_out, 0.0
    )


def test_evaluations_in_other_processes_find_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked, evaluator = vlm_problem()
    solution = solve_allocation(asked)
    assert solution is not None
    alone = refine_by_simulation(
        evaluator, asked, solution.assignment, lambda a: hand_out_ranks(asked, a), 0.0
    )
    monkeypatch.setattr(trials, "MIN_PARALLEL_TASKS", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert (
        refine_by_simulation(evaluator, asked, solution.assignment, lambda a: hand_out_ranks(asked, a), 0.0)
        == alone
    )


def test_plans_with_a_bad_estimate_are_not_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked, evaluator = vlm_problem()
    solution = solve_allocation(asked)
    assert solution is not None
    runs: list[int] = []
    step = PlanEvaluator.evaluate_batch

    def counted(*args: Any, soon: bool = False) -> Evaluation:
        runs.append(soon)
        return step(*args, soon=soon)

    monkeypatch.setattr(PlanEvaluator, "evaluate_batch", counted)
    refined = refine_by_simulation(
        evaluator, asked, solution.assignment, lambda a: hand_out_ranks(asked, a), 0.0
    )
    assert (
        runs.count(True) == refined.evaluated_plans
        and len(evaluator.batches) <= runs.count(False) < len(evaluator.batches) * refined.evaluated_plans
    )


def test_a_plan_that_does_not_fit_on_later_batches_does_not_win(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked, evaluator = vlm_problem()
    solution = solve_allocation(asked)
    assert solution is not None

    def refined() -> RefinedPlan:
        return refine_by_simulation(
            evaluator, asked, solution.assignment, lambda a: hand_out_ranks(asked, a), 0.0
        )

    first, step = refined(), PlanEvaluator.evaluate_batch

    def fuller(
        self: PlanEvaluator, a: Assignment, ranks: GroupRanks, index: int = 0, *, soon: bool = False
    ) -> Evaluation:
        found = step(self, a, ranks, index, soon=soon)
        return replace(found, fits=a != first.assignment or not index)

    monkeypatch.setattr(PlanEvaluator, "evaluate_batch", fuller)
    evaluator.known.clear()
    second = refined()
    assert second.evaluation.fits and second.assignment != first.assignment


def test_plans_that_fall_behind_are_not_evaluated_further(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked, evaluator = vlm_problem()
    solution = solve_allocation(asked)
    assert solution is not None and len(evaluator.batches) > 2

    def refined() -> RefinedPlan:
        return refine_by_simulation(
            evaluator, asked, solution.assignment, lambda a: hand_out_ranks(asked, a), 0.0
        )

    first, step = refined(), PlanEvaluator.evaluate_batch
    seen: list[tuple[Assignment, int]] = []

    def slower(
        self: PlanEvaluator, a: Assignment, ranks: GroupRanks, index: int = 0, *, soon: bool = False
    ) -> Evaluation:
        found = step(self, a, ranks, index, soon=soon)
        seen.append((a, index))
        is_behind = index == 1 and a != first.assignment
        return replace(found, time_ns=found.time_ns * (1 + is_behind))

    monkeypatch.setattr(PlanEvaluator, "evaluate_batch", slower)
    evaluator.known.clear()
    assert refined().assignment == first.assignment
    others = [index for a, index in seen if a != first.assignment]
    assert others.count(1) > 0 == sum(index > 1 for index in others)


def test_a_search_goes_on_from_the_plan_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked, evaluator = vlm_problem()
    solution = solve_allocation(asked)
    assert solution is not None

    single = {s: next(i for i, c in enumerate(cs) if c.ranks == 1) for s, cs in asked.sections.items()}
    slow = Assignment(single, {s: s for s in single})

    def refined(*others: Assignment) -> RefinedPlan:
        return refine_by_simulation(evaluator, asked, slow, lambda a: hand_out_ranks(asked, a), 0.0, others)

    monkeypatch.setattr(local_search, "MAX_EVALUATED_PLANS", 0)
    monkeypatch.setattr(local_search, "MOST_LIGHTER_PLANS", 0)
    monkeypatch.setattr(local_search, "MOST_PROMISING_PLANS", 0)
    monkeypatch.setattr(local_search, "start_plans", lambda *_: [])
    alone, found = refined(), refined(solution.assignment)
    assert found.assignment == solution.assignment
    assert found.evaluation.is_better_than(alone.evaluation)


def test_the_best_plan_is_tried_with_other_norms_last(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked, evaluator = vlm_problem()
    both = {s: (*cs, *(replace(c, norms="sequence") for c in cs)) for s, cs in asked.sections.items()}
    both_norms = replace(asked, sections=both, edges=problems.price_edges(evaluator.work, both))
    solution, evaluator = solve_allocation(asked), PlanEvaluator(evaluator.work, both_norms)
    assert solution is not None
    step = PlanEvaluator.evaluate_batch

    def norms(a: Assignment) -> list[str]:
        return [both[s][i].norms for s, i in a.choice.items()]

    def faster_on_parts(
        self: PlanEvaluator, a: Assignment, ranks: GroupRanks, index: int = 0, *, soon: bool = False
    ) -> Evaluation:
        found = step(self, a, ranks, index, soon=soon)
        return replace(found, time_ns=found.time_ns * (10 - norms(a).count("sequence")) // 10)

    monkeypatch.setattr(PlanEvaluator, "evaluate_batch", faster_on_parts)
    monkeypatch.setattr(local_search, "MAX_EVALUATED_PLANS", 0)
    monkeypatch.setattr(local_search, "MOST_LIGHTER_PLANS", 0)
    monkeypatch.setattr(local_search, "MOST_PROMISING_PLANS", 0)
    monkeypatch.setattr(local_search, "MOST_PLANS_WITH_OTHER_GROUPS", 0)
    monkeypatch.setattr(local_search, "start_plans", lambda *_: [])
    monkeypatch.setattr(_LocalSearch, "_shorten_waits", lambda _, a: a)

    def refined() -> RefinedPlan:
        return refine_by_simulation(
            evaluator, both_norms, solution.assignment, lambda a: hand_out_ranks(both_norms, a), 0.0
        )

    found = refined()
    assert norms(found.assignment) == ["sequence"] * len(both) and found.evaluated_plans > 1
    monkeypatch.setattr(local_search, "MOST_PLANS_WITH_OTHER_NORMS", 0)
    assert norms(refined().assignment) == ["whole"] * len(both)
    monkeypatch.setattr(local_search, "MOST_PROMISING_PLANS", 24)  # which have any other choice of a section
    assert norms(refined().assignment) == ["sequence"] * len(both)


def test_the_shown_batch_has_the_step_closest_to_the_mean() -> None:
    _, _, evaluator = vlm_problem()
    steps = (10, 30, 19, 25)
    drawn = sample_sizes.draw_search_batches(evaluator.work.graph, 32)
    evaluation = Evaluation(21, True, 1, {}, steps)
    number = evaluator.number_of_mean_batch(evaluation)
    assert drawn[number] == evaluator.batches[2]
    assert evaluator.steps_as_drawn(evaluation)[number] == steps[2]


def test_steps_are_given_in_the_order_in_which_batches_were_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_order_typical_first", lambda work, batches: [2, 0, 1, 3])
    _, _, evaluator = vlm_problem()
    evaluation = Evaluation(21, True, 1, {}, (19, 10, 30, 25))
    assert evaluator.steps_as_drawn(evaluation) == (10, 30, 19, 25)
    assert evaluator.number_of_mean_batch(evaluation) == 2
    assert evaluator.steps_as_drawn(Evaluation(21, True, 1)) == ()


def test_idle_devices_are_assigned() -> None:
    """A plan on two of four devices, where sections are apart, is near plans on more."""
    _, asked, evaluator = vlm_problem()
    asked = replace(asked, strategy="apart")
    single = {s: next(i for i, c in enumerate(cs) if c.ranks == 1) for s, cs in asked.sections.items()}
    small = Assignment(single, {s: s for s in single})
    refined = refine_by_simulation(evaluator, asked, small, lambda a: hand_out_ranks(asked, a), 0.0)
    assert sum(asked.sections[s][i].ranks for s, i in refined.assignment.choice.items()) == 4


def test_zero3_wins_only_by_its_scheduled_step() -> None:
    """Closed forms that promise too much of zero3 have it tried; what it takes is what counts."""
    _, asked, evaluator = vlm_problem()
    cheap = {
        s: tuple(replace(c, sharding="zero3", time_ns=c.time_ns // 2) for c in cs)
        for s, cs in asked.sections.items()
    }
    both = {s: (*cs, *cheap[s]) for s, cs in asked.sections.items()}
    asked = replace(asked, sections=both, edges=problems.price_edges(evaluator.work, both))
    evaluator, solution = PlanEvaluator(evaluator.work, asked), solve_allocation(asked)
    assert solution is not None and uses_zero3(asked, solution.assignment)
    looked: list[Assignment] = []

    def hand_out(a: Assignment) -> dict[str, list[int]]:
        looked.append(a)
        return hand_out_ranks(asked, a)

    refined = refine_by_simulation(evaluator, asked, solution.assignment, hand_out, 0.0)
    assert any(uses_zero3(asked, a) for a in looked) and not uses_zero3(asked, refined.assignment)
    assert (
        refined.evaluation.time_ns
        <= evaluator.evaluate(solution.assignment, hand_out_ranks(asked, solution.assignment)).time_ns
    )


def uses_zero3(asked: Problem, a: Assignment) -> bool:
    return any(asked.sections[s][i].sharding == "zero3" for s, i in a.choice.items())


def test_candidates_made_in_other_processes_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked, evaluator = vlm_problem()
    monkeypatch.setattr(problems, "PARALLEL_PRICING_RANKS", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert build_problem(evaluator.work, 4, "auto", Pins()) == asked


def test_a_plan_is_rebuilt_from_its_choices() -> None:
    module, asked, _ = vlm_problem()
    Allocate(cluster="1x4xcpu", global_batch=32).apply(module_text.make_context(), module)
    texts = plan_choices.list_plan_choices(graph_of(module))
    found = plan_choices.assignment_from_choices(asked, texts)
    assert found is not None
    again, _, _ = vlm_problem()
    other = tuple(t.replace("sharding=none", "sharding=zero1") for t in texts)
    proven = (
        *("status=OPTIMAL", "gap=0.25", "tried=9"),
        "dynamic_cp/sections/lm/section=0.5",
        "dynamic_cp/sections/lm/any=0.25",
        "dynamic_cp/step_s/priced as dealt=0.25",
        "micro_batches/lm/1=0.5",
        "micro_batches/lm/2=0.25",
        "interleaved/lm/loop=1e-05",
        "sample_limits/lm/4=0.125",
        "dropped/lm/v=1.25",
    )
    assert other != texts
    Allocate(cluster="1x4xcpu", global_batch=32, known=other, proven=proven).apply(
        module_text.make_context(), again
    )
    assert plan_choices.list_plan_choices(graph_of(again)) == other
    status = plan_choices.format_solver_status(graph_of(again))
    assert [t for t in status if not t.startswith("simulated_s=")] == [*proven]
    record = graph_of(again).attributes["solver"]
    assert isinstance(record, StringAttr)
    solver = json.loads(record.data)
    assert solver["micro_batches"] == {"lm": {"1": 0.5, "2": 0.25}}
    assert solver["sample_limits"] == {"lm": {"4": 0.125}}
    assert solver["interleaved"] == {"lm": {"loop": 1e-05}} and solver["dropped"] == {"lm": {"v": 1.25}}
    assert solver["dynamic_cp"]["sections"] == {"lm": {"section": 0.5, "any": 0.25}}
    assert (
        plan_choices.assignment_from_choices(
            asked, [t.replace("micro_batch=", "micro_batch=7") for t in texts]
        )
        is None
    )
    small = replace(asked, capacity=1 << 20)
    assert plan_choices.assignment_from_choices(small, texts) is None


def test_a_known_plan_that_takes_longer_with_captured_layers_is_not_taken() -> None:
    """Unless it was as slow when it was chosen."""
    module, _, _ = vlm_problem()
    Allocate(cluster="1x4xcpu", global_batch=32).apply(module_text.make_context(), module)
    best = plan_choices.list_plan_choices(graph_of(module))
    step_s = plan_choices.parse_simulated_step(plan_choices.format_solver_status(graph_of(module)))
    slower = tuple(t.replace("sharding=none", "sharding=zero1") for t in best)
    for chosen_s, choices in ((step_s / 2, best), (2 * step_s, slower)):
        again, _, _ = vlm_problem()
        known = Allocate(
            cluster="1x4xcpu", global_batch=32, known=slower, proven=(f"simulated_s={chosen_s}",)
        )
        known.apply(module_text.make_context(), again)
        assert plan_choices.list_plan_choices(graph_of(again)) == choices
