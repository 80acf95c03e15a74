"""Times on a cluster: a roofline for compute, latency plus bytes over bandwidth for messages.

A micro-batch takes `job + ops * op_ns + work / rate + bytes / bandwidth`, an expression that ranks evaluate
in integer nanoseconds. `job` is the overhead of a forward or backward, `work` the FLOPs weighted by the speed
of their products (`secc.cost.model.gemm_efficiency`), `bytes` what operations other than products move. Rates
are per microsecond, hence the factor 1000. The roofline is that of Williams et al., 2009, with both parts
added rather than overlapped.
"""

from __future__ import annotations

from secc.cluster import Cluster, Device
from secc.cost.model.collectives import (
    all_gather_ns,
    all_reduce_ns,
    reduce_scatter_ns,
    span_of_consecutive_ranks,
)
from secc.cost.model.grouped_products import grouped_again_ns, grouped_backward_ns, grouped_forward_ns
from secc.cost.model.recompute_cost import RECOMPUTED_LAYERS
from secc.cost.model.section_cost import SectionCost

OPTIMIZER_MEMORY_PASSES = 7  # AdamW reads weight, gradient and two moments, and writes weight and moments


def forward_ns_expression(cost: SectionCost, device: Device) -> str:
    """Nanoseconds of a micro-batch's forward."""
    issued = cost.ops * device.op_ns + device.overheads.job
    return _add_terms(
        _roofline_expression(issued, cost.work, cost.glue_bytes, 1, cost.dtype, device),
        grouped_forward_ns(cost, device),
        cost.forward_ns,
    )


def backward_ns_expression(cost: SectionCost, mode: str, device: Device, recompute: str = "none") -> str:
    """Nanoseconds of a micro-batch's backward, including recomputation; "0" for a section without backward.

    Operations other than products move about twice as many bytes as in forward.
    """
    if mode == "forward":
        return "0"
    issued = 2 * cost.ops * device.op_ns + device.overheads.job
    roofline = _roofline_expression(issued, cost.backward_work, cost.glue_bytes, 2, cost.dtype, device)
    backward = _add_terms(roofline, grouped_backward_ns(cost, device), cost.backward_ns)
    again = cost.recompute.get(recompute)
    if again is None:
        return backward
    issued = again.ops * device.op_ns
    return _add_terms(
        f"{backward} + {_roofline_expression(issued, again.work, again.moved, 1, cost.dtype, device)}",
        grouped_again_ns(cost, device, RECOMPUTED_LAYERS[recompute]),
    )


def _roofline_expression(issued: int, work: str, moved: str, passes: int, dtype: str, device: Device) -> str:
    terms = [str(issued)]
    if work != "0":
        terms.append(f"1000*({work})//{device.flops_per_us(dtype)}")
    if moved != "0":
        terms.append(f"{1000 * passes}*({moved})//{device.moved_bytes_per_us}")
    return " + ".join(terms)


def _add_terms(time_ns: str, *terms: str) -> str:
    return " + ".join([time_ns, *(term for term in terms if term != "0")])


def time_label(cost: SectionCost, device: Device) -> str:
    """Origin of a section's times: "measured" if all blocks were timed, "default" if any figure is
    assumed, else "roofline"."""
    if cost.label == "measured":
        return "measured"
    return "default" if "default" in (cost.label, device.label) else "roofline"


def gradient_all_reduce_ns(size: int, ranks: int, cluster: Cluster, stride: int = 1) -> int:
    """Time of an all-reduce of `size` bytes over `ranks` ranks at distance `stride`."""
    return all_reduce_ns(size, span_of_consecutive_ranks(ranks, cluster, stride), cluster)


def gradient_reduce_scatter_ns(size: int, ranks: int, cluster: Cluster, stride: int = 1) -> int:
    """Time of a reduce-scatter of `size` bytes of gradients."""
    return reduce_scatter_ns(size, span_of_consecutive_ranks(ranks, cluster, stride), cluster)


def parameter_all_gather_ns(size: int, ranks: int, cluster: Cluster, stride: int = 1) -> int:
    """Time of an all-gather of `size` bytes of parameters."""
    return all_gather_ns(size, span_of_consecutive_ranks(ranks, cluster, stride), cluster)


def optimizer_step_ns(cost: SectionCost, device: Device, shards: int = 1) -> int:
    """Time of the optimizer on a rank's shard: memory traffic, and an overhead for each parameter."""
    # With float32 masters, the optimizer also writes the weights that modules compute with.
    written = cost.trainable_bytes if cost.master_bytes else 0
    moving = (
        1000
        * (OPTIMIZER_MEMORY_PASSES * (cost.optimizer_weight_bytes // shards) + written // shards)
        // device.moved_bytes_per_us
    )
    return moving + cost.trainable_tensors * device.overheads.tensor // shards


def offloaded_step_ns(step_ns: int, states: int, device: Device) -> int:
    """Time of an optimizer step of `step_ns` with `states`, in bytes, that come from host memory and return.
    On GPUs the copies of both directions and the optimizer work at once; CPUs copy the bytes themselves."""
    copy = device.host_copy_ns(states)
    return step_ns + 2 * copy if device.backend == "cpu" else max(step_ns, copy)


def section_message_ns(size: int, cluster: Cluster) -> int:
    """Time of one message between ranks of two sections, which may be on different nodes."""
    return cluster.slowest_link(cluster.ranks).message_ns(size)
