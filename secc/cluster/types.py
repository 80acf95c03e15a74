"""Clusters as plain data: nodes of equal devices, a link inside each node and a link between nodes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secc.cluster.framework import OWN_RUNTIME, Framework

GIB = 1 << 30
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


@dataclass(frozen=True)
class MeasuredRing:
    """A collective measured over `ranks` ranks, expressed as the messages of a ring: each takes
    `latency_ns` plus its bytes over `bytes_per_s`."""

    collective: str  # one of COLLECTIVES
    ranks: int
    latency_ns: int
    bytes_per_s: int


@dataclass(frozen=True)
class Link:
    """A connection between two devices: latency of a message, and bytes per second in one direction for each
    device.

    rings: collectives measured on it.
    """

    latency_ns: int
    bytes_per_s: int
    rings: tuple[MeasuredRing, ...] = ()

    def message_ns(self, size: int) -> int:
        """Nanoseconds of one message of `size` bytes."""
        return self.latency_ns + size * 10**9 // self.bytes_per_s

    def measured_link(self, collective: str, ranks: int) -> Link | None:
        """The time of one ring message of a collective, from the measurement with the nearest number of
        ranks; None if it was not measured."""
        rings = [r for r in self.rings if r.collective == collective]
        nearest = min(rings, key=lambda r: (max(ranks, r.ranks) / min(ranks, r.ranks), r.ranks), default=None)
        return Link(nearest.latency_ns, nearest.bytes_per_s) if nearest is not None else None


@dataclass(frozen=True)
class Overheads:
    """Time of a rank in nanoseconds that does not depend on tensor sizes.

    job: of each forward and backward (taking the batch, unpacking messages, adding the loss).
    message: of packing and sending a message.
    tensor: of a parameter in the optimizer and in the gradient norm.
    sample: of a sample of the global batch in scheduling a step.
    step: of a step: exchange of metadata and loss, writing of metrics.
    label: "measured" (`secc profile MODEL.py`), "default" (assumed) or "none".
    """

    job: int = 0
    message: int = 0
    tensor: int = 0
    sample: int = 0
    step: int = 0
    label: str = "none"

    def step_ns(self, samples: int) -> int:
        """Overhead of one step with `samples` samples, in addition to jobs, messages and updates."""
        return self.step + samples * self.sample


@dataclass(frozen=True)
class Device:
    """A kind of device.

    backend: torch device type, "cuda" or "cpu".
    gflops: (dtype, peak GFLOP/s of dense matrix products).
    efficiency_percent: percent of the peak that large products reach; narrow ones reach less
        (`secc.cost.model.gemm_efficiency`).
    memory_percent: percent of the memory's rate that operations other than products reach.
    memory, reserved: bytes, and those of them that tensors cannot use.
    op_ns: nanoseconds of issuing an operation.
    expert_lost_rows: a product of several experts takes as long as one with this many more rows an expert.
    host_memory: bytes of its node's host memory for each device, 0 if unknown. host_bytes_per_s: bytes per
        second that copies between host and device reach in each direction at once.
    label: origin of the rates, "roofline" (vendor peaks) or "default" (assumed).
    memory_margin: percent of the memory that fragmentation may take, which plans leave free.
    framework: what the software of a run makes of the device; plans have secc's own runtime.
    """

    kind: str
    backend: str
    gflops: tuple[tuple[str, int], ...]
    memory: int
    memory_bytes_per_s: int
    efficiency_percent: int
    op_ns: int
    reserved: int
    label: str
    overheads: Overheads = Overheads()
    expert_lost_rows: int = 0
    host_memory: int = 0
    host_bytes_per_s: int = 0
    memory_margin: int = 5
    framework: Framework = OWN_RUNTIME
    memory_percent: int = 100

    def flops_per_us(self, dtype: str) -> int:
        """FLOPs per microsecond of large products in `dtype` (short name such as "bf16"); that of f32 for
        unlisted dtypes."""
        rates = dict(self.gflops)
        return rates.get(dtype, rates["f32"]) * 1000 * self.efficiency_percent // 100

    @property
    def memory_bytes_per_us(self) -> int:
        """Memory bytes read or written per microsecond."""
        return self.memory_bytes_per_s // 10**6

    @property
    def moved_bytes_per_us(self) -> int:
        """Memory bytes that operations other than products read or write per microsecond."""
        return self.memory_bytes_per_s * self.memory_percent // 10**8

    @property
    def usable_memory(self) -> int:
        """Bytes available to tensors: without reserved ones, and without what fragmentation may take."""
        return (self.memory - self.reserved) * (100 - self.memory_margin) // 100

    @property
    def usable_host_memory(self) -> int:
        """Bytes of host memory for offloaded tensors of a rank: three quarters, as the node's processes, the
        data's workers and the files that they read need the rest."""
        return self.host_memory * 3 // 4

    def host_copy_ns(self, size: int) -> int:
        """Nanoseconds of copying `size` bytes between host and device in one direction."""
        return size * 10**9 // max(1, self.host_bytes_per_s)


