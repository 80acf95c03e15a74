"""A cluster as tables: its nodes and links, and the figures of each kind of device with their sources."""

from __future__ import annotations

from secc.cluster import GIB, Cluster, Link, MeasuredRing, NodeGroup
from secc.cluster.presets import DEVICE_PRESETS, FIGURE_SOURCES, LINK_PRESETS
from secc.report.text_table import TextTable

OVERHEAD_NAMES = ("job", "message", "tensor", "sample", "step")


def cluster_tables(cluster: Cluster) -> list[TextTable]:
    """A table of the whole cluster, then one for each kind of device."""
    rows = [
        (g.device.kind, str(g.nodes), str(cluster.per_node), str(g.nodes * cluster.per_node))
        for g in cluster.node_groups
    ]
    note = f"{cluster.ranks} ranks; between nodes {_link_text(cluster.between)}"
    return [
        TextTable(cluster.name, ("kind", "nodes", "devices each", "ranks"), tuple(rows), note),
        *map(_device_table, cluster.node_groups),
    ]


def _device_table(group: NodeGroup) -> TextTable:
    device, sources = group.device, FIGURE_SOURCES.get(group.device.kind.lower(), {})
    preset, links = DEVICE_PRESETS.get(device.kind.lower()), LINK_PRESETS.get(device.kind.lower())

    def row(name: str, value: str, key: str, is_preset: bool) -> tuple[str, str, str]:
        return name, value, sources[key] if is_preset else "given"

    memory = f"{device.memory / GIB:.4g} GiB, {device.usable_memory / GIB:.4g} of it for tensors"
    rates = [
        row(
            f"peak {name}",
            f"{gflops / 1000:g} TFLOP/s",
            "rates",
            preset is not None and (name, gflops) in preset.gflops,
        )
        for name, gflops in device.gflops
    ]
    same_bandwidth = preset is not None and device.memory_bytes_per_s == preset.memory_bytes_per_s
    rows = (
        *rates,
        row("memory", memory, "memory", preset is not None and device.memory == preset.memory),
        row("memory rate", f"{device.memory_bytes_per_s / 1e9:g} GB/s", "memory", same_bandwidth),
        row(
            "reached between products",
            f"{device.memory_percent}% of it",
            "moved",
            preset is not None and device.memory_percent == preset.memory_percent,
        ),
        row(
            "inside a node",
            _link_text(group.inside),
            "inside",
            links is not None and group.inside == links[0],
        ),
        row(
            "host memory",
            f"{device.host_memory / GIB:.4g} GiB a device, {device.usable_host_memory / GIB:.4g} of it for"
            " offloaded tensors",
            "host",
            preset is not None and device.host_memory == preset.host_memory,
        ),
        row(
            "copies to and from it",
            f"{device.host_bytes_per_s / 1e9:g} GB/s in each direction",
            "host",
            preset is not None and device.host_bytes_per_s == preset.host_bytes_per_s,
        ),
        *(
            (f"{r.collective} over {r.ranks}", f"{_rates_text(r)} (a message of its ring)", "measured")
            for r in group.inside.rings
        ),
        ("issuing an operation", f"{device.op_ns / 1000:g} us", "assumed"),
        *(
            (
                f"overhead of a {name}",
                f"{getattr(device.overheads, name) / 1000:g} us",
                device.overheads.label,
            )
            for name in OVERHEAD_NAMES
        ),
    )
    return TextTable(
        device.kind, ("figure", "value", "source"), rows, f"the rates are labelled {device.label}"
    )


def _link_text(link: Link) -> str:
    return f"{_rates_text(link)} (one direction, each device)"


def _rates_text(link: Link | MeasuredRing) -> str:
    return f"{link.bytes_per_s / 1e9:g} GB/s, {link.latency_ns / 1000:g} us"
