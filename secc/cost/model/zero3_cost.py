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
    run concurrently with computation, but for `open_percent` of them."""

    forward: int
    backward: int
    one_unit: int
    overlapped: bool
    open_percent: int = 0

    def forward_ns(self, compute_ns: int) -> int:
        """Time of a forward that computes for `compute_ns`."""
        if not self.overlapped:
            return compute_ns + self.forward
        return max(compute_ns + self._open_ns(self.forward), self.forward) + self.one_unit

    def backward_ns(self, compute_ns: int) -> int:
        """Time of a backward that computes for `compute_ns`; 0 if there is none."""
        if not compute_ns:
            return 0
        if not self.overlapped:
            return compute_ns + self.backward
        return max(compute_ns + self._open_ns(self.backward), self.backward) + self.one_unit

    def _open_ns(self, transfers_ns: int) -> int:
        """The part of transfers that passes while nothing is computed."""
        return transfers_ns * self.open_percent // 100

    def add_to_expressions(self, forward: str, backward: str) -> tuple[str, str]:
        """The same for expressions of forward and backward time over a micro-batch's symbols."""
        if not self.overlapped:
            return f"{forward} + {self.forward}", "0" if backward == "0" else f"{backward} + {self.backward}"
        forward_time, backward_time = (
            f"max({compute} + {opened}, {all_of_it}) + {self.one_unit}"
            if (opened := self._open_ns(all_of_it))
            else f"max({compute}, {all_of_it}) + {self.one_unit}"
            for compute, all_of_it in ((forward, self.forward), (backward, self.backward))
        )
        return forward_time, "0" if backward == "0" else backward_time


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
        units * gather,
        units * (gather + reduce),
        gather,
        cluster.device.backend != "cpu",
        cluster.device.framework.zero3_open_percent,
    )


def weight_copies(cost: SectionCost, device: Device) -> ParameterTransfers:
    """The copies of frozen layers from host memory. What is outside of layers stays on the device."""
    copied = device.host_copy_ns(layer_bytes(cost))
    return ParameterTransfers(copied, copied, copied // max(1, cost.layers), device.backend != "cpu")
