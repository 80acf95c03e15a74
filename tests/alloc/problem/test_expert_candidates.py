"""ep as a choice of `allocate`: where experts do not fit a rank they are divided, and the solver's plan is
the best of all pinned ones."""

from __future__ import annotations

from itertools import product

import pytest

from secc.alloc.problem.build_problem import build_problem
from secc.alloc.problem.pins import parse_pins
from secc.alloc.problem.workload import build_workload
from secc.alloc.solver.cpsat_model import solve_allocation
from secc.cluster import parse_cluster
from secc.errors import UserError
from secc.ir.dialect.ops import GraphOp
from secc.ir.dialect.python_attributes import float_attr
from tests.alloc.mixture_graph import mixture_graph

CLUSTER = "1x8xH100"


def _step_ns(graph: GraphOp, *pins: str) -> tuple[int, int] | None:
    """Step time and ep of the best plan on a node of eight, None if nothing fits."""
    work = build_workload(graph, parse_cluster(CLUSTER), 64)
    try:
        problem = build_problem(work, 8, "auto", parse_pins([f"lm.{pin}" for pin in pins], ["lm"]))
    except UserError:
        return None
    solution = solve_allocation(problem)
    if solution is None:
        return None
    return solution.time_ns, problem.sections["lm"][solution.assignment.choice["lm"]].ep


@pytest.mark.parametrize("expert_params", [600_000_000, 24_000_000_000])
def test_the_chosen_ep_is_the_best_of_all(expert_params: int) -> None:
    graph = mixture_graph(expert_params)
    best, ep = _step_ns(graph) or (0, 0)
    pinned = [
        found
        for parts, dp in product((1, 2, 4, 8), range(1, 9))
        if (found := _step_ns(graph, f"ep={parts}", f"dp={dp}")) is not None
    ]
    assert best == min(ns for ns, _ in pinned)
    assert (ep > 1) == (expert_params > 10**10)  # 24e9 of experts need more than one device, 0.6e9 do not


def test_experts_in_lists_are_priced_as_stacked_ones() -> None:
    stacked, listed = (_step_ns(mixture_graph(24_000_000_000, listed)) for listed in (False, True))
    assert stacked is not None and listed is not None
    assert listed[1] == stacked[1] > 1 and listed[0] == pytest.approx(stacked[0], rel=1e-6)


def test_uneven_experts_make_parts_dearer() -> None:
    graph = mixture_graph(24_000_000_000)
    even = _step_ns(graph, "ep=8", "dp=8")
    next(iter(graph.sections)).attributes["expert_load"] = float_attr(1.0)
    uneven = _step_ns(graph, "ep=8", "dp=8")
    assert even is not None and uneven is not None and uneven[0] > even[0]


def test_stages_leave_no_room_for_parts_that_nobody_asked_for() -> None:
    """With pp=8 on eight ranks there is one replica, so an ep above 1 is no choice, and no error."""
    found = _step_ns(mixture_graph(600_000_000), "pp=8")
    assert found is not None and found[1] == 1
