"""Whether samples are dealt to ranks of cp, as a choice of `allocate`: where the scheduled step is shorter,
and never where it is pinned otherwise or impossible."""

from __future__ import annotations

import pytest
from xdsl.dialects.builtin import StringAttr

from secc.alloc.problem.build_problem import build_problem
from secc.alloc.problem.pins import parse_pins
from secc.alloc.problem.types import Candidate
from secc.alloc.refine.dealt_sections import deal_where_shorter
from secc.alloc.refine.local_search import RefinedPlan
from secc.alloc.refine.schedule_evaluation import PlanEvaluator
from secc.alloc.solver.cpsat_model import solve_allocation
from secc.errors import UserError
from tests.alloc.problem.test_row_parts import LONG, build_long_workload


def choose_cp_per(lengths: list[int], *pins: str) -> tuple[Candidate, int, int]:
    """Returns the section's candidate after the choice between dividing and dealing samples, and the
    scheduled step before and after it, in ns."""
    work, parsed = build_long_workload(lengths), parse_pins([f"lm.{pin}" for pin in pins], ["lm"])
    work.graph.widths = StringAttr("own")
    problem = build_problem(work, 8, "auto", parsed)
    solution = solve_allocation(problem)
    assert solution is not None
    evaluator, ranks = PlanEvaluator(work, problem), {"lm": list(range(8))}
    first = RefinedPlan(
        solution.assignment, evaluator.evaluate(solution.assignment, ranks), solution.time_ns, 1
    )
    dealt, won = deal_where_shorter(evaluator, first, ranks, parsed, 1 / 128)
    chosen = dealt.sections["lm"][won.assignment.choice["lm"]]
    return chosen, first.evaluation.time_ns, won.evaluation.time_ns


def test_short_samples_are_dealt_where_the_step_is_shorter() -> None:
    chosen, divided_ns, dealt_ns = choose_cp_per(LONG, "cp=8")
    assert chosen.cp == 8 and chosen.cp_per == "micro_batch"
    assert dealt_ns < divided_ns


def test_equal_long_samples_and_pinned_sections_are_divided() -> None:
    assert choose_cp_per([131_072] * 16, "cp=8")[0].cp_per == "section"
    assert choose_cp_per(LONG, "cp=8", "cp_per=section")[0].cp_per == "section"


@pytest.mark.parametrize(
    ("pins", "reason"),
    [
        (("cp=2", "pp=2"), "cannot be combined with pp=2"),
        (("cp=2", "ep=2"), "cannot be combined with ep=2"),
        (("cp=1",), "cp, which must be above 1"),
    ],
)
def test_what_cannot_be_dealt_is_refused(pins: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        choose_cp_per(LONG, *pins, "cp_per=micro_batch")
