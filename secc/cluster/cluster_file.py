"""Cluster files: YAML with nodes, devices and the kind of a preset, and figures that override the preset's.

    nodes: 4
    devices: 8                            # per node
    kind: H100
    memory_gib: 80
    inside: {gb_s: 450, latency_us: 3}    # link, one direction per device
    between: {gb_s: 50, latency_us: 8}
    host: {gb_s: 51, memory_gib: 238}     # copies to host memory in one direction, and memory, per device

A link may have `collectives`, as `secc profile --links` measures them: a list of {collective: all_reduce,
ranks: 2, gb_s: 2.1, latency_us: 90}, the time of one message of the collective's ring. Nodes of several kinds
are listed under `groups`, each entry with these keys except `between`. A kind without a preset needs
`like: KIND`, a preset that supplies the figures missing in the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from secc.cluster.assembly import DESCRIPTION_FORMS, join_clusters, preset_cluster
from secc.cluster.presets import DEVICE_PRESETS
from secc.cluster.types import COLLECTIVES, GIB, Cluster, Device, Link, MeasuredRing
from secc.errors import UserError
from secc.runtime.host.regular_files import read_regular_file
from secc.runtime.plan.json_shapes import show_value
from secc.runtime.plan.plan_file import MAX_RANKS

FileData = Mapping[str, Any]

_MAX_BYTES, _MAX_CAUSE = 1 << 20, 200
_MAX_LOST_ROWS = 1 << 16
_MAX_MEMORY_MARGIN = 90  # percent
_MIN_FIGURE, _MAX_FIGURE = 1e-3, 1e9  # smaller ones would be no whole ns, MB/s or GFLOP/s

_GROUP_KEYS = frozenset({
    "nodes", "devices", "kind", "like", "memory_gib", "bf16_tflops", "f32_tflops", "memory_gb_s",
    "efficiency_percent", "memory_percent", "expert_lost_rows", "memory_margin", "inside", "host",
})  # fmt: skip
_TOP_LEVEL_KEYS = _GROUP_KEYS | {"groups", "between", "name"}


def read_cluster_file(path: Path) -> Cluster:
    """Read a cluster from a file. Raises UserError if it cannot be read or has wrong entries."""
    try:
        return _parse_cluster(path)
    except UserError as error:
        raise UserError(error.message, error.where or str(path), error.remedy) from None


def _parse_cluster(path: Path) -> Cluster:
    data = _check_keys(path, _load_yaml(path), _TOP_LEVEL_KEYS)
    name = str(data.get("name", path.stem))
    if "groups" not in data:
        part = _node_group(path, data)
        return join_clusters(name, [part], _link_from_file(path, data, "between", part.between))
    groups = data["groups"]
    if not isinstance(groups, list) or not groups or data.keys() - {"groups", "between", "name"}:
        raise UserError(
            "'groups' must be a list of entries, one for each kind of node",
            str(path),
            "move the keys of each kind into its own entry",
        )
    parts = [_node_group(path, _check_keys(path, g, _GROUP_KEYS)) for g in cast("list[Any]", groups)]
    slowest = min((p.between for p in parts), key=lambda link: link.bytes_per_s)
    return join_clusters(name, parts, _link_from_file(path, data, "between", slowest))


class _LoaderWithoutAliases(yaml.SafeLoader):
    """Loads YAML without aliases: nested ones make small files huge."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Raises YAMLError for an alias."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases are not accepted", problem_mark=mark)
        return super().compose_node(parent, index)


def _load_yaml(path: Path) -> Any:
    try:
        return yaml.load(read_regular_file(path, _MAX_BYTES).decode(), _LoaderWithoutAliases)
    except OSError as error:
        raise UserError(
            f"cannot read the cluster file: {error.strerror}", str(path), DESCRIPTION_FORMS
        ) from None
    except RecursionError:
        raise UserError("the cluster file is nested too deeply", str(path)) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a number or date that Python cannot hold
        cause = " ".join(str(error).split())[:_MAX_CAUSE]
        raise UserError(f"the cluster file is not YAML: {cause}", str(path)) from None


def _check_keys(path: Path, data: Any, keys: frozenset[str]) -> FileData:
    if not isinstance(data, dict):
        raise UserError(
            "expected a mapping of keys to figures in the cluster file",
            str(path),
            f"keys are {', '.join(sorted(keys))}",
        )
    mapping = cast("dict[Any, Any]", data)
    unknown = sorted(str(k) for k in mapping if k not in keys)
    if unknown:
        raise UserError(
            f"the cluster file has an unknown key {show_value(unknown[0])}",
            str(path),
            f"keys are {', '.join(sorted(keys))}",
        )
    return mapping


def _node_group(path: Path, data: FileData) -> Cluster:
    kind = _device_kind(path, data)
    preset = preset_cluster(
        path.stem,
        _positive_integer(path, data, "nodes", 1),
        _positive_integer(path, data, "devices", None),
        str(data.get("like", kind)),
    )
    return dataclasses.replace(
        preset,
        device=_device_from_file(path, data, preset.device, kind),
        inside=_link_from_file(path, data, "inside", preset.inside),
    )


def _device_kind(path: Path, data: FileData) -> str:
    kind = data.get("kind")
    if not isinstance(kind, str):
        raise UserError(
            "the cluster file lacks 'kind'",
            str(path),
            f"kinds are {', '.join(d.kind for d in DEVICE_PRESETS.values())}",
        )
    if kind.lower() not in DEVICE_PRESETS and "like" not in data:
        remedy = "add `like: KIND`, a preset that supplies the figures missing in the file"
        raise UserError(f"there is no preset for the device kind {show_value(kind)}", str(path), remedy)
    return kind


