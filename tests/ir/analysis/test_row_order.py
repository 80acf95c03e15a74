"""Which values have rows in the order of the samples."""

from __future__ import annotations

import pytest

from secc.ir.analysis.row_order import RowOrder
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io import module_text

GRAPH = """
sec.graph "g" optional ["px"] {
  sec.symbol "B" kind "rows" key "ids" dim 0
  sec.symbol "n" kind "rows" key "px" dim 0
  sec.symbol "S" kind "width" key "ids" dim 1
  sec.block "net" class "N" params 1 trainable 1 component "net" layers 1
  sec.case "c" when [] {
    %x = sec.input "ids" : !sec.tensor<[B, S], f32>
    %p = sec.input "px" : !sec.tensor<[n, S], f32>
    %y = LINE
    %z = sec.call "net" (%y) args "$0" outs [""] : !sec.tensor<RESULT, f32>
    sec.return (%z)
  }
}
"""


def glue(op: str, operands: str, args: str, shape: str) -> str:
    return f'sec.glue "aten.{op}" ({operands}) args "{args}" : !sec.tensor<{shape}, f32>'


IN_ORDER = [
    (glue("cat.default", "%x, %x", "[$0, $1], 1", '[B, "2*S"]'), '[B, "2*S"]'),
    (glue("reshape.default", "%x", "$0, [B*S]", '["B*S"]'), '["B*S"]'),
    (glue("stack.default", "%x, %x", "[$0, $1]", "[2, B, S]"), "[2, B, S]"),
    (glue("repeat_interleave.self_int", "%x", "$0, 2, 0", '["2*B", S]'), '["2*B", S]'),
    (glue("repeat.default", "%x", "$0, [1, 3]", '[B, "3*S"]'), '[B, "3*S"]'),
    (glue("cat.default", "%x, %x", "[$0, $1]", '["2*B", S]'), "[B, S]"),
]
OUT_OF_ORDER = [
    (glue("cat.default", "%x, %x", "[$0, $1]", '["2*B", S]'), '["2*B", 4]'),
    (glue("cat.default", "%x, %p", "[$0, $1], -2", '["B + n", S]'), '["B + n", 4]'),
    (glue("repeat.default", "%x", "$0, [2, 1]", '["2*B", S]'), '["2*B", S]'),
    (glue("t.default", "%x", "$0", "[S, B]"), "[S, B]"),
]


@pytest.mark.parametrize(("line", "result"), IN_ORDER + OUT_OF_ORDER)
def test_results_of_blocks_have_their_arguments_order(line: str, result: str) -> None:
    graph = graph_of(module_text.parse_module(GRAPH.replace("LINE", line).replace("RESULT", result)))
    (case,) = graph.cases
    call = next(op for op in case.ops if op.name == "sec.call")
    assert (call.results[0] in RowOrder(graph, case).out_of_order) == ((line, result) in OUT_OF_ORDER[:3])


def test_merging_a_dim_in_front_of_the_samples_mixes_them() -> None:
    turned = (
        glue("t.default", "%x", "$0", "[S, B]")
        + "\n    %w = "
        + glue("reshape.default", "%y", "$0, [B*S]", '["B*S"]')
    )
    graph = graph_of(
        module_text.parse_module(
            GRAPH.replace("LINE", turned).replace('"net" (%y)', '"net" (%w)').replace("RESULT", '["B*S"]')
        )
    )
    (case,) = graph.cases
    assert len(RowOrder(graph, case).out_of_order) == 2