@dataclass(frozen=True)
class NodeGroup:
    """`nodes` nodes of one kind of device, and the link inside each."""

    nodes: int
    device: Device
    inside: Link


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes of `per_node` devices. Ranks are numbered node by node.

    In a cluster of several kinds, `groups` holds the nodes of each kind in order, and `device` and `inside`
    hold the worst figures among them, which every rank reaches.
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
        """Number of devices; each runs one process."""
        return self.nodes * self.per_node

    def slowest_link(self, ranks: int) -> Link:
        """The slowest link among `ranks` consecutive ranks."""
        return self.inside if ranks <= self.per_node else self.between

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Cluster | None:
        """Read a cluster from the entry in plan.json; None if there is none."""
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
        """The nodes of each kind; a single group in a homogeneous cluster."""
        return self.groups or (NodeGroup(self.nodes, self.device, self.inside),)

    @property
    def parts_by_kind(self) -> tuple[Cluster, ...]:
        """The nodes of each kind as clusters of their own; the cluster itself if it is homogeneous."""
        if not self.groups:
            return (self,)
        names = (f"{g.nodes}x{self.per_node}x{g.device.kind}" for g in self.groups)
        return tuple(
            Cluster(n, g.nodes, self.per_node, g.device, g.inside, self.between)
            for n, g in zip(names, self.groups, strict=True)
        )

    def view_of_ranks(self, ranks: Iterable[int]) -> Cluster:
        """The cluster with figures that hold for these ranks: those of one kind if all are of that kind,
        else the worst ones."""
        requested, start = set(ranks), 0
        for part in self.parts_by_kind:
            if requested and requested <= set(range(start, start + part.ranks)):
                return part
            start += part.ranks
        return self

    def trim_to_ranks(self, ranks: Sequence[int]) -> Cluster:
        """The cluster without nodes that are not needed for `ranks[i]` ranks of the i-th kind."""
        if not self.groups:
            return self
        needed = [
            dataclasses.replace(g, nodes=-(-n // self.per_node))
            for g, n in zip(self.groups, ranks, strict=True)
            if n
        ]
        if len(needed) > 1:
            return mixed_cluster(self.name, needed, self.per_node, self.between)
        return Cluster(
            self.name, needed[0].nodes, self.per_node, needed[0].device, needed[0].inside, self.between
        )

    def with_overheads(self, overheads: Overheads) -> Cluster:
        """The cluster with these overheads on every device."""
        groups = tuple(
            dataclasses.replace(g, device=dataclasses.replace(g.device, overheads=overheads))
            for g in self.groups
        )
        return dataclasses.replace(
            self, device=dataclasses.replace(self.device, overheads=overheads), groups=groups
        )

    def device_of_rank(self, rank: int) -> Device:
        """The device of a rank. Raises IndexError if there is no such rank."""
        node = rank // self.per_node
        for group in self.node_groups:
            if node < group.nodes:
                return group.device
            node -= group.nodes
        raise IndexError(f"the cluster {self.name} has no rank {rank}")

    def to_json(self) -> str:
        """The cluster as JSON text for plan.json. `groups` and `rings` are left out where they are empty, and
        the framework, as plans have secc's own."""
        return json.dumps(
            dataclasses.asdict(self, dict_factory=_without_empty_fields) | {"ranks": self.ranks}
        )


def _without_empty_fields(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {
        key: value
        for key, value in fields
        if key != "framework" and (value or key not in ("groups", "rings"))
    }


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
    """A cluster of several kinds of nodes with `per_node` devices each."""
    devices = [g.device for g in groups]
    inside = Link(max(g.inside.latency_ns for g in groups), min(g.inside.bytes_per_s for g in groups))
    return Cluster(
        name, sum(g.nodes for g in groups), per_node, _worst_device(devices), inside, between, tuple(groups)
    )


def _worst_device(devices: Sequence[Device]) -> Device:
    """The least of each figure. Of products and of memory it is the rate that is reached, so that one kind's
    low peak is not multiplied by another's low efficiency."""
    efficiency = max(d.efficiency_percent for d in devices)
    memory_percent = max(d.memory_percent for d in devices)
    rates = [{name: rate * d.efficiency_percent // efficiency for name, rate in d.gflops} for d in devices]
    common = [name for name in rates[0] if all(name in r for r in rates)]
    return Device(
        kind="+".join(dict.fromkeys(d.kind for d in devices)),
        backend=devices[0].backend,
        gflops=tuple((name, min(r[name] for r in rates)) for name in common),
        memory=min(d.memory for d in devices),
        memory_bytes_per_s=min(d.memory_bytes_per_s * d.memory_percent for d in devices) // memory_percent,
        efficiency_percent=efficiency,
        op_ns=max(d.op_ns for d in devices),
        reserved=max(d.reserved for d in devices),
        label="default" if any(d.label == "default" for d in devices) else devices[0].label,
        overheads=_largest_overheads([d.overheads for d in devices]),
        host_memory=min(d.host_memory for d in devices),
        host_bytes_per_s=min(d.host_bytes_per_s for d in devices),
        memory_margin=max(d.memory_margin for d in devices),
        memory_percent=memory_percent,
    )


def _largest_overheads(overheads: Sequence[Overheads]) -> Overheads:
    names = ("job", "message", "tensor", "sample", "step")
    return Overheads(
        **{name: max(getattr(o, name) for o in overheads) for name in names}, label=overheads[0].label
    )
