"""`shard-tensors` refuses a tp that leaves most layers of a block whole, even if it splits some of them."""

from __future__ import annotations

import pytest

from secc.errors import ImpossibleChoice
from secc.ir.text_io.module_text import parse_module
from secc.pass_pipeline import parse_pipeline, run_passes

SPLIT = (
    'sec.cut "tower.layers.{i}" block "tower" tp 2 styles [#sec.style<"tower.layers.{i}.up", "colwise">]'
    ' shards [#sec.shard<"tower.layers.{i}.up.weight", 0, [8]>] partial [] whole []'
)
WHOLE = (
    'sec.cut "tower.layers.{i}" block "tower" tp 2 styles [] shards [] partial []'
    ' whole [#sec.unsplit<"tower.layers.{i}.up", "too_large", "", 0, 0>]'
)
GRAPH = """
sec.graph "lm" optional [] {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "tower" class "Tower" params 600 trainable 600 {tp = [2 : i64]}
  CUTS
  sec.section "lm" mode "train" when [] blocks ["tower"] {tp = 2 : i64}
  sec.case "c" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %h = sec.call "tower" (%x) args "$0" outs [""] in @lm : !sec.tensor<[B, 8], f32, grad>
    %s = sec.glue "aten.sum.default" (%h) args "$0" in @lm : !sec.tensor<[], f32, grad>
    sec.term "loss" (%s) in @lm
    sec.return constant "0.0"
  }
}
"""


@pytest.mark.parametrize(("split", "refused"), [(3, False), (2, False), (1, True), (0, True)])
def test_layers_of_a_block_that_stay_whole(split: int, refused: bool) -> None:
    cuts = [(SPLIT if i < split else WHOLE).format(i=i) for i in range(3)]
    module = parse_module(GRAPH.replace("CUTS", "\n  ".join(cuts)))
    if not refused:
        run_passes(module, parse_pipeline("shard-tensors"))
        return
    with pytest.raises(ImpossibleChoice, match=r"lm\.tp=2 is impossible: .* too large to be shown") as error:
        run_passes(module, parse_pipeline("shard-tensors"))
    assert list(error.value.choices) == ["lm.tp"]