def _device_from_file(path: Path, data: FileData, device: Device, kind: str) -> Device:
    rates = dict(device.gflops)
    if "bf16_tflops" in data:
        rates["bf16"] = rates["f16"] = round(_positive_number(path, data, "bf16_tflops", 0) * 1000)
    if "f32_tflops" in data:
        rates["f32"] = round(_positive_number(path, data, "f32_tflops", 0) * 1000)
    host = _mapping_with_keys(data.get("host", {}), {"gb_s", "memory_gib"})
    if host is None:
        raise UserError(
            f"expected the link to host memory at 'host', got {show_value(data['host'])}",
            str(path),
            "write host: {gb_s: 51, memory_gib: 238}, figures for each device",
        )
    return dataclasses.replace(
        device,
        kind=device.kind if kind.lower() in DEVICE_PRESETS else kind,
        gflops=tuple(rates.items()),
        memory=round(_positive_number(path, data, "memory_gib", device.memory / GIB) * GIB),
        memory_bytes_per_s=round(
            _positive_number(path, data, "memory_gb_s", device.memory_bytes_per_s / 10**9) * 10**9
        ),
        efficiency_percent=_positive_integer(
            path, data, "efficiency_percent", device.efficiency_percent, 100
        ),
        memory_percent=_positive_integer(path, data, "memory_percent", device.memory_percent, 100),
        expert_lost_rows=round(
            _number_in_range(path, data, "expert_lost_rows", device.expert_lost_rows, 0, _MAX_LOST_ROWS)
        ),
        memory_margin=round(
            _number_in_range(path, data, "memory_margin", device.memory_margin, 0, _MAX_MEMORY_MARGIN)
        ),
        host_memory=round(_positive_number(path, host, "memory_gib", device.host_memory / GIB) * GIB),
        host_bytes_per_s=round(_positive_number(path, host, "gb_s", device.host_bytes_per_s / 10**9) * 10**9),
    )


def _link_from_file(path: Path, data: FileData, name: str, default: Link) -> Link:
    """The link `name` ("inside" or "between"), a mapping such as {gb_s: 450, latency_us: 3}."""
    figures = _mapping_with_keys(data.get(name, {}), {"gb_s", "latency_us", "collectives"})
    if figures is None:
        raise UserError(
            f"expected a link at {name!r}, got {show_value(data[name])}",
            str(path),
            f"write {name}: {{gb_s: 50, latency_us: 8}}",
        )
    entries = figures.get("collectives", [])
    rings = [
        _ring_from_file(path, entry)
        for entry in (cast("list[Any]", entries) if isinstance(entries, list) else [entries])
    ]
    return Link(*_latency_and_bandwidth(path, figures, default), tuple(rings))


def _ring_from_file(path: Path, entry: Any) -> MeasuredRing:
    figures = _mapping_with_keys(entry, {"collective", "ranks", "gb_s", "latency_us"})
    if (
        figures is None
        or figures.get("collective") not in COLLECTIVES
        or not {"gb_s", "latency_us"} <= figures.keys()
    ):
        example = f"{{collective: {COLLECTIVES[0]}, ranks: 2, gb_s: 2.1, latency_us: 90}}"
        remedy = (
            f"write entries such as {example}, or measure them (secc profile --links); "
            f"collectives are {', '.join(COLLECTIVES)}"
        )
        raise UserError(f"expected a measured collective, got {show_value(entry)}", str(path), remedy)
    ranks = _positive_integer(path, figures, "ranks", None)
    if ranks < 2:
        raise UserError(
            f"expected at least 2 ranks of a collective, got {ranks}",
            str(path),
            "write the number of ranks it was measured over",
        )
    return MeasuredRing(figures["collective"], ranks, *_latency_and_bandwidth(path, figures, Link(1, 1)))


def _mapping_with_keys(table: Any, keys: set[str]) -> dict[str, Any] | None:
    """`table` if it is a mapping with no other keys than these, else None."""
    if not isinstance(table, dict) or cast("dict[Any, Any]", table).keys() - keys:
        return None
    return cast("dict[str, Any]", table)


def _latency_and_bandwidth(path: Path, figures: FileData, default: Link) -> tuple[int, int]:
    """(latency in ns, bytes per second)."""
    gb_s = _positive_number(path, figures, "gb_s", default.bytes_per_s / 10**9)
    latency_us = _positive_number(path, figures, "latency_us", default.latency_ns / 1000)
    return round(latency_us * 1000), round(gb_s * 10**9)


def _positive_number(path: Path, data: FileData, key: str, default: float) -> float:
    return _number_in_range(path, data, key, default, _MIN_FIGURE, _MAX_FIGURE)


def _number_in_range(
    path: Path, data: FileData, key: str, default: float, least: float, most: float
) -> float:
    value = data.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        limit = f"a number of at least {least:g} and up to {most:g}"
        raise UserError(f"expected {limit} for {key!r}, got {show_value(value)}", str(path))
    return value


def _positive_integer(
    path: Path, data: FileData, key: str, default: int | None, most: int = MAX_RANKS
) -> int:
    value = data.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        if value is None:
            raise UserError(
                f"the cluster file lacks {key!r}", str(path), f"add {key}, an integer of at least 1"
            )
        limit = f"an integer of at least 1 and up to {most}"
        raise UserError(f"expected {limit} for {key!r}, got {show_value(value)}", str(path))
    return value
