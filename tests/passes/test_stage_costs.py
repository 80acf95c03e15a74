"""The costs that `split-stages` notes for a stage are those of its own ranks."""

from __future__ import annotations

from xdsl.dialects.builtin import StringAttr

from secc import pass_pipeline
from secc.cluster import GIB, parse_cluster
from secc.ir.analysis.dataflow import get_number, get_string
from secc.ir.dialect.ops import GraphOp, graph_of
from secc.ir.dialect.python_attributes import int_attr
from secc.ir.text_io import module_text
from secc.runtime.plan.expr_eval import evaluate_expr

SOURCE = """
sec.graph "lm" widths "own" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.pattern when [] share "1" {B = 1}
  sec.block "layers.0" class "Layer" params 40000000 trainable 40000000 component "" layers 2 when []
  sec.block "layers.1" class "Layer" params 40000000 trainable 40000000 component "" layers 2 when []
  sec.section "lm" mode "train" when [] blocks ["layers.0", "layers.1"]
    {dp = 4 : i64, pp = 2 : i64, ranks = RANKS, micro_batch = 1 : i64, recompute = "none", sharding = "zero3"}
  sec.case "all" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %0 = sec.call "layers.0" (%x) args "$0" outs [""] in @lm {flops = "80000*B"}
      : !sec.tensor<[B, 8], f32, grad>
    %1 = sec.call "layers.1" (%0) args "$0" outs [""] in @lm {flops = "80000*B"}
      : !sec.tensor<[B, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%1) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @lm
    sec.return constant "0.0"
  }
}
"""


TEACHER = """
  sec.block "teacher" class "Layer" params 10000000000 trainable 0 component "" layers 1 when []
  sec.section "teacher" mode "forward" when [] blocks ["teacher"]
    {dp = 8 : i64, ranks = RANKS, micro_batch = 1 : i64, recompute = "none", sharding = "none"}
"""
TEACHER_CALL = """
    %t = sec.call "teacher" (%x) args "$0" outs [""] in @teacher {flops = "80000*B"}
      : !sec.tensor<[B, 8], f32>
"""


def split_stages(source: str, ranks: list[int], batch: int = 32) -> GraphOp:
    """The graph with stages on these ranks of two nodes of four GPUs."""
    listed = ", ".join(f"{r} : i64" for r in ranks)
    module = module_text.parse_module(source.replace("RANKS", f"[{listed}]"))
    graph = graph_of(module)
    graph.attributes["cluster"] = StringAttr(parse_cluster("2x4xH100").to_json())
    graph.attributes["global_batch"] = int_attr(batch)
    pass_pipeline.run_passes(module, pass_pipeline.parse_pipeline("split-stages"))
    return graph_of(module)


def forward_ns(ranks: list[int]) -> int:
    """Of the first stage's micro-batch."""
    return evaluate_expr(get_string(split_stages(SOURCE, ranks).sections[0], "forward_ns") or "", {"B": 1})


def test_a_stage_gathers_over_the_nodes_that_its_ranks_are_on() -> None:
    """Replicas in a row have every second rank in a stage, so that it is on both nodes; with stages in a row
    each is on one."""
    spread, near = forward_ns([0, 1, 2, 3, 4, 5, 6, 7]), forward_ns([0, 4, 1, 5, 2, 6, 3, 7])
    assert spread > 1.5 * near


def test_stages_leave_room_for_what_other_sections_of_their_ranks_need() -> None:
    """Micro-batches of 16 GB, on ranks that also hold a teacher."""
    alone = SOURCE.replace('80000*B"', '80000*B", saved = "16000000000*B"')
    case = '  sec.case "all"'
    shared = alone.replace(case, TEACHER + case).replace("    %0 =", TEACHER_CALL + "    %0 =")
    usable = parse_cluster("2x4xH100").device.usable_memory / GIB
    held: dict[str, list[int]] = {}
    for source in (alone, shared):
        graph = split_stages(source, [*range(8)])
        stages = [s for s in graph.sections if get_string(s, "pipeline")]
        assert all((get_number(s, "memory_gib") or 0) <= usable for s in stages)
        held[source] = [int(get_number(s, "in_flight") or 0) for s in stages]
    assert all(few < many for few, many in zip(held[shared], held[alone], strict=True))
