"""Cost of losses fused with linear heads: logits are recomputed and not saved."""

from __future__ import annotations

import pytest

from secc.cost.model.linear_loss import fused_loss_cost
from secc.cost.model.section_cost import section_cost
from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import GlueOp, graph_of
from secc.ir.text_io.module_text import parse_module

TEXT = """
sec.graph "g" {
  sec.symbol "N" kind "rows" key "x" dim 0
  sec.section "s" mode "train" when [] blocks []
  sec.case "c" when [] {
    %x = sec.input "x" : !sec.tensor<[N, 64], bf16, grad>
    %t = sec.input "t" : !sec.tensor<[N, 128], bf16>
    %y = sec.input "y" : !sec.tensor<[N], i64>
    %w = sec.param "head.weight" : !sec.tensor<[1000, 64], bf16, grad>
    %v = sec.param "teacher.weight" : !sec.tensor<[1000, 128], bf16>
    %a, %b = sec.glue "secc.linear_cross_entropy" (%x, %w, %y) args "$0, $1, $2" in @s
      : !sec.tensor<[], f32, grad>, !sec.tensor<[], i64>
    %c, %d = sec.glue "secc.linear_kl" (%x, %w, %t, %v) args "$0, $1, $2, $3" in @s
      : !sec.tensor<[], f32, grad>, !sec.tensor<[], i64>
    sec.term "a" (%a) in @s
    sec.return constant "0.0"
  }
}
"""


@pytest.fixture(scope="module")
def ops() -> dict[str, GlueOp]:
    (case,) = graph_of(parse_module(TEXT)).cases
    return {op.callee: op for op in case.ops if isinstance(op, GlueOp)}


@pytest.mark.parametrize(
    ("name", "flops", "backward"), [("cross_entropy", 6 * 64, 0), ("kl", 6 * 64 + 2 * 128, 0)]
)
def test_flops_follow_the_tilings(ops: dict[str, GlueOp], name: str, flops: int, backward: int) -> None:
    cost = fused_loss_cost(ops[f"secc.linear_{name}"])
    assert cost is not None
    assert size_expr.evaluate_size(cost.flops, {"N": 10}) == 10 * 1000 * flops
    assert size_expr.evaluate_size(cost.backward, {"N": 10}) == 10 * 1000 * backward


def test_many_rows_save_hidden_states_and_one_tile(ops: dict[str, GlueOp]) -> None:
    cost = fused_loss_cost(ops["secc.linear_cross_entropy"])
    assert cost is not None
    rows = 1 << 22
    kept = rows * 2 * 64 + 1000 * 2 * 64  # hidden states, the weight's gradient
    assert size_expr.evaluate_size(cost.saved, {"N": rows}) == kept + (640 << 20) + 4 * 1000 * 64
    assert size_expr.evaluate_size(cost.saved, {"N": 1200}) == 1200 * 128 + 128_000 + 1024 * 2 * 1000
    assert size_expr.evaluate_size(cost.saved, {"N": 12_000}) == 12_000 * 128 + 128_000 + 2000 * 2 * 1000
    assert size_expr.evaluate_size(cost.saved, {"N": 10}) == 10 * 128 + 128_000 + 10 * 2 * 1000


def test_section_cost_includes_fused_losses(ops: dict[str, GlueOp]) -> None:
    graph = graph_of(parse_module(TEXT))
    cost = section_cost(graph, graph.sections[0])
    sizes = {"N": 10}
    assert size_expr.evaluate_size(size_expr.parse_expr(cost.flops), sizes) == 10 * 1000 * (12 * 64 + 2 * 128)
    assert size_expr.evaluate_size(size_expr.parse_expr(cost.backward_flops), sizes) == 0


def test_a_fused_head_outside_of_layers_computes_in_the_dtype_of_its_section() -> None:
    """Else stages would be cut as if the head ran at the rate of float32, a sixteenth of that of bfloat16."""
    block = '  sec.block "layers" class "L" params 1000 trainable 1000\n'
    call = (
        '    %h = sec.call "layers" (%x) args "$0" outs [""] in @s {layers = 4 : i64} '
        ": !sec.tensor<[N, 64], bf16, grad>\n"
    )
    text = TEXT.replace("  sec.section", f"{block}  sec.section").replace("    %a, %b", f"{call}    %a, %b")
    graph = graph_of(
        parse_module(text.replace("blocks []", 'blocks ["layers"]').replace("(%x, %w", "(%h, %w"))
    )
    outside = section_cost(graph, graph.sections[0], "behind")
    assert (outside.dtype, section_cost(graph, graph.sections[0]).dtype) == ("bf16", "bf16")
