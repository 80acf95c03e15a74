"""Whether samples are dealt to ranks of cp, as a choice of `allocate`: where the scheduled step is shorter,
and never where it is pinned otherwise or impossible."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from xdsl.context import Context
from xdsl.dialects.builtin import StringAttr

from secc.alloc.problem.build_problem import build_problem
from secc.alloc.problem.dealt_prices import DealtPrices
from secc.alloc.problem.pins import parse_pins
from secc.alloc.problem.types import Candidate
from secc.alloc.refine import dealt_sections
from secc.alloc.refine.dealt_sections import DealtPlan, choose_dealing
from secc.alloc.refine.local_search import RefinedPlan
from secc.alloc.refine.schedule_evaluation import PlanEvaluator
from secc.alloc.solver.cpsat_model import solve_allocation
from secc.errors import UserError
from secc.ir.analysis.dataflow import get_number, get_string
from secc.ir.analysis.sample_sizes import SAMPLES_ATTRIBUTE, samples_attr
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io.module_text import parse_module
from secc.passes.allocate import Allocate, SolvedAllocation
from tests.alloc.problem.test_row_parts import GRAPH, LONG, build_long_workload


def choose_cp_per(lengths: list[int], *pins: str) -> tuple[Candidate, int, int]:
    """Returns the section's candidate after the choice between dividing and dealing samples, and the
    scheduled step before and after it, in ns."""
    dealt, first = choose_ways(lengths, *pins)
    chosen = dealt.problem.sections["lm"][dealt.refined.assignment.choice["lm"]]
    return chosen, first.evaluation.time_ns, dealt.refined.evaluation.time_ns


def choose_ways(lengths: list[int], *pins: str) -> tuple[DealtPlan, RefinedPlan]:
    """Returns the plan after the choice between dividing and dealing samples, and the one before it."""
    work, parsed = build_long_workload(lengths), parse_pins([f"lm.{pin}" for pin in pins], ["lm"])
    work.graph.widths = StringAttr("own")
    problem = build_problem(work, 8, "auto", parsed)
    solution = solve_allocation(problem)
    assert solution is not None
    evaluator, ranks = PlanEvaluator(work, problem), {"lm": list(range(8))}
    first = RefinedPlan(
        solution.assignment, evaluator.evaluate(solution.assignment, ranks), solution.time_ns, 1
    )
    return choose_dealing(evaluator, first, ranks, parsed, 1 / 128), first


def test_ways_that_are_clearly_longer_on_the_first_batch_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dealt, _ = choose_ways(LONG, "cp=8")
    assert dealt.step_ns["lm"].keys() == {"section", "any", "one_or_all"} and not dealt.dropped
    monkeypatch.setattr(dealt_sections, "FIRST_BATCH_MARGIN", -0.99)
    dealt, first = choose_ways(LONG, "cp=8")
    assert dealt.refined == first and dealt.step_ns == {}
    assert dealt.dropped["lm"].keys() == {"any", "one_or_all"}
    assert all(0.1 < ratio < 10 for ratio in dealt.dropped["lm"].values())


def test_short_samples_are_dealt_where_the_step_is_shorter() -> None:
    chosen, divided_ns, dealt_ns = choose_cp_per(LONG, "cp=8")
    assert chosen.cp == 8 and chosen.cp_per == "micro_batch"
    assert dealt_ns < divided_ns


def test_equal_long_samples_and_pinned_sections_are_divided() -> None:
    assert choose_cp_per([131_072] * 16, "cp=8")[0].cp_per == "section"
    assert choose_cp_per(LONG, "cp=8", "cp_per=section")[0].cp_per == "section"


def test_degrees_are_limited_by_a_pin() -> None:
    chosen, _, one_or_all_ns = choose_cp_per(LONG, "cp=8", "cp_degrees=one_or_all")
    assert chosen.subgroup_sizes == (1,)
    chosen, _, any_ns = choose_cp_per(LONG, "cp=8")
    assert chosen.subgroup_sizes == (1, 2, 4) and any_ns <= one_or_all_ns


def test_dealt_samples_cost_at_most_what_divided_ones_do() -> None:
    """And what they cost with the longest sample's share where no subgroup has memory for any."""
    work = build_long_workload(LONG)
    divided = build_problem(work, 8, "auto", parse_pins(["lm.cp=8"], ["lm"])).sections["lm"]
    prices = DealtPrices(work, work.loads["lm"])
    dealt = [prices.price_as_dealt(c) for c in divided]
    assert all(prices.price_as_divided(d) == c for d, c in zip(dealt, divided, strict=True))
    assert all(d.time_ns <= c.time_ns for d, c in zip(dealt, divided, strict=True))
    assert min(d.time_ns for d in dealt) < min(c.time_ns for c in divided)
    equal = build_long_workload([131_072] * 16)
    for c in build_problem(equal, 8, "auto", parse_pins(["lm.cp=8"], ["lm"])).sections["lm"]:
        assert DealtPrices(equal, equal.loads["lm"]).price_as_dealt(c).time_ns == c.time_ns


