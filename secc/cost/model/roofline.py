"""Times on a cluster: a roofline for compute, latency plus bytes over bandwidth for communication.

A micro-batch's time is `job + ops x op_ns + work / rate + bytes / bandwidth`, a text that ranks evaluate in
integer nanoseconds; `job` is the overhead of a forward or backward, work is in FLOPs of large products
(`secc.cost.model.gemm_efficiency`), bytes are those that other operations move. Rates are per microsecond,
hence the factor 1000.
"""

from __future__ import annotations

from secc.cluster import Cluster, Device
from secc.cost.model.collectives import (
    all_gather_ns,
    all_reduce_ns,
    reduce_scatter_ns,
    span_of_consecutive_ranks,
)
from secc.cost.model.section_cost import SectionCost

OPTIMIZER_MEMORY_PASSES = 7  # AdamW reads parameter, gradient and two states, and writes parameter and states


def forward_ns_expression(cost: SectionCost, device: Device) -> str:
    """Nanoseconds of a micro-batch's forward."""
    issued = cost.ops * device.op_ns + device.overheads.job
    return _add_measured_ns(
        _roofline_expression(issued, cost.work, cost.glue_bytes, 1, cost.dtype, device), cost.forward_ns
    )


def backward_ns_expression(cost: SectionCost, mode: str, device: Device, recompute: str = "none") -> str:
    """Nanoseconds of a micro-batch's backward: "0" for a section that owes none. Bytes other than products'
    move about twice.

    What recomputation runs again is added.
    """
    if mode == "forward":
        return "0"
    issued = 2 * cost.ops * device.op_ns + device.overheads.job
    once = _add_measured_ns(
        _roofline_expression(issued, cost.backward_work, cost.glue_bytes, 2, cost.dtype, device),
        cost.backward_ns,
    )
    again = cost.recompute.get(recompute)
    return (
        once
        if again is None
        else f"{once} + {_roofline_expression(again.ops * device.op_ns, again.work, again.moved, 1, cost.dtype, device)}"
    )


def _roofline_expression(issued: int, work: str, moved: str, passes: int, dtype: str, device: Device) -> str:
    terms = [str(issued)]
    if work != "0":
        terms.append(f"1000*({work})//{device.flops_per_us(dtype)}")
    if moved != "0":
        terms.append(f"{1000 * passes}*({moved})//{device.memory_bytes_per_us}")
    return " + ".join(terms)


def _add_measured_ns(roofline: str, measured: str) -> str:
    return roofline if measured == "0" else f"{roofline} + {measured}"


def time_label(cost: SectionCost, device: Device) -> str:
    """Where a section's times come from: "measured" if its blocks were timed, "roofline", or "default" as
    soon as any part is assumed."""
    if cost.label == "measured":
        return "measured"
    return "default" if "default" in (cost.label, device.label) else "roofline"


def gradient_all_reduce_ns(size: int, ranks: int, cluster: Cluster, stride: int = 1) -> int:
    """An all-reduce of `size` bytes over `ranks` ranks, every `stride`-th one of those in a row."""
    return all_reduce_ns(size, span_of_consecutive_ranks(ranks, cluster, stride), cluster)


def sharded_gradient_reduce_ns(size: int, ranks: int, cluster: Cluster, stride: int = 1) -> int:
    """A reduce-scatter of `size` bytes of gradients and an all-gather of as many of parameters."""
    span = span_of_consecutive_ranks(ranks, cluster, stride)
    return reduce_scatter_ns(size, span, cluster) + all_gather_ns(size, span, cluster)


def optimizer_step_ns(cost: SectionCost, device: Device, shards: int = 1) -> int:
    """The optimizer's step on a rank's shard: what memory takes, and what comes with each tensor."""
    written = (
        cost.trainable_bytes if cost.master_bytes else 0
    )  # the weights that modules compute with, from their masters
    moving = (
        1000
        * (OPTIMIZER_MEMORY_PASSES * (cost.optimizer_weight_bytes // shards) + written // shards)
        // device.memory_bytes_per_us
    )
    return moving + cost.trainable_tensors * device.overheads.tensor // shards


def section_message_ns(size: int, cluster: Cluster) -> int:
    """One message between two sections' ranks, which may be on different nodes."""
    return cluster.slowest_link(cluster.ranks).message_ns(size)
