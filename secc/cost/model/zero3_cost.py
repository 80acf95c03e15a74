"""What `zero3` costs: the collectives in which replicas gather parameters and sum gradients, in every pass of
a micro-batch.

A forward gathers every unit's parameters once, a backward once more, and sums each unit's gradients into
shards. One unit is on its way while another computes, so that on GPUs a pass takes as long as the longer of
the two, and one unit more; on CPUs, which move bytes themselves, it takes both.
"""

from __future__ import annotations

from dataclasses import dataclass

from secc.cluster import Cluster
from secc.cost.model.collectives import RankSpan, all_gather_ns, reduce_scatter_ns
from secc.cost.model.section_cost import SectionCost


@dataclass(frozen=True)
class Zero3Collectives:
    """Nanoseconds of a pass's collectives, `forward` and `backward`, and of one unit's; `beside` computation
    or after it."""

    forward: int
    backward: int
    one_unit: int
    overlapped: bool

    def forward_ns(self, own: int) -> int:
        """A forward that computes for `own` ns."""
        return max(own, self.forward) + self.one_unit if self.overlapped else own + self.forward

    def backward_ns(self, own: int) -> int:
        """A backward that computes for `own` ns; 0 where there is none."""
        if not own:
            return 0
        return max(own, self.backward) + self.one_unit if self.overlapped else own + self.backward

    def add_to_expressions(self, forward: str, backward: str) -> tuple[str, str]:
        """Both of texts over a micro-batch's symbols."""
        if not self.overlapped:
            return f"{forward} + {self.forward}", "0" if backward == "0" else f"{backward} + {self.backward}"
        found = f"max({forward}, {self.forward}) + {self.one_unit}"
        return found, "0" if backward == "0" else f"max({backward}, {self.backward}) + {self.one_unit}"


def zero3_collectives(
    cost: SectionCost, sharding: str, cluster: Cluster, span: RankSpan
) -> Zero3Collectives | None:
    """The collectives of a section's passes over replicas whose ranks span so much; None where nothing is
    gathered."""
    if sharding != "zero3" or span.ranks == 1:
        return None
    units = max(1, cost.layers) + 1
    gather = all_gather_ns(-(-cost.param_bytes // units), span, cluster)
    reduce = reduce_scatter_ns(-(-cost.gradient_sum_bytes // units), span, cluster)
    return Zero3Collectives(
        units * gather, units * (gather + reduce), gather, cluster.device.backend != "cpu"
    )
