"""Scales a section's cost to one rank under context parallelism (cp), and prices what ranks exchange.

A rank has a cp-th of the rows of each sample: of products, activations, losses and messages between layers.
Parameters are whole on every rank. Each layer gathers keys and values in forward, each head once, and in
backward scatters the sum of their gradients, in float32; or it exchanges rows for heads by all-to-alls
("ulysses"), of queries, keys, values and results. Ranks of tensor parallelism have a part of the heads each.
Over several nodes a gather has two levels: keys and values cross each node's border once and are passed on
inside.

Ranks of a vision tower that attends to frames or windows get whole ones, and exchange keys and values of the
frames that two of them share. With few pieces they are uneven: the fullest rank counts.

In other towers frames are entries of the batch that layers work on. If a mean sample has at least one for
each rank, ranks get whole entries ("frames") and exchange nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from secc.cluster import Cluster
from secc.cost.model.collectives import (
    RankSpan,
    all_to_all_links,
    half_all_reduce_rate,
    span_of_consecutive_ranks,
)
from secc.cost.model.cost_expressions import max_expr
from secc.cost.model.recompute_cost import RECOMPUTED_LAYERS
from secc.cost.model.section_cost import SectionCost
from secc.cost.model.tp_pp_scaling import scale_expression
from secc.runtime.plan.expr_eval import evaluate_expr, expression_symbols

WIDENED_DTYPES = frozenset({"bf16", "f16"})  # their gradients are summed in float32
TYPICAL_SIZE = 8192  # of every symbol, where bytes only decide which of two exchanges is faster
LARGEST_DENOMINATOR = 10**4  # of ns per byte: products of expressions stay within 64 bits


@dataclass(frozen=True)
class RowExchange:
    """Nanoseconds of the exchange in one direction of a micro-batch, as expressions over its symbols; "0"
    without context parallelism."""

    forward_ns: str = "0"
    scatter_ns: str = "0"

    def backward_ns(self, recompute: str) -> str:
        """Gradients are scattered; layers that run again gather again."""
        if self.forward_ns == "0" or recompute == "none":
            return self.scatter_ns
        again = f"({self.forward_ns})" if recompute == "full" else f"({self.forward_ns})//2"
        return f"{self.scatter_ns} + {again}"


def can_share_frames(cost: SectionCost, cp: int) -> bool:
    """Whether ranks of cp can have whole entries of the batch that layers work on, such as the frames of a
    video; `cost` is the section's."""
    return cp > 1 and cost.batch_entries != "0"


def can_exchange_heads(cost: SectionCost, tp: int, cp: int) -> bool:
    """Whether `cp` ranks can divide the heads of every layer that `tp` ranks have divided already; `cost` is
    the section's."""
    return cp > 1 and cost.key_heads > 0 and cost.key_heads % (tp * cp) == 0


def choose_row_attention(
    section: SectionCost, rank: SectionCost, tp: int, cp: int, cluster: Cluster, pinned: str = ""
) -> str:
    """The faster way of attention over `cp` ranks: whole "frames" where each rank has one of a mean sample,
    "gather" keys and values, or exchange heads ("ulysses") where the ranks divide them; the pinned one if
    there is one. `section` is the cost of the whole section, `rank` as for `price_row_exchange`."""
    if can_share_frames(section, cp) and (
        pinned == "frames" or (not pinned and section.entries_per_sample >= cp)
    ):
        return "frames"
    if not can_exchange_heads(section, tp, cp) or section.row_pieces != "0":
        return "gather"
    if pinned in ("gather", "ulysses"):
        return pinned

    def step_ns(attention: str) -> int:
        found = price_row_exchange(rank, tp, cp, cluster, attention)
        text = f"{found.forward_ns} + {found.backward_ns('none')}"
        return evaluate_expr(text, dict.fromkeys(expression_symbols(text), TYPICAL_SIZE))

    return min(("gather", "ulysses"), key=step_ns)


