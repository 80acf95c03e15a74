"""No stages are weighed for layers that cannot be cut apart, unless they are pinned; the report says why."""

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

GRAPH = """
sec.graph "texts" {{
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.pattern when [] share "1.0" {{B = 1}}
  sec.block "tower" class "Tower" params 2000000 trainable 2000000 component "tower" layers 24 when [] {{
    {whole} bytes = 4000000 : i64, trainable_bytes = 4000000 : i64}}
  sec.case "all" when [] {{
    %ids = sec.input "ids" : !sec.tensor<[B], i64>
    %h = sec.call "tower" (%ids) args "$0" outs [""] {{
      mode = "train", flops = "2000000*B", work = "2000000*B", saved = "1000*B", moved = "1000*B",
      cost = "counted", layers = 24 : i64}} : !sec.tensor<[B, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l)
    sec.return constant "0.0"
  }}
}}
"""
REASON = "one block, because its glue changes"


@pytest.mark.parametrize(
    ("whole", "pins", "stages"),
    [
        ("", [], {1, 2, 3, 4, 5, 6, 8}),
        (f'whole = "{REASON}",', [], {1}),
        (f'whole = "{REASON}",', ["tower.pp=2"], {2}),
    ],
    ids=["layers", "whole", "pinned"],
)
def test_stages_that_are_weighed(whole: str, pins: list[str], stages: set[int]) -> None:
    module = parse_module(GRAPH.format(whole=whole))
    run_passes(module, parse_pipeline("coarsen"))
    section = graph_of(module).sections[0]
    noted = (f"its layers cannot be stages: tower is {REASON}",)
    assert get_strings(section, "notes") == (noted if whole else ())
    work = build_workload(graph_of(module), parse_cluster("1x8xH100"), 64)
    shapes = parallel_shapes(work, work.loads["tower"], parse_pins(pins, ["tower"]), 8)
    assert {shape.pp for shape in shapes} == stages
