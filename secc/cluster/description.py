"""Parses cluster descriptions: `local`, `local:N`, `4x8xH100`, `4x8xH100+4x8xA800`, or a YAML file
(`secc.cluster.cluster_file`).

Every error is a UserError.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from secc.cluster.assembly import DESCRIPTION_FORMS, join_clusters, preset_cluster
from secc.cluster.presets import DEVICE_PRESETS, LINK_PRESETS
from secc.cluster.types import Cluster
from secc.errors import UserError

MAX_LOCAL_PROCESSES = 8  # of plain `local` on a machine without GPUs


def parse_cluster(text: str) -> Cluster:
    """Parse a cluster description. Raises UserError with the accepted forms as remedy."""
    text = text.strip()
    if text == "local" or text.startswith("local:"):
        return _parse_local(text)
    if text.endswith((".yaml", ".yml")):
        from secc.cluster.cluster_file import read_cluster_file  # the other forms need no YAML

        return read_cluster_file(Path(text))
    parts = [_parse_part(text, part) for part in text.split("+")]
    return join_clusters(text, parts, min((p.between for p in parts), key=lambda link: link.bytes_per_s))


def _parse_part(text: str, part: str) -> Cluster:
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z]\w*)", part.strip())
    if match is None:
        raise UserError(f"cannot read the cluster {text!r}", remedy=DESCRIPTION_FORMS)
    nodes, per_node, kind = int(match[1] or 1), int(match[2]), match[3]
    return preset_cluster(part.strip(), nodes, per_node, kind)


def _parse_local(text: str) -> Cluster:
    count_text = text.removeprefix("local").removeprefix(":")
    if count_text and (not count_text.isdecimal() or int(count_text) < 1):
        raise UserError(
            f"cannot read the cluster {text!r}",
            remedy="local:N takes the number of processes, such as local:4",
        )
    gpus = list_local_gpus()
    count = int(count_text or 0)
    if not gpus:
        return preset_cluster(text, 1, count or max(2, min(MAX_LOCAL_PROCESSES, _count_cores())), "cpu")
    if count > len(gpus):
        raise UserError(
            f"{text} asks for {count} processes, but this machine has {len(gpus)} GPUs",
            remedy=f"use local:{len(gpus)} or fewer, or 1x{count}xcpu to run on CPU processes",
        )
    return _gpu_cluster(text, count or len(gpus), *gpus[0])


def _gpu_cluster(text: str, count: int, name: str, memory: int) -> Cluster:
    """A cluster of this machine's GPUs, by the name that the driver reports. Unknown GPUs get the figures
    of the L40S and the label "default"."""
    kind = known_kind(name)
    device = DEVICE_PRESETS[kind.lower() if kind else "l40s"]
    if kind is None:
        device = dataclasses.replace(device, kind=name, label="default")
    inside, between = LINK_PRESETS[kind.lower() if kind else "l40s"]
    return Cluster(text, 1, count, dataclasses.replace(device, memory=memory), inside, between)


def known_kind(name: str) -> str | None:
    """The kind of the preset for a GPU by the name that its driver reports; None for one without a preset."""
    words = name.replace("-", " ").split()
    return next((d.kind for d in DEVICE_PRESETS.values() if d.kind in words), None)


def list_local_gpus() -> list[tuple[str, int]]:
    """(name, bytes of memory) of each GPU of this machine."""
    import torch  # the other forms need no torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [(p.name, p.total_memory) for p in properties]


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