def price_row_exchange(
    rank: SectionCost, tp: int, cp: int, cluster: Cluster, attention: str = "gather"
) -> RowExchange:
    """Prices the exchange of `cp` ranks that are `tp` ranks apart. `rank` is the cost of a rank of tp and pp,
    with all rows."""
    if cp == 1 or rank.exchanged_bytes == "0" or attention == "frames":
        return RowExchange()
    span = span_of_consecutive_ranks(cp, cluster, tp)
    if attention == "ulysses":
        return _price_head_exchange(rank, cp, span, cluster)

    def price(collective: str, widening: int) -> str:
        latency, ns_per_byte = half_all_reduce_rate(collective, span, cluster)
        share = (widening * ns_per_byte).limit_denominator(LARGEST_DENOMINATOR)
        return f"{rank.layers * latency} + {scale_expression(_exchanged_bytes(rank, cp), share)}"

    return RowExchange(
        price("all_gather", 1), price("reduce_scatter", 2 if rank.dtype in WIDENED_DTYPES else 1)
    )


def _exchanged_bytes(cost: SectionCost, cp: int) -> str:
    """Bytes of keys and values that `cp` ranks exchange in forward. Of parts larger than the pieces that
    ranks have whole, each border between two ranks cuts at most one."""
    if cost.row_pieces == "0" or cost.exchanged_bytes == "0":
        return cost.exchanged_bytes
    parts = f"max(1, {cost.attended_parts})"
    return f"({cost.exchanged_bytes})//({parts})*min({cp - 1}, {parts})"


def _price_head_exchange(rank: SectionCost, cp: int, span: RankSpan, cluster: Cluster) -> RowExchange:
    """Two all-to-alls in each direction of a layer: queries, keys and values of a rank's rows there, results
    back; gradients the other way."""
    size, latency, terms = f"({rank.exchanged_bytes}) + ({rank.query_bytes})", 0, list[str]()
    for link in all_to_all_links(span, cluster):
        latency = max(latency, 2 * rank.layers * link.latency_ns)
        share = link.share * Fraction(10**9, cp * link.bytes_per_s)
        terms.append(scale_expression(size, share.limit_denominator(LARGEST_DENOMINATOR)))
    ns = f"{latency} + {max_expr(terms)}"
    return RowExchange(ns, ns)


def cost_on_rows(cost: SectionCost, cp: int, attention: str = "gather") -> SectionCost:
    """The cost of the rows that one of `cp` ranks has. Gathered keys and values are kept for the backward, or
    while a layer runs again."""
    if cp == 1:
        return cost
    gathered = Fraction(cp - 1, cp) if attention == "gather" and cost.exchanged_bytes != "0" else Fraction(0)
    exchanged = _exchanged_bytes(cost, cp)
    pieces = cost.batch_entries if attention == "frames" else cost.row_pieces

    def share(text: str, layers: Fraction = Fraction(0)) -> str:
        own = _share_of_fullest_rank(text, pieces, cp)
        kept = gathered * layers
        return f"{own} + {scale_expression(exchanged, kept)}" if kept else own

    def share_saved(text: str, layers: Fraction) -> str:
        if text == "0" or cost.unshared_bytes == "0" or pieces == "0":
            return share(text, layers)
        return f"{cost.unshared_bytes} + {share(f'({text}) - ({cost.unshared_bytes})', layers)}"

    recompute = {
        kind: replace(
            again,
            saved=share_saved(again.saved, 1 - RECOMPUTED_LAYERS[kind]),
            working=share(again.working, Fraction(1, max(1, cost.layers))),
            work=share(again.work),
            moved=share(again.moved),
            unneeded=share(again.unneeded),
        )
        for kind, again in cost.recompute.items()
    }
    shared = {
        name: share(getattr(cost, name))
        for name in (
            "flops",
            "backward_flops",
            "work",
            "backward_work",
            "glue_bytes",
            "logits_saved",
            "outside_saved",
            "logits_moved",
            "logits_transient",
            "glue_transient",
            "call_transient",
            "forward_ns",
            "backward_ns",
            "layer_input_bytes",
            "exchanged_bytes",
            "query_bytes",
            "layer_work",
            "routed_work",
            "routed_backward_work",
            "routed_bytes",
        )
    }
    kept = share_saved(cost.saved, Fraction(cost.saved != "0"))
    return replace(cost, recompute=recompute, saved=kept, **shared)


def _share_of_fullest_rank(text: str, pieces: str, cp: int) -> str:
    """The share of the fullest of `cp` ranks, which have equal parts or, with `pieces`, whole pieces."""
    if text == "0":
        return text
    if pieces == "0":
        return f"({text})//{cp}"
    return f"({text})//max(1, {pieces})*(({pieces} + {cp - 1})//{cp})"
