"""What a cluster is: nodes of equal devices, a link inside a node and a link between nodes, all as plain data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True)
class Link:
    """A path between two devices: latency of a message in ns, and bytes per second in one direction for each device."""

    latency_ns: int
    bytes_per_s: int

    def message_ns(self, size: int) -> int:
        """Time of one message of `size` bytes."""
        return self.latency_ns + size * 10**9 // self.bytes_per_s


@dataclass(frozen=True)
class Device:
    """A kind of device. `gflops` lists (dtype, peak GFLOP/s of dense matrix products); `efficiency_percent` is what of it training reaches.

    `op_ns` is the time that issuing one operation takes, `reserved` the bytes of `memory` that no tensor can have. `label` says where
    the rates come from: "roofline" (the vendor's peaks) or "default" (assumed).
    """

    kind: str
    backend: str  # torch's device type: "cuda" or "cpu"
    gflops: tuple[tuple[str, int], ...]
    memory: int
    memory_bytes_per_s: int
    efficiency_percent: int
    op_ns: int
    reserved: int
    label: str

    def rate(self, dtype: str) -> int:
        """Reachable FLOPs per microsecond in `dtype` (a short name such as "bf16"); that of f32 for a dtype that is not listed."""
        known = dict(self.gflops)
        return known.get(dtype, known["f32"]) * 1000 * self.efficiency_percent // 100

    @property
    def bandwidth(self) -> int:
        """Bytes of its memory that the device reads or writes per microsecond."""
        return self.memory_bytes_per_s // 10**6

    @property
    def usable(self) -> int:
        """Bytes that tensors can have: memory less what is reserved, with a twentieth kept for fragmentation."""
        return (self.memory - self.reserved) * 95 // 100


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes of `per_node` devices; ranks are numbered node by node."""

    name: str
    nodes: int
    per_node: int
    device: Device
    inside: Link
    between: Link

    @property
    def ranks(self) -> int:
        """How many processes the cluster can hold, one for each device."""
        return self.nodes * self.per_node

    def link(self, ranks: int) -> Link:
        """The slowest link among `ranks` ranks in a row."""
        return self.inside if ranks <= self.per_node else self.between

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Cluster | None:
        """The cluster that plan.json holds, None where it holds none."""
        if not {"device", "inside", "between", "nodes", "per_node"} <= data.keys():
            return None
        device = Device(**{**data["device"], "gflops": tuple((str(name), int(rate)) for name, rate in data["device"]["gflops"])})
        links = Link(**data["inside"]), Link(**data["between"])
        return Cluster(str(data.get("name", "")), int(data["nodes"]), int(data["per_node"]), device, *links)

    def to_json(self) -> str:
        """The cluster as JSON text, as plan.json holds it."""
        return json.dumps(dataclasses.asdict(self) | {"ranks": self.ranks})
