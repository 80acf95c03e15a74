"""Section costs: sums over calls and glue, cases, parameters, memory, and times on a cluster."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from secc.cluster import Cluster, parse_cluster
from secc.cost.model import roofline
from secc.cost.model.activation_copies import price_activation_copies
from secc.cost.model.collectives import RankSpan
from secc.cost.model.cost_expressions import max_expr
from secc.cost.model.memory import rank_memory
from secc.cost.model.patterns_and_transfers import input_patterns, section_transfers
from secc.cost.model.recompute_cost import RecomputeCost
from secc.cost.model.section_cost import SectionCost, section_cost
from secc.cost.model.tp_pp_scaling import cost_on_rank, price_tensor_sums
from secc.cost.model.zero3_cost import weight_copies, zero3_collectives
from secc.ir.dialect.ops import GraphOp, graph_of
from secc.ir.text_io import module_text as text
from secc.runtime.parameters.bucket_limits import BUCKET_BYTES
from secc.runtime.plan.expr_eval import evaluate_expr

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
F = (
    '    %f = sec.call "f" (%x) args "$0" outs [""] in @lm '
    f'{{flops = "10*B*S", saved = "4*B*S", ops = 3}} : {H}\n'
)
ENC = (
    '    %px = sec.input "px" : !sec.tensor<[n, 8], f32>\n'
    '    %e = sec.call "enc" (%px) args "$0" outs [""] no_grad in @enc {flops = "7*n", '
    'saved = "9*n", ops = 5} : !sec.tensor<[n, 8], f32>\n'
    '    %g = sec.call "g" (%f, %e) args "$0, $1" outs [""] in @lm '
    f'{{flops = "20*B*S + n", saved = "0", ops = 4}} : {H}\n'
    f'    %s = sec.glue "aten.add.Tensor" (%f, %e) args "$0, $1" in @lm : {H}\n'
    '    %v = sec.glue "aten.view.default" (%s) args "$0, [-1, 8]" in @lm : '
    '!sec.tensor<["B*S", 8], bf16, grad>\n'
)


def section_graph(*cases: str, declared: str = "") -> GraphOp:
    whens = ("[]", '["px"]')
    bodies = "".join(
        f'  sec.case "c{i}" when {whens[i]} {{\n{ops}    sec.return (%f)\n  }}\n'
        for i, ops in enumerate(cases)
    )
    return graph_of(text.parse_module(HEAD + declared + bodies + "}\n"))


def cost_of(found: GraphOp, name: str = "lm") -> SectionCost:
    return section_cost(found, next(s for s in found.sections if s.sym.data == name))


def test_data_dependent_sizes_are_estimated() -> None:
    decided = '  sec.symbol "rows_0" kind "data" key "" dim 0 about "(3*B*S)//4"\n'
    rows = (
        '    %f = sec.call "f" (%x) args "$0" outs [""] in @lm {flops = "10*rows_0 + B", '
        'saved = "3*rows_0", ops = 3} : '
    )
    found = cost_of(section_graph(X + rows + "!sec.tensor<[rows_0, 8], bf16, grad>\n", declared=decided))
    assert (found.flops, found.saved, found.recompute["full"].saved) == ("8*B*S + B", "2*B*S", "2*B*S")


def test_calls_and_glue_are_summed() -> None:
    found = cost_of(section_graph(X + F, X + F + ENC))
    assert found.flops == "30*B*S + n"
    assert (
        found.backward_flops == "50*B*S + (3*n)//2"
    )  # f: twice its forward; g, half of it trainable: 1.5 times
    assert found.glue_bytes == "32*B*S + 32*n"  # the addition's operands and result; the view moves nothing
    assert found.saved == "4*B*S"  # of the call: the backward of a sum keeps nothing
    assert (found.ops, found.dtype, found.label) == (9, "bf16", "counted")


UNITS = 'saved = "100*B*S", ops = 8, units = 3, kept = "10*B*S", working = "30*B*S", again = "9*B*S"'


def test_recomputation_saves_less_and_computes_more() -> None:
    """Of three layers, `full` recomputes all and `selective` one. g has no units, and keeps what it kept."""
    found = cost_of(
        section_graph(
            X + F.replace('saved = "4*B*S", ops = 3', UNITS),
            X + F.replace('saved = "4*B*S", ops = 3', UNITS) + ENC,
        )
    )
    assert found.saved == "100*B*S"
    assert found.recompute["full"] == RecomputeCost("10*B*S", "30*B*S", "9*B*S", 8)
    assert found.recompute["selective"] == RecomputeCost("70*B*S", "0", "3*B*S", 2)
    device = parse_cluster("1x8xH100").device
    once, again = (
        evaluate_expr(
            roofline.backward_ns_expression(found, "train", device, way), {"B": 1, "S": 10**6, "n": 0}
        )
        for way in ("none", "full")
    )
    assert again - once == 8 * device.op_ns + 1000 * 9 * 10**6 // (989_000 * 600)


def test_selective_recomputation_takes_every_second_equal_block() -> None:
    """Blocks f and g are equal layers in a row: the first one is recomputed, the last one is not."""
    second = F.replace('"f" (%x)', '"g" (%f)').replace("%f =", "%h =")
    whole = (X + F + second).replace('saved = "4*B*S", ops = 3', UNITS.replace("units = 3", "units = 1"))
    found = cost_of(section_graph(whole))
    assert found.recompute["selective"] == RecomputeCost("110*B*S", "0", "9*B*S", 8)
    assert found.recompute["full"].saved == "20*B*S"


def test_frozen_section_has_no_backward() -> None:
    found = cost_of(section_graph(X + F, X + F + ENC), "enc")
    assert (found.flops, found.backward_flops, found.saved, found.trainable_bytes) == ("7*n", "0", "0", 0)


def test_calls_without_counts_are_estimated() -> None:
    found = cost_of(section_graph(X + F.replace('{flops = "10*B*S", saved = "4*B*S", ops = 3} ', "")))
    assert (found.flops, found.label) == ("2000*B*S", "default")


def test_tied_parameters_count_once() -> None:
    read = (
        '    %p = sec.param "scale" : !sec.tensor<[8], f32, grad>\n'
        '    %q = sec.param "f.weight" : !sec.tensor<[8], f32, grad>\n'
        '    %s = sec.glue "aten.mul.Tensor" (%p, %q) args "$0, $1" in @lm : !sec.tensor<[8], f32, grad>\n'
    )
    tie = '  sec.tie names ["f.weight", "g.weight"] {params = 40, bytes = 160, trainable_bytes = 160}\n'
    found = cost_of(section_graph(X + F + read, X + F + ENC, declared=tie))
    assert (found.params, found.param_bytes) == (1000 + 1000 + 8 - 40, 4 * 2008 - 160)
    assert (found.trainable, found.trainable_bytes) == (1000 + 500 + 8 - 40, 4 * 1508 - 160)


def test_nested_block_counts_once_and_is_not_a_layer() -> None:
    """Such as a language model's embedding, when glue mixes its rows with others before the layers."""
    inner = F.replace('"f"', '"f.embed"').replace("%f", "%i")
    block = '  sec.block "f.embed" class "E" params 400 trainable 400\n'
    found = cost_of(section_graph(X + inner + F.replace('saved = "4*B*S", ops = 3', UNITS), declared=block))
    assert (found.params, found.trainable, found.param_bytes) == (1000, 1000, 4000)
    assert (found.largest_layer_bytes, found.outside_layers_bytes) == (-(-4 * 600 // 3), 4 * 400)


def test_transient_memory_of_forward_without_backward() -> None:
    """The call holds up to 100 bytes per row, 32 of them its result, which glue needs later."""
    made = '    %t = sec.glue "aten.tanh.default" (%e) args "$0" in @enc : !sec.tensor<[n, 8], f32>\n'
    frozen = section_graph(X + F + ENC.replace("ops = 5", 'ops = 5, peak = "100*n"') + made)
    assert cost_of(frozen, "enc").call_transient == "100*n"
    assert cost_of(frozen, "enc").saved == "0" and cost_of(frozen, "lm").call_transient == "0"
    among = section_graph(
        X + F + ENC.replace("ops = 5", 'ops = 5, peak = "100*n"').replace("in @enc", "in @lm")
    )
    assert cost_of(among, "lm").call_transient == "68*n"  # g counts its arguments, the result among them


def test_matrix_products_in_glue_are_counted() -> None:
    product = (
        '    %m = sec.glue "aten.mm.default" (%a, %b) args "$0, $1" in @lm : '
        "!sec.tensor<[B, 32], f32, grad>\n"
    )
    inputs = (
        '    %a = sec.input "x" : !sec.tensor<[B, 8], f32>\n    %b = sec.param "w" : '
        "!sec.tensor<[8, 32], f32, grad>\n"
    )
    found = cost_of(section_graph(X + F + inputs + product))
    assert found.flops == "10*B*S + 512*B" and found.backward_flops == "20*B*S + 512*B"


def test_tensor_parallelism_divides_logits_by_tokens() -> None:
    """Four ranks keep a quarter of each [B, S, 64] of the loss; a sum over tokens is replicated."""
    loss = (
        '    %w = sec.param "w" : !sec.tensor<[64, 8], bf16, grad>\n'
        '    %z = sec.glue "aten.linear.default" (%f, %w) args "$0, $1" in @lm : '
        "!sec.tensor<[B, S, 64], bf16, grad>\n"
        '    %l = sec.glue "aten._log_softmax.default" (%z) args "$0, -1, False" in @lm : '
        "!sec.tensor<[B, S, 64], bf16, grad>\n"
        '    %s = sec.glue "aten.sum.dim_IntList" (%l) args "$0, [-1]" in @lm : '
        "!sec.tensor<[B, S], bf16, grad>\n"
    )
    whole = cost_of(section_graph(X + F + loss))
    assert (whole.saved, whole.logits_saved) == (
        "148*B*S",
        "128*B*S",
    )  # 4 of the call, 16 of the product, which keeps what enters it, and the logarithms
    assert (whole.glue_transient, whole.logits_transient) == (
        "0",
        "256*B*S",
    )  # gradients of the logits and of their logarithms
    rank = cost_on_rank(whole, 4)
    assert evaluate_expr(rank.logits_transient, {"B": 1, "S": 1}) == 64
    kept = 20 * 16 // 34  # of what tp does not cut by tokens (10 + 24/4) parts in 34
    assert evaluate_expr(rank.saved, {"B": 1, "S": 1}) == kept + 32
    with_layer, cluster = replace(whole, layers=1, layer_input_bytes="8*B*S"), parse_cluster("1x4xH100")
    assert price_tensor_sums(with_layer, 4, cluster) != price_tensor_sums(
        replace(with_layer, logits_moved="0"), 4, cluster
    )


def test_sequence_parallelism_saves_less_and_sends_more() -> None:
    whole = replace(cost_of(section_graph(X + F)), saved="3400", layers=2, layer_input_bytes="8*B*S")
    cut = replace(whole, sequence_parallel=True)
    assert (
        evaluate_expr(cost_on_rank(whole, 4).saved, {}),
        evaluate_expr(cost_on_rank(cut, 4).saved, {}),
    ) == (1600, 1150)
    cluster = parse_cluster("1x4xH100")
    sums = [price_tensor_sums(c, 4, cluster).forward_ns for c in (whole, cut)]
    times = [evaluate_expr(text, {"B": 1000, "S": 1000}) for text in sums]
    assert times[1] == pytest.approx(1.25 * times[0], rel=1e-4)


def test_maximum_of_expressions() -> None:
    assert max_expr(["B*S", "B*S + n", "2*B*S"]) == "max(2*B*S, B*S + n)"
    assert max_expr(["B", "B"]) == "B" and max_expr([]) == "0"
    shared = "max(0, B*S - 7)*3//64"
    assert max_expr([f"0 + {shared}", f"9*B + {shared}"]) == f"9*B + {shared}"
    assert max_expr([f"B + {shared}", f"S + {shared}"]) == f"max(B + {shared}, S + {shared})"


def test_section_transfers() -> None:
    (found,) = section_transfers(section_graph(X + F, X + F + ENC))
    assert (found.src, found.dst, found.size, found.grad) == ("enc", "lm", "32*n", False)


def test_shares_add_up_to_one() -> None:
    declared = (
        '  sec.pattern when [] share "0.3" {B = 1, S = 5}\n  sec.pattern when ["px"] '
        'share "0.1" {B = 1, S = 9, n = 2}\n'
    )
    found = input_patterns(section_graph(X + F, declared=declared))
    assert [p.share for p in found] == [Fraction(3, 4), Fraction(1, 4)]
    assert found[1].sizes == {"B": 1, "S": 9, "n": 2}


def test_times_follow_the_roofline() -> None:
    device = parse_cluster("1x8xH100").device
    text = roofline.forward_ns_expression(cost_of(section_graph(X + F, X + F + ENC)), device)
    sizes = {"B": 2, "S": 10**6, "n": 1}
    compute = 1000 * (30 * 2 * 10**6 + 1) // (989_000 * 600)
    assert evaluate_expr(text, sizes) == device.overheads.job + 9 * device.op_ns + compute + 1000 * (
        32 * 2 * 10**6 + 32
    ) // (3350 * 560)
    assert roofline.backward_ns_expression(cost_of(section_graph(X + F)), "forward", device) == "0"


@pytest.mark.parametrize(("ranks", "messages"), [(1, 0), (2, 2), (8, 14)])
def test_ring_all_reduce(ranks: int, messages: int) -> None:
    cluster = parse_cluster("2x8xH100")
    assert roofline.gradient_all_reduce_ns(1 << 30, ranks, cluster) == messages * cluster.inside.message_ns(
        (1 << 30) // ranks
    )


def test_sharding_sends_as_much_and_updates_less() -> None:
    cluster, found = parse_cluster("2x8xH100"), cost_of(section_graph(X + F))

    def both(size: int, ranks: int, cluster: Cluster) -> int:
        return roofline.gradient_reduce_scatter_ns(size, ranks, cluster) + roofline.parameter_all_gather_ns(
            size, ranks, cluster
        )

    assert both(1 << 30, 8, cluster) == roofline.gradient_all_reduce_ns(1 << 30, 8, cluster)
    assert both(1 << 30, 1, cluster) == 0
    cpus = parse_cluster("local:4")
    assert both(1 << 20, 4, cpus) > 2 * roofline.gradient_all_reduce_ns(1 << 20, 4, cpus)
    assert (
        roofline.optimizer_step_ns(found, cpus.device, 4)
        == roofline.optimizer_step_ns(found, cpus.device) // 4
    )


def test_all_reduce_over_nodes_is_slower() -> None:
    cluster = parse_cluster("2x8xH100")
    assert roofline.gradient_all_reduce_ns(1 << 30, 16, cluster) > 1.5 * roofline.gradient_all_reduce_ns(
        1 << 30, 8, cluster
    )


def test_memory_grows_with_micro_batches_in_flight() -> None:
    room = rank_memory(cost_of(section_graph(X + F, X + F + ENC)), activation=1000)
    assert room.total_bytes(3) - room.total_bytes(1) == 2000
    assert (room.parameters, room.gradients, room.optimizer) == (8000, 6000, 12000)


def test_gradients_and_all_activations_do_not_coexist() -> None:
    found = cost_of(section_graph(X + F, X + F + ENC))
    small, large = (rank_memory(found, activation=size, micro_batches=2) for size in (1000, 9000))
    assert small.total_bytes(1) == small.fixed + 1000 + 6000
    assert (
        small.total_bytes(2) == small.fixed + 1000 + 6000 and large.total_bytes(2) == large.fixed + 2 * 9000
    )


def test_largest_sample_may_exceed_several_micro_batches() -> None:
    room = rank_memory(cost_of(section_graph(X + F, X + F + ENC)), activation=1000, largest=2500)
    assert [room.total_bytes(n) - room.total_bytes(0) for n in (1, 2, 3)] == [2500, 2500, 3000]
    alone = rank_memory(
        cost_of(section_graph(X + F, X + F + ENC)), activation=1000, micro_batches=1, largest=9000
    )
    assert alone.total_bytes(1) == alone.fixed + 9000


def test_memory_with_sharded_optimizer() -> None:
    found = cost_of(section_graph(X + F, X + F + ENC))
    size = found.trainable_bytes
    plain, zero1, zero2 = (
        rank_memory(found, 0, dp=4, sharding=s, micro_batches=2) for s in ("none", "zero1", "zero2")
    )
    assert plain.optimizer == 2 * size and zero1.optimizer == 2 * size // 4
    assert plain.gradients == zero1.gradients == size and (
        plain.reduced.shard_bytes,
        zero1.reduced.shard_bytes,
    ) == (
        0,
        size // 4,
    )
    assert (
        zero2.reduced == zero1.reduced._replace(own_freed=True)
        and plain.reduced.in_flight_bytes == zero1.reduced.in_flight_bytes == 4 * found.trainable
    )
    assert rank_memory(found, 0, dp=1, sharding="zero1") == rank_memory(found, 0)


def test_zero2_with_one_micro_batch_never_holds_all_gradients() -> None:
    large = replace(cost_of(section_graph(X + F)), trainable=2 * 10**9, trainable_bytes=4 * 10**9)
    zero1, zero2 = (rank_memory(large, 0, dp=4, sharding=s, micro_batches=1) for s in ("zero1", "zero2"))
    window = 4 * 2 * BUCKET_BYTES  # bf16, summed in float32
    assert (
        zero1.extra_gradient_bytes(1) == 4 * 10**9 + window + 10**9
        and zero2.extra_gradient_bytes(1) == BUCKET_BYTES + window + 10**9
    )


def test_gradients_in_flight_replace_freed_activations() -> None:
    """All 6,000 bytes of gradients are in flight at once: they add little if a micro-batch keeps much, and
    all if it keeps nothing."""
    found = cost_of(section_graph(X + F, X + F + ENC))
    kept = {
        size: rank_memory(found, size, dp=4).total_bytes(1) - rank_memory(found, size).total_bytes(1)
        for size in (0, 4000, 6000, 20_000)
    }
    assert kept == {0: 6000, 4000: 2000, 6000: 0, 20_000: 0}
    shards = rank_memory(found, 4000, dp=4, sharding="zero1")
    assert shards.extra_gradient_bytes(1) == 6000 + 6000 + 1500 - 4000
    assert (
        rank_memory(found, 4000, dp=4, sharding="zero2").extra_gradient_bytes(1) == 6000
        and rank_memory(found, 0, dp=4, sharding="zero2").extra_gradient_bytes(1) == 7500
    )


def test_memory_and_collectives_of_zero3() -> None:
    """A rank holds a quarter of everything, two layers, and parameters outside of layers; a backward
    gathers again and reduces gradients in float32."""
    layered = cost_of(section_graph(X + F.replace('saved = "4*B*S", ops = 3', UNITS)))
    assert (layered.largest_layer_bytes, layered.outside_layers_bytes) == (-(-4000 // 3), 0)
    large = replace(
        layered,
        param_bytes=24 * 10**9,
        trainable=12 * 10**9,
        trainable_bytes=24 * 10**9,
        largest_layer_bytes=10**9,
        outside_layers_bytes=10**9,
    )
    room = rank_memory(large, 0, dp=4, sharding="zero3")
    assert (room.parameters, room.gradients, room.optimizer) == (6 * 10**9, 12 * 10**9, 12 * 10**9)
    assert room.buffers == (2 + 1) * 10**9 + (2 + 1) * 2 * 10**9
    cluster = parse_cluster("1x8xH100")
    gathers = zero3_collectives(large, "zero3", cluster, RankSpan(8, 1))
    assert (
        gathers is not None
        and zero3_collectives(large, "zero3", cluster, RankSpan(1, 1)) is None
        and zero3_collectives(large, "zero2", cluster, RankSpan(8, 1)) is None
    )
    assert (
        gathers.forward == (layered.layers + 1) * gathers.one_unit
        and 2.9 < gathers.backward / gathers.forward < 3.1
    )
    assert gathers.forward_ns(10**12) == 10**12 + gathers.one_unit and gathers.backward_ns(0) == 0
    texts = gathers.add_to_expressions("5*B", "7*B")
    assert [evaluate_expr(t, {"B": 10**12}) for t in texts] == [
        gathers.forward_ns(5 * 10**12),
        gathers.backward_ns(7 * 10**12),
    ]


def test_layers_out_of_order_count_outside_of_layers() -> None:
    turned = cost_of(
        section_graph(X + F.replace('saved = "4*B*S", ops = 3', UNITS + ', out_of_turn = "noted"'))
    )
    assert (turned.largest_layer_bytes, turned.outside_layers_bytes) == (0, 4000)


def test_working_memory_of_recomputation_counts_once() -> None:
    assert (
        rank_memory(cost_of(section_graph(X + F)), activation=1000, working=50).total_bytes(3)
        - rank_memory(cost_of(section_graph(X + F)), 1000).total_bytes(3)
        == 50
    )


def test_memory_and_time_of_offloaded_states() -> None:
    """Of 18 GB of masters and moments a few buckets stay on the device; the step takes as long as they need
    over PCIe one way, at 80% of 64 GB/s."""
    found = cost_of(section_graph(X + F.replace('saved = "4*B*S", ops = 3', UNITS)))
    large = replace(
        found,
        param_bytes=3 * 10**9,
        trainable=3 * 10**9 // 2,
        trainable_bytes=3 * 10**9,
        master_bytes=6 * 10**9,
        outside_layers_bytes=0,
    )
    kept, offloaded = (rank_memory(large, 0, offload=what) for what in ("none", "optimizer"))
    assert (kept.optimizer, kept.host) == (18 * 10**9, 0)
    assert (offloaded.optimizer, offloaded.host) == (3 * 3 * BUCKET_BYTES, 18 * 10**9)
    assert offloaded.total_bytes(1) == kept.total_bytes(1) - 18 * 10**9 + 9 * BUCKET_BYTES
    device = parse_cluster("1x8xH100").device
    step_ns = roofline.optimizer_step_ns(large, device)
    assert roofline.offloaded_step_ns(step_ns, offloaded.host, device) == 18 * 10**9 * 10**9 // (512 * 10**8)
    assert roofline.offloaded_step_ns(10**12, offloaded.host, device) == 10**12


def test_memory_and_time_of_offloaded_activations() -> None:
    """Of three layers, f's, with 100 bytes a position, or 10 where they run again; the glue keeps nothing."""
    cost = cost_of(section_graph(X + F.replace('saved = "4*B*S", ops = 3', UNITS) + ENC))
    assert (cost.saved, cost.outside_saved) == ("100*B*S", "0")
    sizes, gpu = {"B": 1, "S": 10**6, "n": 0}, parse_cluster("1x8xH100").device
    for way, moved in (("none", 100 * 10**6), ("full", 10 * 10**6)):
        copies = price_activation_copies(cost, way)
        assert evaluate_expr(copies.moved, sizes) == moved
        assert evaluate_expr(copies.streamed, sizes) == moved  # all three layers
    copied = 1000 * 100 * 10**6 // (gpu.host_bytes_per_s // 10**6)
    copies = price_activation_copies(cost, "none")
    for computed in (10, 10**9):
        forward, backward = copies.add_to_expressions(str(computed), str(2 * computed), gpu)
        assert evaluate_expr(forward, sizes) == max(computed, copied) + copied // 3
        assert evaluate_expr(backward, sizes) == max(2 * computed, copied) + copied // 3
    cpu = parse_cluster("local:2").device
    slow = 1000 * 100 * 10**6 // (cpu.host_bytes_per_s // 10**6)
    assert evaluate_expr(copies.add_to_expressions("10", "20", cpu)[1], sizes) == 20 + slow
    memory = rank_memory(cost, 5)._replace(host=7, host_activation=10**9)
    assert memory.host_bytes(3) == 7 + 3 * 10**9 and memory.fits_device(3, gpu)
    assert not memory.fits_device(gpu.usable_host_memory // 10**9 + 1, gpu)


def test_memory_and_time_of_offloaded_weights() -> None:
    """Two of ten layers are on the device, and a pass takes the longer of computing and copying all layers,
    and the first layer's copy."""
    found = cost_of(section_graph(X + F.replace('saved = "4*B*S", ops = 3', UNITS)))
    frozen = replace(
        found, param_bytes=11 * 10**9, layers=10, largest_layer_bytes=10**9, outside_layers_bytes=10**9
    )
    room = rank_memory(frozen, 0, offload="weights")
    assert (room.parameters, room.buffers, room.host) == (10**9, 2 * 10**9, 10 * 10**9)
    copies = weight_copies(frozen, parse_cluster("1x8xH100").device)
    layer_ns = 10**9 * 10**9 // (512 * 10**8)
    assert copies.one_unit == layer_ns and copies.forward == 10 * layer_ns
    assert copies.forward_ns(10**6) == 11 * layer_ns
    assert copies.forward_ns(10**10) == 10**10 + layer_ns
    assert copies.backward_ns(0) == 0
