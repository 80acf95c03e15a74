"""Reading a cluster's description: `local`, `local:N`, `4x8xH100`, or a TOML file. Everything wrong with it is a UserError."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from secc.cluster.presets import DEVICES, LINKS
from secc.cluster.types import GIB, Cluster, Device, Link
from secc.errors import UserError

MAX_LOCAL_CPUS = 8  # processes that plain `local` starts on a machine without GPUs, at most
_FORMS = "use `local`, `local:N`, NODESxDEVICESxKIND such as 4x8xH100, or the path of a .toml file"


def parse(text: str) -> Cluster:
    """The cluster that `text` describes. Raises UserError with what is wrong and the forms there are."""
    text = text.strip()
    if text == "local" or text.startswith("local:"):
        return _local(text)
    if text.endswith(".toml"):
        return _file(Path(text))
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z]\w*)", text)
    if found is None:
        raise UserError(f"cannot read the cluster {text!r}", remedy=_FORMS)
    nodes, per_node, kind = int(found[1] or 1), int(found[2]), found[3]
    return _cluster(text, nodes, per_node, kind)


def _cluster(name: str, nodes: int, per_node: int, kind: str) -> Cluster:
    if nodes < 1 or per_node < 1:
        raise UserError(f"the cluster {name!r} has no devices", remedy=_FORMS)
    if kind.lower() not in DEVICES:
        known = ", ".join(d.kind for d in DEVICES.values())
        remedy = f"known kinds are {known}; describe others in a .toml file"
        raise UserError(f"the cluster {name!r} names an unknown device kind {kind!r}", remedy=remedy)
    inside, between = LINKS[kind.lower()]
    return Cluster(name, nodes, per_node, DEVICES[kind.lower()], inside, between)


# -- this machine ---------------------------------------------------------------------------------------------------------------------


def _local(text: str) -> Cluster:
    wanted = text.removeprefix("local").removeprefix(":")
    if wanted and (not wanted.isdecimal() or int(wanted) < 1):
        raise UserError(f"cannot read the cluster {text!r}", remedy="local:N takes the number of processes, such as local:4")
    gpus = local_gpus()
    count = int(wanted or 0)
    if not gpus:
        return _cluster(text, 1, count or max(2, min(MAX_LOCAL_CPUS, _cores())), "cpu")
    if count > len(gpus):
        raise UserError(
            f"{text} asks for {count} processes, but this machine has {len(gpus)} GPUs",
            remedy=f"use local:{len(gpus)} or fewer, or 1x{count}xcpu to run on CPU processes",
        )
    return _local_gpus(text, count or len(gpus), *gpus[0])


def _local_gpus(text: str, count: int, name: str, memory: int) -> Cluster:
    """GPUs by the name the driver gives; one that no preset knows gets the figures of L40S and the label "default"."""
    kind = next((k for k, d in DEVICES.items() if d.kind in name.replace("-", " ").split()), None)
    device = DEVICES[kind] if kind else dataclasses.replace(DEVICES["l40s"], kind=name, label="default")
    inside, between = LINKS[kind or "l40s"]
    return Cluster(text, 1, count, dataclasses.replace(device, memory=memory), inside, between)


def local_gpus() -> list[tuple[str, int]]:
    """(name, bytes of memory) of each GPU of this machine."""
    import torch  # only here: reading any other description needs no torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [(p.name, p.total_memory) for p in found]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- files ----------------------------------------------------------------------------------------------------------------------------

_KEYS = {"nodes", "devices", "kind", "memory_gib", "bf16_tflops", "f32_tflops", "memory_gb_s", "efficiency_percent", "inside", "between"}


def _file(path: Path) -> Cluster:
    """A TOML file: nodes, devices, kind of a preset, and figures that replace the preset's."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read the cluster file: {error.strerror}", str(path), _FORMS) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the cluster file is not TOML: {error}", str(path)) from None
    unknown = sorted(data.keys() - _KEYS)
    if unknown:
        raise UserError(f"the cluster file has an unknown key {unknown[0]!r}", str(path), f"keys are {', '.join(sorted(_KEYS))}")
    devices = _number(path, data, "devices", None)
    cluster = _cluster(path.stem, _number(path, data, "nodes", 1), devices, _text(path, data, "kind"))
    return dataclasses.replace(
        cluster,
        device=_device(path, data, cluster.device),
        inside=_link(path, data, "inside", cluster.inside),
        between=_link(path, data, "between", cluster.between),
    )


def _device(path: Path, data: dict[str, Any], preset: Device) -> Device:
    rates = dict(preset.gflops)
    if "bf16_tflops" in data:
        rates["bf16"] = rates["f16"] = _number(path, data, "bf16_tflops", None) * 1000
    if "f32_tflops" in data:
        rates["f32"] = _number(path, data, "f32_tflops", None) * 1000
    return dataclasses.replace(
        preset,
        gflops=tuple(rates.items()),
        memory=_number(path, data, "memory_gib", preset.memory // GIB) * GIB if "memory_gib" in data else preset.memory,
        memory_bytes_per_s=_number(path, data, "memory_gb_s", preset.memory_bytes_per_s // 10**9) * 10**9,
        efficiency_percent=_number(path, data, "efficiency_percent", preset.efficiency_percent),
    )


def _link(path: Path, data: dict[str, Any], name: str, preset: Link) -> Link:
    """`inside` and `between` are tables {gb_s = 450, latency_us = 3}."""
    table = data.get(name, {})
    if not isinstance(table, dict) or table.keys() - {"gb_s", "latency_us"}:
        raise UserError(f"{name!r} is not a link", str(path), f"write {name} = {{gb_s = 50, latency_us = 8}}")
    gb_s = _number(path, table, "gb_s", preset.bytes_per_s // 10**9)
    return Link(_number(path, table, "latency_us", preset.latency_ns // 1000) * 1000, gb_s * 10**9)


def _number(path: Path, data: dict[str, Any], key: str, default: int | None) -> int:
    value = data.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        cause = f"the cluster file lacks {key!r}" if value is None else f"{key!r} is {value!r}"
        raise UserError(cause, str(path), f"{key} is a whole number of at least 1")
    return value


def _text(path: Path, data: dict[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str):
        raise UserError(f"the cluster file lacks {key!r}", str(path), f"kinds are {', '.join(d.kind for d in DEVICES.values())}")
    return value
