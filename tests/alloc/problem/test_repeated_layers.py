"""No stages are weighed for layers that run again in the same forward, unless they are pinned: each run would
be on ranks of its own, which would hold the same weights."""

from __future__ import annotations

import pytest

from secc.alloc.problem.build_problem import parallel_shapes
from secc.alloc.problem.pins import parse_pins
from secc.alloc.problem.workload import build_workload
from secc.cluster import parse_cluster
from secc.ir.analysis.dataflow import get_strings
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io.module_text import parse_module
from secc.pass_pipeline import parse_pipeline, run_passes

SECOND_CALL = """
    %g = sec.call "tower" (%h) args "$0" outs [""] {
      mode = "train", flops = "2000000*B", work = "2000000*B", saved = "1000*B", moved = "1000*B",
      cost = "counted", layers = 24 : i64} : !sec.tensor<[B, 8], f32, grad>
"""
GRAPH = """
sec.graph "pairs" {{
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.pattern when [] share "1.0" {{B = 1}}
  sec.block "tower" class "Tower" params 2000000 trainable 2000000 component "tower" layers 24 when [] {{
    bytes = 4000000 : i64, trainable_bytes = 4000000 : i64}}
  sec.case "all" when [] {{
    %ids = sec.input "ids" : !sec.tensor<[B], i64>
    %h = sec.call "tower" (%ids) args "$0" outs [""] {{
      mode = "train", flops = "2000000*B", work = "2000000*B", saved = "1000*B", moved = "1000*B",
      cost = "counted", layers = 24 : i64}} : !sec.tensor<[B, 8], f32, grad>
    {second}
    %l = sec.glue "aten.sum.default" ({last}) args "$0" : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l)
    sec.return constant "0.0"
  }}
}}
"""
ONCE, TWICE = GRAPH.format(second="", last="%h"), GRAPH.format(second=SECOND_CALL, last="%g")


@pytest.mark.parametrize(
    ("text", "pins", "stages"),
    [(ONCE, [], {1, 2, 3, 4, 5, 6, 8}), (TWICE, [], {1}), (TWICE, ["tower.pp=2"], {2})],
    ids=["once", "twice", "pinned"],
)
def test_stages_that_are_weighed_for_repeated_layers(text: str, pins: list[str], stages: set[int]) -> None:
    module = parse_module(text)
    run_passes(module, parse_pipeline("coarsen"))
    work = build_workload(graph_of(module), parse_cluster("1x8xH100"), 64)
    shapes = parallel_shapes(work, work.loads["tower"], parse_pins(pins, ["tower"]), 8)
    assert {shape.pp for shape in shapes} == stages


@pytest.mark.parametrize(("text", "noted"), [(ONCE, False), (TWICE, True)], ids=["once", "twice"])
def test_note_about_repeated_layers(text: str, noted: bool) -> None:
    module = parse_module(text)
    run_passes(module, parse_pipeline("coarsen,allocate{cluster=1x2xH100 global_batch=8}"))
    (section,) = graph_of(module).sections
    assert any(note.startswith("no stages: ") for note in get_strings(section, "notes")) is noted
