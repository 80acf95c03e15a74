"""What a cluster is: nodes of equal devices, a link inside a node and a link between nodes, all as plain
data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True)
class MeasuredRing:
    """A collective that was measured over `ranks` ranks, as the messages of a ring: each takes a latency in
    ns and its bytes."""

    collective: str  # one of COLLECTIVES
    ranks: int
    latency_ns: int
    bytes_per_s: int


@dataclass(frozen=True)
class Link:
    """A path between two devices: latency of a message in ns, and bytes per second in one direction for each
    device.

    `rings` holds the collectives that were measured on it.
    """

    latency_ns: int
    bytes_per_s: int
    rings: tuple[MeasuredRing, ...] = ()

    def message_ns(self, size: int) -> int:
        """Time of one message of `size` bytes."""
        return self.latency_ns + size * 10**9 // self.bytes_per_s

    def measured_link(self, collective: str, ranks: int) -> Link | None:
        """What a message of a collective's ring takes, as measured over the nearest number of ranks; None if
        it was not measured."""
        known = [r for r in self.rings if r.collective == collective]
        nearest = min(known, key=lambda r: (max(ranks, r.ranks) / min(ranks, r.ranks), r.ranks), default=None)
        return Link(nearest.latency_ns, nearest.bytes_per_s) if nearest is not None else None


@dataclass(frozen=True)
class Overheads:
    """What a rank does beside computing, in ns, which no size of a tensor tells.

    `job` passes around each forward and backward (the batch taken, edges unpacked, the loss added), `message`
    when one is packed and sent, `tensor` when the optimizer comes to a parameter and its gradient is counted
    for the norm, `sample` when the order of a global batch is planned, for each of its samples, and `step`
    once a step: metadata and the loss are exchanged, metrics written. `label` is "measured" (`secc profile
    MODEL.py`), "default" (assumed) or "none".
    """

    job: int = 0
    message: int = 0
    tensor: int = 0
    sample: int = 0
    step: int = 0
    label: str = "none"

    def step_ns(self, samples: int) -> int:
        """What a step of so many samples takes beside all computations, messages and updates."""
        return self.step + samples * self.sample


@dataclass(frozen=True)
class Device:
    """A kind of device. `gflops` lists (dtype, peak GFLOP/s of dense matrix products); `efficiency_percent`
    is what of it large ones reach (narrow ones less: `secc.cost.model.gemm_efficiency`).

    `op_ns` is the time that issuing one operation takes, `reserved` the bytes of `memory` that no tensor can
    have. `label` says where the rates come from: "roofline" (the vendor's peaks) or "default" (assumed).
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
    overheads: Overheads = Overheads()

    def flops_per_us(self, dtype: str) -> int:
        """Reachable FLOPs per microsecond in `dtype` (a short name such as "bf16"); that of f32 for a dtype
        that is not listed."""
        known = dict(self.gflops)
        return known.get(dtype, known["f32"]) * 1000 * self.efficiency_percent // 100

    @property
    def memory_bytes_per_us(self) -> int:
        """Bytes of its memory that the device reads or writes per microsecond."""
        return self.memory_bytes_per_s // 10**6

    @property
    def usable_memory(self) -> int:
        """Bytes that tensors can have: memory less what is reserved, with a twentieth kept for
        fragmentation."""
        return (self.memory - self.reserved) * 95 // 100


@dataclass(frozen=True)
class NodeGroup:
    """`nodes` nodes of one kind of device and the link inside each."""

    nodes: int
    device: Device
    inside: Link


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes of `per_node` devices; ranks are numbered node by node.

    Where kinds are mixed, `groups` holds the nodes of each kind in order, and `device` and `inside` the worst
    figures among them, which every rank can count on.
    """

    name: str
    nodes: int
    per_node: int
    device: Device
    inside: Link
    between: Link
    groups: tuple[NodeGroup, ...] = ()

    @property
    def ranks(self) -> int:
        """How many processes the cluster can hold, one for each device."""
        return self.nodes * self.per_node

    def slowest_link(self, ranks: int) -> Link:
        """The slowest link among `ranks` ranks in a row."""
        return self.inside if ranks <= self.per_node else self.between

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Cluster | None:
        """The cluster that plan.json holds, None where it holds none."""
        if not {"device", "inside", "between", "nodes", "per_node"} <= data.keys():
            return None
        groups = tuple(
            NodeGroup(int(g["nodes"]), _device_from_dict(g["device"]), _link_from_dict(g["inside"]))
            for g in data.get("groups", ())
        )
        links = _link_from_dict(data["inside"]), _link_from_dict(data["between"])
        return Cluster(
            str(data.get("name", "")),
            int(data["nodes"]),
            int(data["per_node"]),
            _device_from_dict(data["device"]),
            *links,
            groups,
        )

    @property
    def node_groups(self) -> tuple[NodeGroup, ...]:
        """The nodes of each kind, one group where all are alike."""
        return self.groups or (NodeGroup(self.nodes, self.device, self.inside),)

    @property
    def parts_by_kind(self) -> tuple[Cluster, ...]:
        """The nodes of each kind as clusters of their own; itself where all are alike."""
        if not self.groups:
            return (self,)
        names = (f"{g.nodes}x{self.per_node}x{g.device.kind}" for g in self.groups)
        return tuple(
            Cluster(n, g.nodes, self.per_node, g.device, g.inside, self.between)
            for n, g in zip(names, self.groups, strict=True)
        )

    def view_of_ranks(self, ranks: Iterable[int]) -> Cluster:
        """The cluster as these ranks see it: of one kind where they are all on that, else with the worst
        figures."""
        wanted, start = set(ranks), 0
        for part in self.parts_by_kind:
            if wanted and wanted <= set(range(start, start + part.ranks)):
                return part
            start += part.ranks
        return self

    def trim_to_ranks(self, ranks: Sequence[int]) -> Cluster:
        """The cluster without the nodes that are not needed for so many ranks of each kind."""
        if not self.groups:
            return self
        kept = [
            dataclasses.replace(g, nodes=-(-n // self.per_node))
            for g, n in zip(self.groups, ranks, strict=True)
            if n
        ]
        if len(kept) > 1:
            return mixed_cluster(self.name, kept, self.per_node, self.between)
        return Cluster(self.name, kept[0].nodes, self.per_node, kept[0].device, kept[0].inside, self.between)

    def with_overheads(self, overheads: Overheads) -> Cluster:
        """The cluster with these overheads on every rank."""
        groups = tuple(
            dataclasses.replace(g, device=dataclasses.replace(g.device, overheads=overheads))
            for g in self.groups
        )
        return dataclasses.replace(
            self, device=dataclasses.replace(self.device, overheads=overheads), groups=groups
        )

    def device_of_rank(self, rank: int) -> Device:
        """The device of a rank."""
        node = rank // self.per_node
        for group in self.node_groups:
            if node < group.nodes:
                return group.device
            node -= group.nodes
        raise IndexError(f"the cluster {self.name} has no rank {rank}")

    def to_json(self) -> str:
        """The cluster as JSON text, as plan.json holds it; `groups` only where kinds are mixed, `rings` only
        where some were measured."""
        return json.dumps(
            dataclasses.asdict(self, dict_factory=_without_empty_fields) | {"ranks": self.ranks}
        )


def _without_empty_fields(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in fields if value or key not in ("groups", "rings")}


def _link_from_dict(data: Mapping[str, Any]) -> Link:
    return Link(
        int(data["latency_ns"]),
        int(data["bytes_per_s"]),
        tuple(MeasuredRing(**r) for r in data.get("rings", ())),
    )


def _device_from_dict(data: Mapping[str, Any]) -> Device:
    rates = tuple((str(name), int(rate)) for name, rate in data["gflops"])
    figures: dict[str, Any] = {**data, "gflops": rates, "overheads": Overheads(**data.get("overheads", {}))}
    return Device(**figures)


def mixed_cluster(name: str, groups: Sequence[NodeGroup], per_node: int, between: Link) -> Cluster:
    """A cluster of several kinds of nodes, all of `per_node` devices."""
    devices = [g.device for g in groups]
    inside = Link(max(g.inside.latency_ns for g in groups), min(g.inside.bytes_per_s for g in groups))
    return Cluster(
        name, sum(g.nodes for g in groups), per_node, _worst_device(devices), inside, between, tuple(groups)
    )


def _worst_device(devices: Sequence[Device]) -> Device:
    rates = [dict(d.gflops) for d in devices]
    common = [name for name in rates[0] if all(name in r for r in rates)]
    return Device(
        kind="+".join(dict.fromkeys(d.kind for d in devices)),
        backend=devices[0].backend,
        gflops=tuple((name, min(r[name] for r in rates)) for name in common),
        memory=min(d.memory for d in devices),
        memory_bytes_per_s=min(d.memory_bytes_per_s for d in devices),
        efficiency_percent=min(d.efficiency_percent for d in devices),
        op_ns=max(d.op_ns for d in devices),
        reserved=max(d.reserved for d in devices),
        label="default" if any(d.label == "default" for d in devices) else devices[0].label,
        overheads=_largest_overheads([d.overheads for d in devices]),
    )


def _largest_overheads(found: Sequence[Overheads]) -> Overheads:
    names = ("job", "message", "tensor", "sample", "step")
    return Overheads(**{name: max(getattr(o, name) for o in found) for name in names}, label=found[0].label)
