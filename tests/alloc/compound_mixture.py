"""A model of an encoder and a mixture of experts as a graph, with samples of different sizes."""

from __future__ import annotations

import random

from xdsl.dialects.builtin import StringAttr

from secc.ir.analysis.sample_sizes import SAMPLES_ATTRIBUTE, samples_attr
from secc.ir.dialect.ops import GraphOp, graph_of
from secc.ir.text_io.module_text import parse_module

GRAPH = """
sec.graph "compound" widths "own" {{
  sec.symbol "B" kind "rows" key "input_ids" dim 0
  sec.symbol "S" kind "width" key "input_ids" dim 1
  sec.symbol "n" kind "rows" key "images" dim 0
  sec.pattern when [] share "0.4" {{B = 1, S = 600, n = 0}}
  sec.pattern when ["images"] share "0.6" {{B = 1, S = 1200, n = 3}}
  sec.block "vision" class "ViT" params 600000000 trainable 600000000 layers 24 {{
    bytes = 1200000000 : i64, trainable_bytes = 1200000000 : i64}}
  sec.block "lm" class "LM" params {params} trainable {params} layers 16 {{
    experts = [64 : i64], expert_layers = 16 : i64, expert_params = {experts} : i64,
    expert_trainable = {experts} : i64, expert_size = {size} : i64, expert_width = 2048 : i64,
    bytes = {bytes} : i64, trainable_bytes = {bytes} : i64}}
  sec.section "vision" mode "train" when ["images"] blocks ["vision"]
  sec.section "lm" mode "train" when [] blocks ["lm"]
"""
CASE = """
  sec.case "{name}" when [{when}] {{
    %ids = sec.input "input_ids" : !sec.tensor<[B, S], i64>
    {encoder}
    %h = sec.call "lm" ({arguments}) args "{places}" outs [""] in @lm {{
      flops = "{flops}*B*S", work = "{flops}*B*S + 40000*B*S*S", saved = "260000*B*S", moved = "130000*B*S",
      ops = 1600 : i64, routed = "{routed}*B*S", routed_work = "{routed}*B*S", cost = "counted",
      narrow = 768 : i64, layers = 16 : i64, kept = "66000*B*S", units = 16 : i64, working = "30000*B*S",
      again = "{flops}*B*S", again_moved = "0"}} : !sec.tensor<[B, S, 2048], bf16, grad>
    %l = sec.glue "aten.sum.default" (%h) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%l) in @lm
    sec.return constant "0.0"
  }}
"""
ENCODER = """%x = sec.input "images" : !sec.tensor<[n, 1024], bf16>
    %v = sec.call "vision" (%x) args "$0" outs [""] in @vision {
      flops = "{0}*n", work = "{0}*n", saved = "400000000*n", moved = "200000000*n", ops = 900 : i64,
      cost = "counted", narrow = 1024 : i64, layers = 24 : i64, kept = "20000000*n", units = 24 : i64,
      working = "20000000*n", again = "{0}*n", again_moved = "0"} : !sec.tensor<[n, 2048], bf16, grad>"""


def compound_mixture(expert_params: int, encoder_flops: int, seed: int) -> GraphOp:
    """The graph; the longest of the samples that it lists is ten times the mean one."""
    params, flops = expert_params + 1_000_000_000, 4 * (expert_params // 16) + 800_000_000
    routed = flops - 800_000_000
    text = GRAPH.format(
        params=params, experts=expert_params, size=expert_params // 64 // 16, bytes=2 * params
    )
    for name, when, encoder, arguments, places in (
        ("text", "", "", "%ids", "$0"),
        ("images", '"images"', ENCODER.replace("{0}", str(encoder_flops)), "%ids, %v", "$0, $1"),
    ):
        text += CASE.format(
            name=name,
            when=when,
            encoder=encoder,
            arguments=arguments,
            places=places,
            flops=flops,
            routed=routed,
        )
    graph = graph_of(parse_module(text + "}"))
    rng, samples = random.Random(seed), list[tuple[frozenset[str], dict[str, int]]]()
    for i in range(256):
        length = min(8192, int(200 + rng.expovariate(1 / 700)))
        images = 0 if i % 5 < 2 else rng.choice((1, 1, 2, 4, 7))
        when = frozenset({"images"} if images else ())
        samples.append((when, {"B": 1, "S": length + 200 * images, "n": images}))
    graph.attributes[SAMPLES_ATTRIBUTE] = samples_attr(["B", "S", "n"], samples)
    graph.widths = StringAttr("own")
    return graph
