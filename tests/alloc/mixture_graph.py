"""The graph of a section with a mixture of experts, for tests of prices and of allocation."""

from __future__ import annotations

from secc.ir.dialect.ops import GraphOp, graph_of
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


def mixture_graph(expert_params: int, listed: bool = False) -> GraphOp:
    params, routed = expert_params + 200_000_000, 2 * 1024 * 8 * (expert_params // 64)
    text = GRAPH.format(
        params=params,
        experts=expert_params,
        size=expert_params // 64 // 8,
        bytes=2 * params,
        flops=routed + 400_000_000 * 1024,
        routed=routed,
    )
    if listed:  # products are not known to be experts', but their rows were counted: 8 choices in 8 mixtures
        text = text.replace(f'routed = "{routed}*B", routed_work = "{routed}*B", ', "")
        text = text.replace("expert_layers = 8", "listed_choices = 64000 : i64, expert_layers = 8")
    return graph_of(parse_module(text))
