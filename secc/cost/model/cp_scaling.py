"""Scales a section's cost to one rank under context parallelism (cp), and prices what ranks exchange.

A rank has a cp-th of the rows of each sample: of products, activations, losses and messages between layers.
Parameters are whole on every rank. Each layer gathers keys and values in forward, each head once, and in
backward scatters the sum of their gradients, in float32. Ranks of tensor parallelism have a part of the heads
each. Over several nodes a gather has two levels: keys and values cross each node's border once and are passed
on inside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from secc.cluster import Cluster
from secc.cost.model.collectives import half_all_reduce_rate, span_of_consecutive_ranks
from secc.cost.model.section_cost import SectionCost
from secc.cost.model.tp_pp_scaling import scale_expression

WIDENED_DTYPES = frozenset({"bf16", "f16"})  # their gradients are summed in float32
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


def price_row_exchange(rank: SectionCost, tp: int, cp: int, cluster: Cluster) -> RowExchange:
    """Prices the exchange of `cp` ranks that are `tp` ranks apart. `rank` is the cost of a rank of tp and pp,
    with all rows."""
    if cp == 1 or rank.exchanged_bytes == "0":
        return RowExchange()
    span = span_of_consecutive_ranks(cp, cluster, tp)

    def price(collective: str, widening: int) -> str:
        latency, ns_per_byte = half_all_reduce_rate(collective, span, cluster)
        share = (widening * ns_per_byte).limit_denominator(LARGEST_DENOMINATOR)
        return f"{rank.layers * latency} + {scale_expression(rank.exchanged_bytes, share)}"

    return RowExchange(
        price("all_gather", 1), price("reduce_scatter", 2 if rank.dtype in WIDENED_DTYPES else 1)
    )


def cost_on_rows(cost: SectionCost, cp: int) -> SectionCost:
    """The cost of the rows that one of `cp` ranks has."""
    if cp == 1:
        return cost

    def share(text: str) -> str:
        return text if text == "0" else f"({text})//{cp}"

    recompute = {
        kind: replace(
            again,
            saved=share(again.saved),
            working=share(again.working),
            work=share(again.work),
            moved=share(again.moved),
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
            "saved",
            "glue_bytes",
            "logits_saved",
            "logits_moved",
            "logits_backward_transient",
            "forward_transient",
            "backward_transient",
            "forward_ns",
            "backward_ns",
            "layer_input_bytes",
            "exchanged_bytes",
            "routed_work",
            "routed_backward_work",
            "routed_bytes",
        )
    }
    return replace(cost, recompute=recompute, **shared)
