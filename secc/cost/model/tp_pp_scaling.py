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
from secc.cost.model.collectives import all_reduce_ring
from secc.cost.model.gemm_efficiency import DEFAULT
from secc.cost.model.recompute_cost import Again
from secc.cost.model.section_cost import SectionCost

CUT_PARTS, KEPT_PARTS = 24, 34
GATHERED_PARTS = 4  # of those, the inputs of attention and of the feed-forward part
SUMS_PER_LAYER = 2  # after attention and after the feed-forward part


def sums_ns(cost: SectionCost, tp: int, cluster: Cluster) -> str:
    """Nanoseconds of a micro-batch's sums over tp in one direction, as a text over its symbols: "0" without
    tp."""
    if tp == 1 or cost.layers == 0:
        return "0"
    messages, link = all_reduce_ring(tp, cluster)
    # Half a sum more where a layer's ends gather positions.
    sums = (
        Fraction(cost.layers * cost.sequence, 2) + SUMS_PER_LAYER * cost.layers + (cost.logits_moved != "0")
    )
    per_layer = sums / cost.layers
    bandwidth = per_layer.denominator * (tp * link.bytes_per_s // 10**6)
    return f"{int(messages * sums * link.latency_ns)} + {messages * per_layer.numerator}*1000*({cost.summed})//({bandwidth})"


def on_rank(cost: SectionCost, tp: int, pp: int) -> SectionCost:
    """The cost of the part of a section that a rank of its largest stage has; `ops` and glue are not cut by
    tp."""
    if tp * pp == 1:
        return cost
    stage = largest_stage(cost, pp)
    cut, kept = stage / tp, stage * (KEPT_PARTS - CUT_PARTS + Fraction(CUT_PARTS, tp)) / KEPT_PARTS
    if cost.sequence:  # what enters the products is gathered and kept whole
        kept = stage * (GATHERED_PARTS + Fraction(KEPT_PARTS - GATHERED_PARTS, tp)) / KEPT_PARTS
    slower = _slower(cost.narrow, tp)
    again = {
        way: _again(a, stage, cut * slower, kept, cost.logits_saved, cut) for way, a in cost.again.items()
    }
    counts = {
        key: _part(getattr(cost, key), cut)
        for key in ("params", "trainable", "param_bytes", "trainable_bytes", "master_bytes")
    }
    return replace(
        cost,
        unit_bytes=-(-cost.unit_bytes // tp),
        rest_bytes=-(-cost.rest_bytes // tp),
        flops=_times(cost.flops, cut),
        backward_flops=_times(cost.backward_flops, cut),
        work=_times(cost.work, cut * slower),
        backward_work=_times(cost.backward_work, cut * slower),
        saved=_split(cost.saved, kept, cost.logits_saved, cut),
        glue_bytes=_split(cost.glue_bytes, kept, cost.logits_moved, cut),
        logits_saved=_times(cost.logits_saved, cut),
        logits_moved=_times(cost.logits_moved, cut),
        logits_passing=_times(cost.logits_passing, Fraction(1, tp)),
        transient=_times(
            cost.transient, Fraction(KEPT_PARTS - CUT_PARTS + Fraction(CUT_PARTS, tp)) / KEPT_PARTS
        ),
        narrow=cost.narrow // tp,
        forward_ns=_times(cost.forward_ns, cut),
        backward_ns=_times(cost.backward_ns, cut),
        summed=_times(cost.summed, stage),
        ops=_part(cost.ops, stage),
        layers=_part(cost.layers, stage),
        again=again,
        **counts,
    )


def _again(
    way: Again, stage: Fraction, slowed: Fraction, kept: Fraction, logits: str, cut: Fraction
) -> Again:
    """What runs again: the layers' inputs, which are kept, are whole on every rank of tp, logits are not."""
    saved = _split(way.saved, stage, logits, cut)
    return Again(
        saved,
        _times(way.working, kept / stage),
        _times(way.work, slowed),
        _part(way.ops, stage),
        _times(way.moved, kept),
    )


def _split(text: str, share: Fraction, part: str, cut: Fraction) -> str:
    """`share` of what a text gives but for a part of it, of which `cut` is left."""
    if part == "0" or share == cut:
        return _times(text, share)
    return f"{_times(f'{text} - ({part})', share)} + {_times(part, cut)}"


def _slower(narrow: int, tp: int) -> Fraction:
    """How much longer the same work takes where tp cuts the smallest dim of the weights, in hundredths."""
    if not narrow:
        return Fraction(1)
    return Fraction(round(100 * DEFAULT.percent(narrow) / DEFAULT.percent(max(1, narrow // tp))), 100)


def largest_stage(cost: SectionCost, pp: int) -> Fraction:
    """The largest stage's share of the section's layers."""
    layers = max(cost.layers, pp)
    return Fraction(-(-layers // pp), layers)


def _part(count: int, share: Fraction) -> int:
    return -(-count * share.numerator // share.denominator)


def _times(text: str, share: Fraction) -> str:
    return text if share == 1 or text == "0" else f"({text})*{share.numerator}//{share.denominator}"
