"""Cluster files: YAML with nodes, devices and kind of a preset, and figures that replace the preset's.

    nodes: 4
    devices: 8                            # of each node
    kind: H100
    memory_gib: 80
    inside: {gb_s: 450, latency_us: 3}    # a link, one direction for each device
    between: {gb_s: 50, latency_us: 8}

A link may have `collectives`, as `secc profile --links` measures them: a list of {collective: all_reduce,
ranks: 2, gb_s: 2.1, latency_us: 90}, what each message of the collective's ring takes. Nodes of several kinds
stand under `groups`, each with these keys but `between`. A kind that is no preset needs `like: KIND`, whose
figures hold where the file has none.
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

FileData = Mapping[str, Any]

_GROUP_KEYS = frozenset({
    "nodes", "devices", "kind", "like", "memory_gib", "bf16_tflops", "f32_tflops", "memory_gb_s", "efficiency_percent", "inside",
})  # fmt: skip
_TOP_LEVEL_KEYS = _GROUP_KEYS | {"groups", "between", "name"}


def read_cluster_file(path: Path) -> Cluster:
    """The cluster that a file describes. Raises UserError for what is wrong with it."""
    data = _check_keys(path, _load_yaml(path), _TOP_LEVEL_KEYS)
    name = str(data.get("name", path.stem))
    if "groups" not in data:
        part = _node_group(path, data)
        return join_clusters(name, [part], _link_from_file(path, data, "between", part.between))
    groups = data["groups"]
    if not isinstance(groups, list) or not groups or data.keys() - {"groups", "between", "name"}:
        raise UserError(
            "'groups' is not a list of nodes of several kinds",
            str(path),
            "give each kind's keys under its own entry, and only there",
        )
    parts = [_node_group(path, _check_keys(path, g, _GROUP_KEYS)) for g in cast("list[Any]", groups)]
    slowest = min((p.between for p in parts), key=lambda link: link.bytes_per_s)
    return join_clusters(name, parts, _link_from_file(path, data, "between", slowest))


def _load_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(
            f"cannot read the cluster file: {error.strerror}", str(path), DESCRIPTION_FORMS
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"the cluster file is not YAML: {' '.join(str(error).split())}", str(path)) from None


def _check_keys(path: Path, data: Any, keys: frozenset[str]) -> FileData:
    if not isinstance(data, dict):
        raise UserError(
            "the cluster file is not a mapping of keys to figures",
            str(path),
            f"keys are {', '.join(sorted(keys))}",
        )
    found = cast("dict[Any, Any]", data)
    unknown = sorted(str(k) for k in found if k not in keys)
    if unknown:
        raise UserError(
            f"the cluster file has an unknown key {unknown[0]!r}",
            str(path),
            f"keys are {', '.join(sorted(keys))}",
        )
    return found


def _node_group(path: Path, data: FileData) -> Cluster:
    kind = _device_kind(path, data)
    found = preset_cluster(
        path.stem,
        _positive_integer(path, data, "nodes", 1),
        _positive_integer(path, data, "devices", None),
        str(data.get("like", kind)),
    )
    return dataclasses.replace(
        found,
        device=_device_from_file(path, data, found.device, kind),
        inside=_link_from_file(path, data, "inside", found.inside),
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
        remedy = "add `like: KIND`, a preset whose figures hold where the file has none"
        raise UserError(f"no preset has the figures of {kind!r}", str(path), remedy)
    return kind


def _device_from_file(path: Path, data: FileData, device: Device, kind: str) -> Device:
    rates = dict(device.gflops)
    if "bf16_tflops" in data:
        rates["bf16"] = rates["f16"] = round(_positive_number(path, data, "bf16_tflops", 0) * 1000)
    if "f32_tflops" in data:
        rates["f32"] = round(_positive_number(path, data, "f32_tflops", 0) * 1000)
    return dataclasses.replace(
        device,
        kind=device.kind if kind.lower() in DEVICE_PRESETS else kind,
        gflops=tuple(rates.items()),
        memory=round(_positive_number(path, data, "memory_gib", device.memory / GIB) * GIB),
        memory_bytes_per_s=round(
            _positive_number(path, data, "memory_gb_s", device.memory_bytes_per_s / 10**9) * 10**9
        ),
        efficiency_percent=_positive_integer(path, data, "efficiency_percent", device.efficiency_percent),
    )


def _link_from_file(path: Path, data: FileData, name: str, default: Link) -> Link:
    """`inside` and `between` are mappings {gb_s: 450, latency_us: 3}, which may have `collectives`."""
    figures = _mapping_with_keys(data.get(name, {}), {"gb_s", "latency_us", "collectives"})
    if figures is None:
        raise UserError(f"{name!r} is not a link", str(path), f"write {name}: {{gb_s: 50, latency_us: 8}}")
    listed = figures.get("collectives", [])
    rings = (
        [_ring_from_file(path, entry) for entry in cast("list[Any]", listed)]
        if isinstance(listed, list)
        else [_ring_from_file(path, listed)]
    )
    return Link(*_latency_and_bandwidth(path, figures, default), tuple(rings))


def _ring_from_file(path: Path, entry: Any) -> MeasuredRing:
    figures = _mapping_with_keys(entry, {"collective", "ranks", "gb_s", "latency_us"})
    if (
        figures is None
        or figures.get("collective") not in COLLECTIVES
        or not {"gb_s", "latency_us"} <= figures.keys()
    ):
        example = f"{{collective: {COLLECTIVES[0]}, ranks: 2, gb_s: 2.1, latency_us: 90}}"
        remedy = f"list entries such as {example}, or measure them (secc profile --links); collectives are {', '.join(COLLECTIVES)}"
        raise UserError(f"{entry!r} is not a measured collective", str(path), remedy)
    ranks = _positive_integer(path, figures, "ranks", None)
    if ranks < 2:
        raise UserError(
            f"'ranks' of a collective is {ranks}", str(path), "collectives are measured over 2 ranks or more"
        )
    return MeasuredRing(figures["collective"], ranks, *_latency_and_bandwidth(path, figures, Link(1, 1)))


def _mapping_with_keys(table: Any, keys: set[str]) -> dict[str, Any] | None:
    """A mapping that has no other keys than these."""
    return (
        None
        if not isinstance(table, dict) or cast("dict[Any, Any]", table).keys() - keys
        else cast("dict[str, Any]", table)
    )


def _latency_and_bandwidth(path: Path, figures: FileData, default: Link) -> tuple[int, int]:
    """(latency in ns, bytes a second)."""
    gb_s = _positive_number(path, figures, "gb_s", default.bytes_per_s / 10**9)
    return round(_positive_number(path, figures, "latency_us", default.latency_ns / 1000) * 1000), round(
        gb_s * 10**9
    )


def _positive_number(path: Path, data: FileData, key: str, default: float) -> float:
    value = data.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise UserError(f"{key!r} is {value!r}", str(path), f"{key} is a number above 0")
    return value


def _positive_integer(path: Path, data: FileData, key: str, default: int | None) -> int:
    value = data.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        cause = f"the cluster file lacks {key!r}" if value is None else f"{key!r} is {value!r}"
        raise UserError(cause, str(path), f"{key} is a whole number of at least 1")
    return value
