"""Where `split-stages` cuts: what glue that later stages compute again is made of crosses, too."""

from __future__ import annotations

from xdsl.dialects.builtin import ModuleOp

from secc import pass_pipeline
from secc.alloc.problem.stackable_layers import count_stackable_layers
from secc.cost.model.section_cost import section_cost
from secc.ir.dialect.ops import graph_of, strings_of
from secc.ir.text_io import module_text
from secc.passes.boundaries.stage_cuts import StageUnits
from secc.runtime.plan.expr_eval import evaluate_expr

HEAD = """
sec.graph "vlm" widths "own" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.pattern when [] share "1" {B = 1}
  sec.block "tower" class "Tower" params 64 trainable 64 component "tower" layers 0 when []
  sec.block "embed" class "Embedding" params 64 trainable 64 component "" layers 6 when []
"""
LAYERS = range(6)
LAYER_BLOCKS = "".join(
    f'  sec.block "layers.{i}" class "Layer" params 4000 trainable 4000 component "" layers 6 when []\n'
    for i in LAYERS
)
SECTIONS = """
  sec.block "head" class "Linear" params 8000 trainable 8000 component "" layers 6 when []
  sec.section "tower" mode "train" when [] blocks ["tower"] {micro_batch = 1 : i64}
  sec.section "lm" mode "train" when [] blocks ["embed", LAYERS, "head"]
    {dp = 1 : i64, pp = 4 : i64, ranks = [0 : i64, 1 : i64, 2 : i64, 3 : i64], micro_batch = 1 : i64,
     recompute = "none", sharding = "none"}
  sec.case "all" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %seen = sec.call "tower" (%x) args "$0" outs [""] in @tower {flops = "80000*B"}
      : !sec.tensor<[B, 8], f32, grad>
    %words = sec.call "embed" (%x) args "$0" outs [""] in @lm {flops = "0"} : !sec.tensor<[B, 8], f32, grad>
    %0 = sec.glue "aten.add.Tensor" (%words, %seen) args "$0, $1" in @lm : !sec.tensor<[B, 8], f32, grad>
"""
TAIL = """
    %h = sec.call "head" (%6) args "$0" outs [""] in @lm {flops = "28000000000000*B"}
      : !sec.tensor<[B, 8], f32, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @lm
    sec.return constant "0.0"
  }
}
"""


def make_module() -> ModuleOp:
    """A tower's features join embeddings in glue, in front of six layers and a head as long as 3.5 of
    them."""
    calls = "".join(
        f'    %{i + 1} = sec.call "layers.{i}" (%{i}) args "$0" outs [""] in @lm'
        ' {flops = "8000000000000*B"} : !sec.tensor<[B, 8], f32, grad>\n'
        for i in LAYERS
    )
    blocks = ", ".join(f'"layers.{i}"' for i in LAYERS)
    text = HEAD + LAYER_BLOCKS + SECTIONS.replace("LAYERS", blocks) + calls + TAIL
    return module_text.parse_module(text)


def test_a_cut_costs_what_glue_computed_again_is_made_of() -> None:
    cuts = StageUnits(graph_of(make_module()), "lm").cuts
    assert set(cuts.values()) == {2 * 8 * 4}  # one tensor of eight entries, there and back


def test_a_stage_holds_no_embedding_alone_where_layers_can_be_even() -> None:
    module = make_module()
    pass_pipeline.run_passes(module, pass_pipeline.parse_pipeline("split-stages"))
    held = [strings_of(s.blocks) for s in graph_of(module).sections if s.sym.data.startswith("lm")]
    assert [sum(b.startswith("layers") for b in blocks) for blocks in held] == [2, 2, 2, 0]


PARTS = """
  sec.section "lm" mode "train" when [] blocks ["layers.0", "layers.1.norm", "layers.1.mix", "layers.1.feed",
    "layers.2"]
    {dp = 1 : i64, pp = 2 : i64, ranks = [0 : i64, 1 : i64], micro_batch = 1 : i64, recompute = "none",
     sharding = "none"}
  sec.case "all" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %0 = sec.call "layers.0" (%x) args "$0" outs [""] in @lm {flops = "9000000000*B" LAYER
    %n = sec.call "layers.1.norm" (%0) args "$0" outs [""] in @lm {flops = "1000*B" LAYER
    %m = sec.call "layers.1.mix" (%n) args "$0" outs [""] in @lm {flops = "4000000000*B" LAYER
    %1 = sec.glue "aten.add.Tensor" (%0, %m) args "$0, $1" in @lm : TENSOR
    %f = sec.call "layers.1.feed" (%1) args "$0" outs [""] in @lm {flops = "5000000000*B" LAYER
    %2 = sec.glue "aten.add.Tensor" (%1, %f) args "$0, $1" in @lm : TENSOR
    %3 = sec.call "layers.2" (%2) args "$0" outs [""] in @lm {flops = "8000000000*B" LAYER
    %l = sec.glue "aten.sum.default" (%3) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @lm
    sec.return constant "0.0"
  }
}
"""


def make_module_with_parts() -> ModuleOp:
    """Three layers; the second one, in parts, adds what its mixer and its feed-forward network return to
    what enters them."""
    attributes = dict.fromkeys((f"layers.1.{part}" for part in ("norm", "mix")), 'part_of_layer = "layers.1"')
    attributes["layers.1.feed"] = 'part_of_layer = "layers.1", largest_part'
    blocks = "".join(
        f'  sec.block "{path}" class "Part" params 4000 trainable 4000 component "" layers 3 when []'
        f" {{{attributes.get(path, '')}}}\n"
        for path in ("layers.0", *attributes, "layers.2")
    )
    tensor = "!sec.tensor<[B, 8], f32, grad>"
    noted = f', kept = "32*B", layers = 1 : i64}} : {tensor}'
    calls = PARTS.replace("LAYER", noted).replace("TENSOR", tensor)
    return module_text.parse_module(HEAD.partition("  sec.block")[0] + blocks + calls)


def test_a_layer_in_parts_is_cut_where_no_more_crosses_than_at_its_end() -> None:
    units = StageUnits(graph_of(make_module_with_parts()), "lm")
    where = {units.calls[cut][0]: size for cut, size in units.cuts.items()}
    assert where == dict.fromkeys(["layers.0", "layers.1.mix", "layers.1.feed"], 2 * 8 * 4)


def test_stages_are_even_where_a_layer_can_be_divided() -> None:
    module = make_module_with_parts()
    pass_pipeline.run_passes(module, pass_pipeline.parse_pipeline("split-stages"))
    held = [strings_of(s.blocks) for s in graph_of(module).sections]
    assert held == [("layers.0", "layers.1.norm", "layers.1.mix"), ("layers.1.feed", "layers.2")]


def test_a_layer_in_parts_counts_once() -> None:
    graph = graph_of(make_module_with_parts())
    section = graph.sections[0]
    cost = section_cost(graph, section)
    assert (cost.layers, count_stackable_layers(graph, section, cost.layers)) == (3, 3)
    assert evaluate_expr(cost.layer_input_bytes, {"B": 1}) == 3 * 32
    assert cost.outside_layers_bytes == 0 and cost.largest_layer_bytes == 3 * 4000 * 4
