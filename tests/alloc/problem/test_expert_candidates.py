"""ep as a choice of `allocate`: where experts do not fit a rank they are divided, and the solver's plan is
the best of all pinned ones."""

from __future__ import annotations

from itertools import product

import pytest

from secc.alloc.problem.build_problem import build_problem
from secc.alloc.problem.candidates import build_workload
from secc.alloc.problem.pins import parse_pins
from secc.alloc.solver.cpsat_model import solve_allocation
from secc.cluster import parse_cluster
from secc.errors import UserError
from secc.ir.dialect.ops import GraphOp, graph_of
from secc.ir.dialect.python_attributes import float_attr
from secc.ir.text_io.module_text import parse_module

GRAPH = """
sec.graph "mixture" {{
  sec.symbol "B" kind "rows" key "input_ids" dim 0
  sec.pattern when [] share "1.0" {{B = 1}}
  sec.block "lm" class "LM" params {params} trainable {params} layers 8 {{
    experts = [64 : i64], expert_layers = 8 : i64, expert_params = {experts} : i64,
    expert_trainable = {experts} : i64, expert_size = {size} : i64, expert_width = 2048 : i64,
    bytes = {bytes} : i64, trainable_bytes = {bytes} : i64}}
  sec.section "lm" mode "train" when [] blocks ["lm"]
  sec.case "all" when [] {{
    %ids = sec.input "input_ids" : !sec.tensor<[B, 1024], i64>
    %h = sec.call "lm" (%ids) args "$0" outs [""] in @lm {{
      flops = "{flops}*B", work = "{flops}*B", saved = "200000000*B", moved = "100000000*B", ops = 800 : i64,
      routed = "{routed}*B", routed_work = "{routed}*B", cost = "counted", narrow = 768 : i64,
      layers = 8 : i64, kept = "33554432*B", units = 8 : i64, working = "30000000*B", again = "{flops}*B",
      again_moved = "0"}} : !sec.tensor<[B, 1024, 2048], bf16, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @lm
    sec.return constant "0.0"
  }}
}}
"""
CLUSTER = "1x8xH100"


def _graph(expert_params: int) -> GraphOp:
    params, routed = expert_params + 200_000_000, 2 * 1024 * 8 * (expert_params // 64)
    text = GRAPH.format(
        params=params,
        experts=expert_params,
        size=expert_params // 64 // 8,
        bytes=2 * params,
        flops=routed + 400_000_000 * 1024,
        routed=routed,
    )
    return graph_of(parse_module(text))


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
    graph = _graph(expert_params)
    best, ep = _step_ns(graph) or (0, 0)
    pinned = [
        found
        for parts, dp in product((1, 2, 4, 8), range(1, 9))
        if (found := _step_ns(graph, f"ep={parts}", f"dp={dp}")) is not None
    ]
    assert best == min(ns for ns, _ in pinned)
    assert (ep > 1) == (expert_params > 10**10)  # 24e9 of experts need more than one device, 0.6e9 do not


def test_uneven_experts_make_parts_dearer() -> None:
    graph = _graph(24_000_000_000)
    even = _step_ns(graph, "ep=8", "dp=8")
    next(iter(graph.sections)).attributes["expert_load"] = float_attr(1.0)
    uneven = _step_ns(graph, "ep=8", "dp=8")
    assert even is not None and uneven is not None and uneven[0] > even[0]


def test_stages_leave_no_room_for_parts_that_nobody_asked_for() -> None:
    """With pp=8 on eight ranks there is one replica, so an ep above 1 is no choice, and no error."""
    found = _step_ns(_graph(600_000_000), "pp=8")
    assert found is not None and found[1] == 1