def test_ranks_are_divided_by_what_dealt_samples_cost() -> None:
    """The plan has a larger cp and fewer replicas than the best one for divided samples, and is shorter."""
    lengths = [4096] * 44 + [16_384] * 3 + [131_072]
    module = parse_module(GRAPH.format(mean=sum(lengths) // len(lengths)))
    graph = graph_of(module)
    listed = [(frozenset[str](), {"B": 1, "S": n}) for n in lengths]
    graph.attributes[SAMPLES_ATTRIBUTE] = samples_attr(["B", "S"], listed)
    graph.widths = StringAttr("own")
    Allocate(cluster="2x8xH100", global_batch=48).apply(Context(), module)
    (section,) = graph.sections
    assert get_string(section, "cp_per") == "micro_batch" and get_number(section, "cp") == 8
    solver = json.loads(get_string(graph, "solver") or "")
    steps = solver["dynamic_cp"]["step_s"]
    assert solver["simulated_s"] == steps["priced as dealt"] < steps["priced as divided"]
    assert solver["simulated_s"] == min(solver["dynamic_cp"]["sections"]["lm"].values())


TEACHER = """
  sec.block "teacher" class "Teacher" params 32000000000 trainable 0 layers 48 {
    bytes = 64000000000 : i64, trainable_bytes = 0 : i64, tp = [2, 4, 8]}
  sec.section "teacher" mode "forward" when [] blocks ["teacher"]
"""
TEACHER_CALL = """
    %t = sec.call "teacher" (%ids) args "$0" outs [""] in @teacher {
      flops = "64000000000*B*S", work = "64000000000*B*S", attention = "1050000*B*S**2",
      attention_work = "1050000*B*S**2", saved = "0", moved = "160000000*B*S", exchanged = "400000*B*S",
      ops = 1600 : i64, cost = "counted", narrow = 5120 : i64, layers = 48 : i64}
      : !sec.tensor<[B, S, 64], bf16>
"""


def test_frozen_weights_may_leave_for_dealt_samples_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a teacher on the host save nothing where all samples are divided, since it waits for its
    student. They do where the student deals its samples."""
    monkeypatch.setattr(Allocate, "_solve_with_host_memory", lambda *_: None)
    lengths = [round(32_768 / (1 - 0.75 * (0.5 + 37 * i % 64) / 64)) for i in range(64)]
    text = GRAPH.format(mean=sum(lengths) // 64)
    text = (
        text.replace("200000000", "8000000000")
        .replace("layers 1", "layers 36")
        .replace("layers = 1", "layers = 36")
    )
    text = (
        text.replace("400000000", "16000000000").replace("16384*", "295000*").replace("2000000*", "3000000*")
    )
    text = text.replace('  sec.section "lm"', f'{TEACHER}  sec.section "lm"')
    call = '    %h = sec.call "lm" (%ids) args "$0" outs'
    text = text.replace(call, f'{TEACHER_CALL}    %h = sec.call "lm" (%ids, %t) args "$0, $1" outs')
    module = parse_module(text)
    graph = graph_of(module)
    listed = [(frozenset[str](), {"B": 1, "S": n}) for n in lengths]
    graph.attributes[SAMPLES_ATTRIBUTE] = samples_attr(["B", "S"], listed)
    graph.widths = StringAttr("own")
    pins = ("teacher.pp=1", "teacher.cp=1", "lm.tp=1", "lm.pp=1", "lm.dp=1", "lm.recompute=none")
    Allocate(cluster="2x8xH100", global_batch=24, set=pins).apply(Context(), module)
    assert {s.sym.data: get_string(s, "offload") for s in graph.sections} == {
        "teacher": "weights",
        "lm": "none",
    }
    steps = json.loads(get_string(graph, "solver") or "")["dynamic_cp"]["step_s"]
    assert steps["priced as dealt"] < 0.97 * steps["priced as divided"]


def test_what_cannot_be_dealt_is_refused() -> None:
    with pytest.raises(UserError, match="cp, which must be above 1"):
        choose_cp_per(LONG, "cp=1", "cp_per=micro_batch")


@pytest.mark.parametrize(("recompute", "tries"), [("full", True), ("none", False)])
def test_host_memory_is_tried_for_dealt_samples_that_run_again(recompute: str, tries: bool) -> None:
    """Copies would take longer than running layers again, but they may let a smaller cp fit."""
    pins = ("cp=8", f"recompute={recompute}", "cp_per=micro_batch")
    dealt, _ = choose_ways(LONG, *pins)
    work, parsed = build_long_workload(LONG), parse_pins([f"lm.{pin}" for pin in pins], ["lm"])
    solution = solve_allocation(dealt.problem)
    assert solution is not None
    solved = SolvedAllocation(work, dealt.problem, solution, parsed, None)
    allocate = Allocate(cluster="1x8xH100", global_batch=len(LONG))
    found = allocate.offer_host_memory(solved, dealt.refined, to_fit=True)
    assert (found is not None and "activations" in found.offloads) == tries
    assert allocate._price_as_dealt(solved) is None  # it is priced so already, as that is pinned ...
    if found is not None:  # ... but not with host memory
        assert allocate._price_as_dealt(replace(solved, work=found)) is not None
