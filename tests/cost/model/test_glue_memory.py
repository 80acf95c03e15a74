"""What the backward of glue keeps and holds, counted by hand: bytes of logits of 100 words."""

from __future__ import annotations

from fractions import Fraction

import pytest

from secc.cost.model.glue_memory import BackwardNeeds, backward_needs
from secc.cost.model.section_cost import SectionCost, section_cost
from secc.ir.dialect.ops import GlueOp, GraphOp, graph_of
from secc.ir.text_io.module_text import parse_module

HALF, WIDE = (f"!sec.tensor<[B, S, 100], {dtype}, grad>" for dtype in ("bf16", "f32"))
FIXED = WIDE.replace(", grad", "")
SCALAR = "!sec.tensor<[], f32, grad>"


def graph_behind_head(*lines: str) -> GraphOp:
    """A section: its head `%f` makes logits [B, S, 100] in bf16, and the glue `lines` follow."""
    return graph_of(
        parse_module(
            'sec.graph "g" {\n'
            '  sec.symbol "B" kind "rows" key "x" dim 0\n'
            '  sec.symbol "S" kind "width" key "x" dim 1\n'
            '  sec.block "f" class "F" params 1000 trainable 1000\n'
            '  sec.section "lm" mode "train" when [] blocks ["f"]\n'
            '  sec.case "c" when [] {\n'
            '    %x = sec.input "x" : !sec.tensor<[B, S], i64>\n'
            f'    %w = sec.const "w" : {FIXED}\n'
            '    %f = sec.call "f" (%x) args "$0" outs [""] in @lm '
            f'{{flops = "B", saved = "B", ops = 1}} : {HALF}\n'
            + "".join(f"    {line}\n" for line in lines)
            + "    sec.return (%f)\n  }\n}\n"
        )
    )


def glue_line(result: str, name: str, operands: str, args: str, type_: str) -> str:
    return f'%{result} = sec.glue "aten.{name}" ({operands}) args "{args}" in @lm : {type_}'


TO_WIDE = glue_line("l", "_to_copy.default", "%f", "$0, dtype = torch.float32", WIDE)
LOGARITHMS = glue_line("p", "_log_softmax.default", "%l", "$0, -1, False", WIDE)
SUM = glue_line("s", "sum.default", "%p", "$0", SCALAR)


def cost_behind_head(*lines: str) -> SectionCost:
    found = graph_behind_head(*lines)
    return section_cost(found, found.sections[0])


@pytest.mark.parametrize(
    ("line", "needs"),
    [
        (TO_WIDE, BackwardNeeds(largest=1)),
        (glue_line("a", "add.Tensor", "%f, %w", "$0, $1", WIDE), BackwardNeeds(largest=1)),
        (glue_line("a", "add.Tensor", "%f, %f", "$0, $1", HALF), BackwardNeeds(passed=(0, 1))),
        (glue_line("a", "mul.Tensor", "%f, %w", "$0, $1", WIDE), BackwardNeeds(operands=(1,), largest=1)),
        (glue_line("a", "mul.Tensor", "%f, %f", "$0, $1", HALF), BackwardNeeds(operands=(0, 1))),
        (glue_line("a", "exp.default", "%f", "$0", HALF), BackwardNeeds(results=(0,))),
        (glue_line("a", "log.default", "%f", "$0", HALF), BackwardNeeds(operands=(0,))),
        (glue_line("a", "nonexistent.default", "%f", "$0", HALF), BackwardNeeds(results=(0,))),
    ],
)
def test_what_the_backward_of_an_operation_keeps(line: str, needs: BackwardNeeds) -> None:
    (op,) = (op for op in graph_behind_head(line).walk() if isinstance(op, GlueOp))
    found = backward_needs(op, {"B": 2, "S": 5})
    assert (found.operands, found.results, found.inside) == (needs.operands, needs.results, needs.inside)
    assert (found.passed, found.largest) == (needs.passed, needs.largest)


def test_an_operation_made_of_others_keeps_what_is_inside() -> None:
    """The loss keeps the logarithms of probabilities; its backward makes their gradients first."""
    rows = "!sec.tensor<[n, 100], f32, grad>"
    text = (
        'sec.graph "g" {\n  sec.symbol "n" kind "rows" key "x" dim 0\n'
        '  sec.section "lm" mode "train" when [] blocks []\n  sec.case "c" when [] {\n'
        '    %y = sec.input "y" : !sec.tensor<[n], i64>\n'
        f'    %w = sec.param "w" : {rows}\n'
        f"    {glue_line('s', 'cross_entropy_loss.default', '%w, %y', '$0, $1', SCALAR)}\n"
        "    sec.return (%s)\n  }\n}\n"
    )
    (op,) = (op for op in graph_of(parse_module(text)).walk() if isinstance(op, GlueOp))
    found = backward_needs(op, {"n": 1000})
    assert 1 <= found.inside < Fraction(101, 100) and found.operands in ((), (1,))
    assert 1 <= found.working < Fraction(101, 100)


def test_a_conversion_and_a_sum_keep_nothing() -> None:
    """Only the logarithms [B, S, 100] are kept, in float32, and not the logits in float32."""
    found = cost_behind_head(TO_WIDE, LOGARITHMS, SUM)
    assert found.saved == "400*B*S + B" and found.outside_saved == "400*B*S + B"
    assert found.recompute["full"].saved == "400*B*S + B"


def test_gradients_exist_from_the_last_user_to_the_maker() -> None:
    """At most two of the gradients exist at once: of the logarithms and of the logits in float32."""
    found = cost_behind_head(TO_WIDE, LOGARITHMS, SUM)
    assert found.glue_transient == "800*B*S"
    twice = cost_behind_head(
        TO_WIDE,
        LOGARITHMS,
        glue_line("q", "exp.default", "%l", "$0", WIDE),
        SUM,
        "%t = " + SUM[5:].replace("%p", "%q"),
    )
    # When the gradient of %l by its first use is made, that by its second use waits; the powers are gone.
    assert twice.saved == "800*B*S + B"
    assert twice.glue_transient == "800*B*S"


def test_the_gradient_of_a_sum_repeats_one_number() -> None:
    product = glue_line("p", "mul.Tensor", "%l, %w", "$0, $1", WIDE)
    *_, op = (op for op in graph_behind_head(TO_WIDE, product, SUM).walk() if isinstance(op, GlueOp))
    assert backward_needs(op, {"B": 2, "S": 5}).thin == (0,)


def test_a_kept_tensor_counts_once() -> None:
    """Two products keep the same factor."""
    product = glue_line("a", "mul.Tensor", "%f, %w", "$0, $1", WIDE)
    found = cost_behind_head(
        glue_line("e", "exp.default", "%f", "$0", HALF),
        glue_line("t", "mul.Tensor", "%e, %e", "$0, $1", HALF),
    )
    assert found.saved == "200*B*S + B"
    assert cost_behind_head(product).saved == "B"  # constants are no activations


def test_glue_in_front_of_layers_runs_while_they_keep_nothing() -> None:
    """Two gradients of 200 bytes a position exist in front of a block that keeps 1,000, and behind it."""
    block = (
        '%g = sec.call "f" (%q) args "$0" outs [""] in @lm {flops = "B", saved = "1000*B*S", ops = 1} : '
        + HALF
    )
    double = glue_line("q", "mul.Scalar", "%f", "$0, 2.0", HALF)
    behind = glue_line("r", "mul.Scalar", "%g", "$0, 2.0", HALF)
    assert cost_behind_head(double, block).glue_transient == "-600*B*S"
    assert cost_behind_head(double, block, behind).glue_transient == "400*B*S"
