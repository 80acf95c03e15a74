"""What sections cost: sums over calls and glue, cases, parameters, and times on a cluster."""

from __future__ import annotations

from fractions import Fraction

import pytest

from secc.cluster import parse
from secc.cost import time
from secc.cost.load import crossings, patterns
from secc.cost.memory import memory
from secc.cost.section import SectionCost, largest, section_cost
from secc.ir import text
from secc.ir.dialect import GraphOp, graph_of
from secc.runtime.expr import evaluate

HEAD = """sec.graph "g" optional ["px"] {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.symbol "S" kind "width" key "x" dim 1
  sec.symbol "n" kind "rows" key "px" dim 0
  sec.block "enc" class "E" params 100 trainable 0
  sec.block "f" class "F" params 1000 trainable 1000
  sec.block "g" class "F" params 1000 trainable 500
  sec.section "enc" mode "forward" when ["px"] blocks ["enc"]
  sec.section "lm" mode "train" when [] blocks ["f", "g"]
"""
X = '    %x = sec.input "x" : !sec.tensor<[B, S, 8], f32>\n'
H = "!sec.tensor<[B, S, 8], bf16, grad>"
F = f'    %f = sec.call "f" (%x) args "$0" outs [""] in @lm {{flops = "10*B*S", saved = "4*B*S", ops = 3}} : {H}\n'
ENC = (
    '    %px = sec.input "px" : !sec.tensor<[n, 8], f32>\n'
    '    %e = sec.call "enc" (%px) args "$0" outs [""] no_grad in @enc {flops = "7*n", saved = "9*n", ops = 5} : !sec.tensor<[n, 8], f32>\n'
    f'    %g = sec.call "g" (%f, %e) args "$0, $1" outs [""] in @lm {{flops = "20*B*S + n", saved = "0", ops = 4}} : {H}\n'
    f'    %s = sec.glue "aten.add.Tensor" (%f, %e) args "$0, $1" in @lm : {H}\n'
    '    %v = sec.glue "aten.view.default" (%s) args "$0, [-1, 8]" in @lm : !sec.tensor<["B*S", 8], bf16, grad>\n'
)


def graph(*cases: str, declared: str = "") -> GraphOp:
    whens = ("[]", '["px"]')
    bodies = "".join(f'  sec.case "c{i}" when {whens[i]} {{\n{ops}    sec.return (%f)\n  }}\n' for i, ops in enumerate(cases))
    return graph_of(text.parse(HEAD + declared + bodies + "}\n"))


def cost(found: GraphOp, name: str = "lm") -> SectionCost:
    return section_cost(found, next(s for s in found.sections if s.sym.data == name))


def test_calls_and_glue_add_up() -> None:
    found = cost(graph(X + F, X + F + ENC))
    assert found.flops == "30*B*S + n"
    assert found.backward_flops == "50*B*S + (3*n)//2"  # f twice its forward, g, half of which trains, one and a half times
    assert found.glue_bytes == "32*B*S + 32*n"  # the addition's operands and result; the view moves nothing
    assert found.saved == "20*B*S"
    assert (found.ops, found.dtype, found.label) == (9, "bf16", "counted")


def test_a_frozen_section_owes_nothing_backward() -> None:
    found = cost(graph(X + F, X + F + ENC), "enc")
    assert (found.flops, found.backward_flops, found.saved, found.trainable_bytes) == ("7*n", "0", "0", 0)


def test_calls_that_nobody_measured_are_estimated_and_say_so() -> None:
    found = cost(graph(X + F.replace('{flops = "10*B*S", saved = "4*B*S", ops = 3} ', "")))
    assert (found.flops, found.label) == ("2000*B*S", "default")


def test_parameters_count_once() -> None:
    read = (
        '    %p = sec.param "scale" : !sec.tensor<[8], f32, grad>\n'
        '    %q = sec.param "f.weight" : !sec.tensor<[8], f32, grad>\n'
        '    %s = sec.glue "aten.mul.Tensor" (%p, %q) args "$0, $1" in @lm : !sec.tensor<[8], f32, grad>\n'
    )
    tie = '  sec.tie names ["f.weight", "g.weight"] {params = 40, bytes = 160, trainable_bytes = 160}\n'
    found = cost(graph(X + F + read, X + F + ENC, declared=tie))
    assert (found.params, found.param_bytes) == (1000 + 1000 + 8 - 40, 4 * 2008 - 160)
    assert (found.trainable, found.trainable_bytes) == (1000 + 500 + 8 - 40, 4 * 1508 - 160)


def test_matrix_products_in_glue_count() -> None:
    product = '    %m = sec.glue "aten.mm.default" (%a, %b) args "$0, $1" in @lm : !sec.tensor<[B, 32], f32, grad>\n'
    inputs = '    %a = sec.input "x" : !sec.tensor<[B, 8], f32>\n    %b = sec.param "w" : !sec.tensor<[8, 32], f32, grad>\n'
    found = cost(graph(X + F + inputs + product))
    assert found.flops == "10*B*S + 512*B" and found.backward_flops == "20*B*S + 512*B"


def test_the_largest_case_counts() -> None:
    assert largest(["B*S", "B*S + n", "2*B*S"]) == "max(2*B*S, B*S + n)"
    assert largest(["B", "B"]) == "B" and largest([]) == "0"


def test_what_crosses_sections() -> None:
    (found,) = crossings(graph(X + F, X + F + ENC))
    assert (found.src, found.dst, found.size, found.grad) == ("enc", "lm", "32*n", False)


def test_shares_add_up_to_one() -> None:
    declared = '  sec.pattern when [] share "0.3" {B = 1, S = 5}\n  sec.pattern when ["px"] share "0.1" {B = 1, S = 9, n = 2}\n'
    found = patterns(graph(X + F, declared=declared))
    assert [p.share for p in found] == [Fraction(3, 4), Fraction(1, 4)]
    assert found[1].sizes == {"B": 1, "S": 9, "n": 2}


def test_times_are_a_roofline_in_whole_nanoseconds() -> None:
    device = parse("1x8xH100").device
    text = time.forward_ns(cost(graph(X + F, X + F + ENC)), device)
    sizes = {"B": 2, "S": 10**6, "n": 1}
    compute = 1000 * (30 * 2 * 10**6 + 1) // (989_000 * 1000 // 2)
    assert evaluate(text, sizes) == 9 * device.op_ns + compute + 1000 * (32 * 2 * 10**6 + 32) // (3350 * 1000)
    assert time.backward_ns(cost(graph(X + F)), "forward", device) == "0"


@pytest.mark.parametrize(("ranks", "messages"), [(1, 0), (2, 2), (8, 14)])
def test_ring_all_reduce(ranks: int, messages: int) -> None:
    cluster = parse("2x8xH100")
    assert time.reduce_ns(1 << 30, ranks, cluster) == messages * cluster.inside.message_ns((1 << 30) // ranks)


def test_all_reduce_over_nodes_is_slower() -> None:
    cluster = parse("2x8xH100")
    assert time.reduce_ns(1 << 30, 16, cluster) > 5 * time.reduce_ns(1 << 30, 8, cluster)


def test_memory_grows_with_what_is_in_flight() -> None:
    room = memory(cost(graph(X + F, X + F + ENC)), activation=1000)
    assert room.total(3) - room.total(1) == 2000
    assert (room.parameters, room.gradients, room.optimizer) == (8000, 6000, 12000)
