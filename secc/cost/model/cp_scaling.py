"""Scales a section's cost to one rank under context parallelism (cp), and prices what ranks exchange.

A rank has a cp-th of the rows of each sample: of products, activations, losses and messages between layers.
Parameters are whole on every rank. Each layer gathers keys and values in forward and scatters the sum of
their gradients in backward, in float32. Their bytes are taken as those of two hidden states, divided by tp,
which is an upper bound: grouped-query attention has fewer heads of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from secc.cluster import Cluster
from secc.cost.model.collectives import all_reduce_messages
from secc.cost.model.section_cost import SectionCost

KEYS_AND_VALUES = 2  # tensors that a layer gathers
GRADIENT_SIZE = 2  # of a gradient in float32, relative to 16-bit keys and values


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


def exchange_ns(cost: SectionCost, tp: int, cp: int, cluster: Cluster) -> RowExchange:
    """Prices the exchange of `cp` ranks that are `tp` ranks apart. `cost` is that of a rank with all rows."""
    if cp == 1 or cost.layers == 0:
        return RowExchange()
    _, link = all_reduce_messages(cp * tp, cluster)
    messages = cp - 1
    latency = messages * cost.layers * link.latency_ns
    bandwidth = cp * tp * max(1, link.bytes_per_s // 10**6)
    size = f"{messages * KEYS_AND_VALUES}*1000*({cost.layer_input_bytes})"
    return RowExchange(
        f"{latency} + {size}//({bandwidth})", f"{latency} + {GRADIENT_SIZE}*{size}//({bandwidth})"
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
        )
    }
    return replace(cost, recompute=recompute, **shared)
