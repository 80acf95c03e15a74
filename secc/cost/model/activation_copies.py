"""Cost of `offload=activations`: what layers keep for the backward is in host memory meanwhile.

A forward copies it out and the backward copies it in, layer by layer, while the next layer computes. On GPUs
a pass therefore takes the longer of computation and copies, plus one layer's copy; on CPUs, which copy the
bytes themselves, it takes the sum. Up to three layers are on the device at once: one in use, and one each way
(`secc.runtime.training.offloaded_activations`). What is saved outside of layers stays there.
"""

from __future__ import annotations

from typing import NamedTuple

from secc.cluster import Device
from secc.cost.model.section_cost import SectionCost

LAYERS_ON_DEVICE = 3


class ActivationCopies(NamedTuple):
    """Bytes of one micro-batch, as expressions: `moved` to host memory and back, at most `streamed` of them
    on the device. `layers`: the number of layers that they belong to."""

    moved: str
    streamed: str
    layers: int

    def add_to_expressions(self, forward: str, backward: str, device: Device) -> tuple[str, str]:
        """Returns the ns of a forward and a backward with the copies."""
        copied = f"1000*({self.moved})//{max(1, device.host_bytes_per_s // 10**6)}"
        if device.backend == "cpu":
            return f"{forward} + {copied}", f"{backward} + {copied}"
        one_layer = f"({copied})//{self.layers}"
        return f"max({forward}, {copied}) + {one_layer}", f"max({backward}, {copied}) + {one_layer}"


def price_activation_copies(cost: SectionCost, recompute: str) -> ActivationCopies:
    """The copies of a section with the cost `cost` on a rank."""
    again = cost.recompute.get(recompute)
    saved, layers = cost.saved if again is None else again.saved, max(1, cost.layers)
    moved = f"max(0, {saved} - ({cost.outside_saved}))"
    return ActivationCopies(moved, f"{moved}*{min(layers, LAYERS_ON_DEVICE)}//{layers}", layers)
