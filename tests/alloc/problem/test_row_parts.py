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
# A tower of 0.2e9 parameters that keeps 256 MB for each frame, which is an entry of its batch.
TOWER = """
sec.graph "videos" {{
  sec.symbol "n" kind "rows" key "frames" dim 0
  sec.pattern when [] share "1.0" {{n = {mean}}}
  sec.block "tower" class "Tower" params 200000000 trainable 200000000 layers 24 {{
    bytes = 400000000 : i64, trainable_bytes = 400000000 : i64}}
  sec.section "lm" mode "train" when [] blocks ["tower"]
  sec.case "all" when [] {{
    %frames = sec.input "frames" : !sec.tensor<[n, 577, 1024], bf16>
    %h = sec.call "tower" (%frames) args "$0" outs [""] in @lm {{
      flops = "230000000000*n", work = "230000000000*n", saved = "256000000*n", moved = "128000000*n",
      exchanged = "56000000*n", entries = "n", ops = 800 : i64, cost = "counted", narrow = 1024 : i64,
      layers = 24 : i64}} : !sec.tensor<[n, 577, 1024], bf16, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @lm
    sec.return constant "0.0"
  }}
}}
"""
SHORT, LONG = [2048] * 15 + [4096], [2048] * 15 + [131_072]


def build_long_workload(lengths: list[int]) -> Workload:
    """A workload of a global batch of 64 such samples on eight devices."""
    return _build_workload(GRAPH, [{"B": 1, "S": n} for n in lengths], sum(lengths) // len(lengths))


def _build_workload(text: str, sizes: list[dict[str, int]], mean: int) -> Workload:
    graph = graph_of(parse_module(text.format(mean=mean)))
    graph.attributes[SAMPLES_ATTRIBUTE] = samples_attr([*sizes[0]], [(frozenset[str](), s) for s in sizes])
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


@pytest.mark.parametrize(("frames", "cp"), [([8] * 16, 1), ([8] * 15 + [512], 2)], ids=["short", "long"])
def test_ranks_share_the_frames_of_long_videos(frames: list[int], cp: int) -> None:
    """512 frames keep 131 GB, and a device has 80 GiB. Ranks that have whole ones exchange nothing."""
    work = _build_workload(TOWER, [{"n": n} for n in frames], sum(frames) // len(frames))
    found = _solve(work)
    assert found is not None and _chosen_cp(found) == cp
    chosen = found[0].sections["lm"][found[1].assignment.choice["lm"]]
    assert work.rank_load(work.loads["lm"], chosen.shape).row_attention == ("frames" if cp > 1 else "gather")


def test_whole_frames_are_refused_where_a_sample_has_one_entry() -> None:
    work = build_long_workload(LONG)
    with pytest.raises(UserError, match="do not work on a batch in which a sample has several entries"):
        build_problem(work, 8, "auto", parse_pins(["lm.attention=frames", "lm.cp=2"], ["lm"]))


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
