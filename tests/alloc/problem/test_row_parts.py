"""cp as a choice of `allocate`: where a sample fits no rank its rows are divided, and the solver's plan is
the best of all pinned ones."""

from __future__ import annotations

from itertools import product

import pytest

from secc.alloc.explain.alternatives import explain_choices
from secc.alloc.problem.build_problem import build_problem, parallel_shapes
from secc.alloc.problem.pins import parse_pins
from secc.alloc.problem.types import Problem, Solution
from secc.alloc.problem.workload import Workload, build_workload
from secc.alloc.solver.cpsat_model import solve_allocation
from secc.cluster import parse_cluster
from secc.errors import UserError
from secc.ir.analysis.sample_sizes import SAMPLES_ATTRIBUTE, samples_attr
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io.module_text import parse_module

# A decoder of 0.2e9 parameters that keeps 2 MB for each token and exchanges keys and values as 28 layers of
# width 2048 do. It has no layers to cut between, and recomputation frees nothing.
GRAPH = """
sec.graph "documents" {{
  sec.symbol "B" kind "rows" key "input_ids" dim 0
  sec.symbol "S" kind "width" key "input_ids" dim 1
  sec.pattern when [] share "1.0" {{B = 1, S = {mean}}}
  sec.block "lm" class "LM" params 200000000 trainable 200000000 layers 1 {{
    bytes = 400000000 : i64, trainable_bytes = 400000000 : i64}}
  sec.section "lm" mode "train" when [] blocks ["lm"]
  sec.case "all" when [] {{
    %ids = sec.input "input_ids" : !sec.tensor<[B, S], i64>
    %h = sec.call "lm" (%ids) args "$0" outs [""] in @lm {{
      flops = "400000000*B*S", work = "400000000*B*S", attention = "16384*B*S**2",
      attention_work = "16384*B*S**2", saved = "2000000*B*S", moved = "1000000*B*S", exchanged = "229376*B*S",
      ops = 800 : i64,
      cost = "counted", narrow = 2048 : i64, layers = 1 : i64}} : !sec.tensor<[B, S, 2048], bf16, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @lm
    sec.return constant "0.0"
  }}
}}
"""
SHORT, LONG = [2048] * 15 + [4096], [2048] * 15 + [131_072]


def build_long_workload(lengths: list[int]) -> Workload:
    """A workload of a global batch of 64 such samples on eight devices."""
    module = parse_module(GRAPH.format(mean=sum(lengths) // len(lengths)))
    graph = graph_of(module)
    listed = [(frozenset[str](), {"B": 1, "S": n}) for n in lengths]
    graph.attributes[SAMPLES_ATTRIBUTE] = samples_attr(["B", "S"], listed)
    return build_workload(graph, parse_cluster("1x8xH100"), 64)


def _solve(work: Workload, *pins: str) -> tuple[Problem, Solution] | None:
    """The best plan on a node of eight, None if nothing fits."""
    try:
        problem = build_problem(work, 8, "auto", parse_pins([f"lm.{pin}" for pin in pins], ["lm"]))
    except UserError:
        return None
    solution = solve_allocation(problem)
    return None if solution is None else (problem, solution)


def _chosen_cp(found: tuple[Problem, Solution]) -> int:
    problem, solution = found
    return problem.sections["lm"][solution.assignment.choice["lm"]].cp


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
def test_the_chosen_cp_is_the_best_of_all(lengths: list[int]) -> None:
    work = build_long_workload(lengths)
    best = _solve(work)
    assert best is not None
    pinned = [
        found[1].time_ns
        for cp, dp in product((1, 2, 4, 8), range(1, 9))
        if cp * dp <= 8 and (found := _solve(work, f"cp={cp}", f"dp={dp}")) is not None
    ]
    assert best[1].time_ns == min(pinned)
    # 131,072 tokens keep 262 GB, and a device has 80 GiB.
    assert (_chosen_cp(best) > 1) == (lengths is LONG)


def test_no_cp_is_considered_where_no_sample_is_long() -> None:
    work = build_long_workload(SHORT)
    shapes = parallel_shapes(work, work.loads["lm"], parse_pins([], ["lm"]), 8)
    assert {shape.cp for shape in shapes} == {1}


def test_alternatives_say_why_rows_are_divided() -> None:
    work = build_long_workload(LONG)
    found = _solve(work)
    assert found is not None and _chosen_cp(found) == 8  # gathered keys and values do not fit with cp 4
    alternatives = explain_choices(work, *found, frozenset(), {}, None)["lm"]["alternatives"]
    fewer = next(a for a in alternatives if a["choice"] == "cp=4")
    assert not fewer["fits"] and fewer["memory"] > work.cluster.device.usable_memory
    assert fewer["layout"]["cp"] == 4
