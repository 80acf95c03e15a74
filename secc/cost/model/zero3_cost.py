"""Cost of parameters that come layer by layer in every forward and backward: under ZeRO-3 by collectives that
gather them and reduce gradients, with `offload=weights` by copies from host memory.

A forward gathers the parameters of every FSDP unit (a layer) once; a backward gathers them again and
reduce-scatters the unit's gradients. One unit is in flight while another computes. On GPUs a pass therefore
takes the longer of computation and communication, plus one unit; on CPUs, which copy the bytes themselves, it
takes the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from secc.cluster import Cluster, Device
from secc.cost.model.collectives import RankSpan, all_gather_ns, reduce_scatter_ns
from secc.cost.model.memory import layer_bytes
from secc.cost.model.section_cost import SectionCost


@dataclass(frozen=True)
class ParameterTransfers:
    """Nanoseconds of collectives or copies in one forward, one backward and for one unit. `overlapped`: they
    run concurrently with computation."""

    forward: int
    backward: int
    one_unit: int
    overlapped: bool

    def forward_ns(self, compute_ns: int) -> int:
        """Time of a forward that computes for `compute_ns`."""
        return max(compute_ns, self.forward) + self.one_unit if self.overlapped else compute_ns + self.forward

    def backward_ns(self, compute_ns: int) -> int:
        """Time of a backward that computes for `compute_ns`; 0 if there is none."""
        if not compute_ns:
            return 0
        return (
            max(compute_ns, self.backward) + self.one_unit if self.overlapped else compute_ns + self.backward
        )

    def add_to_expressions(self, forward: str, backward: str) -> tuple[str, str]:
        """The same for expressions of forward and backward time over a micro-batch's symbols."""
        if not self.overlapped:
            return f"{forward} + {self.forward}", "0" if backward == "0" else f"{backward} + {self.backward}"
        forward_time = f"max({forward}, {self.forward}) + {self.one_unit}"
        return forward_time, "0" if backward == "0" else f"max({backward}, {self.backward}) + {self.one_unit}"


def zero3_collectives(
    cost: SectionCost, sharding: str, cluster: Cluster, span: RankSpan
) -> ParameterTransfers | None:
    """The collectives of a section replicated over the ranks of `span`; None unless ZeRO-3 shards its
    parameters."""
    if sharding != "zero3" or span.ranks == 1:
        return None
    units = max(1, cost.layers) + 1
    gather = all_gather_ns(-(-cost.param_bytes // units), span, cluster)
    reduce = reduce_scatter_ns(-(-cost.gradient_sum_bytes // units), span, cluster)
    return ParameterTransfers(
        units * gather, units * (gather + reduce), gather, cluster.device.backend != "cpu"
    )


def weight_copies(cost: SectionCost, device: Device) -> ParameterTransfers:
    """The copies of frozen layers from host memory. What is outside of layers stays on the device."""
    copied = device.host_copy_ns(layer_bytes(cost))
    return ParameterTransfers(copied, copied, copied // max(1, cost.layers), device.backend != "cpu")
