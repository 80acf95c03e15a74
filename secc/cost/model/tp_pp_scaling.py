"""What tensor parallelism (tp) and pipeline stages (pp) leave of a section's cost on one rank, and what their
messages cost.

Under tp the blocks' weights and products are cut evenly, and logits and what losses make of them by tokens
(`secc.ir.analysis.vocab_sharding`), while norms, residuals and other glue stay whole on every rank. Of the
bytes that a transformer layer keeps for backward, about 24 parts in 34 lie between the cut products
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, equation 2). Each
layer sums its two outputs over tp in forward, and its two inputs' gradients in backward; a vocabulary that is
cut adds the embedding's rows and the gradient of what enters the head. Stages hold whole layers, so the
largest of pp stages has `ceil(layers / pp)` of them.

A sum is priced as those of gradients are (`secc.cost.model.collectives`): a ring over n ranks sends 2(n - 1)
messages of an n-th of its bytes.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from secc.cluster import Cluster
from secc.cost.model.collectives import all_reduce_messages
from secc.cost.model.gemm_efficiency import DEFAULT_EFFICIENCY
from secc.cost.model.recompute_cost import RecomputeCost
from secc.cost.model.section_cost import SectionCost

CUT_ACTIVATION_PARTS, ALL_ACTIVATION_PARTS = 24, 34
GATHERED_ACTIVATION_PARTS = 4  # of those, the inputs of attention and of the feed-forward part
ALL_REDUCES_PER_LAYER = 2  # after attention and after the feed-forward part


def tp_all_reduce_ns(cost: SectionCost, tp: int, cluster: Cluster) -> str:
    """Nanoseconds of a micro-batch's sums over tp in one direction, as a text over its symbols: "0" without
    tp."""
    if tp == 1 or cost.layers == 0:
        return "0"
    messages, link = all_reduce_messages(tp, cluster)
    # Half a sum more where a layer's ends gather positions.
    sums = (
        Fraction(cost.layers * cost.sequence_parallel, 2)
        + ALL_REDUCES_PER_LAYER * cost.layers
        + (cost.logits_moved != "0")
    )
    per_layer = sums / cost.layers
    bandwidth = per_layer.denominator * (tp * link.bytes_per_s // 10**6)
    return f"{int(messages * sums * link.latency_ns)} + {messages * per_layer.numerator}*1000*({cost.layer_input_bytes})//({bandwidth})"


def cost_on_rank(cost: SectionCost, tp: int, pp: int) -> SectionCost:
    """The cost of the part of a section that a rank of its largest stage has; `ops` and glue are not cut by
    tp."""
    if tp * pp == 1:
        return cost
    stage = largest_stage_share(cost, pp)
    cut, kept = (
        stage / tp,
        stage
        * (ALL_ACTIVATION_PARTS - CUT_ACTIVATION_PARTS + Fraction(CUT_ACTIVATION_PARTS, tp))
        / ALL_ACTIVATION_PARTS,
    )
    if cost.sequence_parallel:  # what enters the products is gathered and kept whole
        kept = (
            stage
            * (GATHERED_ACTIVATION_PARTS + Fraction(ALL_ACTIVATION_PARTS - GATHERED_ACTIVATION_PARTS, tp))
            / ALL_ACTIVATION_PARTS
        )
    slower = _narrowing_slowdown(cost.narrowest_dim, tp)
    again = {
        way: _recompute_on_rank(a, stage, cut * slower, kept, cost.logits_saved, cut)
        for way, a in cost.recompute.items()
    }
    counts = {
        key: _ceil_share(getattr(cost, key), cut)
        for key in ("params", "trainable", "param_bytes", "trainable_bytes", "master_bytes")
    }
    return replace(
        cost,
        largest_layer_bytes=-(-cost.largest_layer_bytes // tp),
        outside_layers_bytes=-(-cost.outside_layers_bytes // tp),
        flops=_scale_expression(cost.flops, cut),
        backward_flops=_scale_expression(cost.backward_flops, cut),
        work=_scale_expression(cost.work, cut * slower),
        backward_work=_scale_expression(cost.backward_work, cut * slower),
        saved=_scale_in_parts(cost.saved, kept, cost.logits_saved, cut),
        glue_bytes=_scale_in_parts(cost.glue_bytes, kept, cost.logits_moved, cut),
        logits_saved=_scale_expression(cost.logits_saved, cut),
        logits_moved=_scale_expression(cost.logits_moved, cut),
        logits_backward_transient=_scale_expression(cost.logits_backward_transient, Fraction(1, tp)),
        forward_transient=_scale_expression(
            cost.forward_transient,
            Fraction(ALL_ACTIVATION_PARTS - CUT_ACTIVATION_PARTS + Fraction(CUT_ACTIVATION_PARTS, tp))
            / ALL_ACTIVATION_PARTS,
        ),
        narrowest_dim=cost.narrowest_dim // tp,
        forward_ns=_scale_expression(cost.forward_ns, cut),
        backward_ns=_scale_expression(cost.backward_ns, cut),
        layer_input_bytes=_scale_expression(cost.layer_input_bytes, stage),
        ops=_ceil_share(cost.ops, stage),
        layers=_ceil_share(cost.layers, stage),
        recompute=again,
        **counts,
    )


def _recompute_on_rank(
    way: RecomputeCost, stage: Fraction, slowed: Fraction, kept: Fraction, logits: str, cut: Fraction
) -> RecomputeCost:
    """What runs again: the layers' inputs, which are kept, are whole on every rank of tp, logits are not."""
    saved = _scale_in_parts(way.saved, stage, logits, cut)
    return RecomputeCost(
        saved,
        _scale_expression(way.working, kept / stage),
        _scale_expression(way.work, slowed),
        _ceil_share(way.ops, stage),
        _scale_expression(way.moved, kept),
    )


def _scale_in_parts(text: str, share: Fraction, part: str, cut: Fraction) -> str:
    """`share` of what a text gives but for a part of it, of which `cut` is left."""
    if part == "0" or share == cut:
        return _scale_expression(text, share)
    return f"{_scale_expression(f'{text} - ({part})', share)} + {_scale_expression(part, cut)}"


def _narrowing_slowdown(narrow: int, tp: int) -> Fraction:
    """How much longer the same work takes where tp cuts the smallest dim of the weights, in hundredths."""
    if not narrow:
        return Fraction(1)
    return Fraction(
        round(
            100
            * DEFAULT_EFFICIENCY.percent_of_rate(narrow)
            / DEFAULT_EFFICIENCY.percent_of_rate(max(1, narrow // tp))
        ),
        100,
    )


def largest_stage_share(cost: SectionCost, pp: int) -> Fraction:
    """The largest stage's share of the section's layers."""
    layers = max(cost.layers, pp)
    return Fraction(-(-layers // pp), layers)


def _ceil_share(count: int, share: Fraction) -> int:
    return -(-count * share.numerator // share.denominator)


def _scale_expression(text: str, share: Fraction) -> str:
    return text if share == 1 or text == "0" else f"({text})*{share.numerator}//{share.denominator}"
