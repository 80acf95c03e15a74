"""Reading a cluster's description: `local`, `local:N`, `4x8xH100`, `4x8xH100+4x8xA800`, or a YAML file
(`secc.cluster.cluster_file`).

Everything wrong with it is a UserError.
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

MAX_LOCAL_PROCESSES = 8  # processes that plain `local` starts on a machine without GPUs, at most


def parse_cluster(text: str) -> Cluster:
    """The cluster that `text` describes. Raises UserError with what is wrong and the forms there are."""
    text = text.strip()
    if text == "local" or text.startswith("local:"):
        return _parse_local(text)
    if text.endswith((".yaml", ".yml")):
        from secc.cluster.cluster_file import read_cluster_file  # only here: the other forms need no YAML

        return read_cluster_file(Path(text))
    parts = [_parse_part(text, part) for part in text.split("+")]
    return join_clusters(text, parts, min((p.between for p in parts), key=lambda link: link.bytes_per_s))


def _parse_part(text: str, part: str) -> Cluster:
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z]\w*)", part.strip())
    if found is None:
        raise UserError(f"cannot read the cluster {text!r}", remedy=DESCRIPTION_FORMS)
    nodes, per_node, kind = int(found[1] or 1), int(found[2]), found[3]
    return preset_cluster(part.strip(), nodes, per_node, kind)


# -- this machine
# ---------------------------------------------------------------------------------------------------------------------


def _parse_local(text: str) -> Cluster:
    wanted = text.removeprefix("local").removeprefix(":")
    if wanted and (not wanted.isdecimal() or int(wanted) < 1):
        raise UserError(
            f"cannot read the cluster {text!r}",
            remedy="local:N takes the number of processes, such as local:4",
        )
    gpus = list_local_gpus()
    count = int(wanted or 0)
    if not gpus:
        return preset_cluster(text, 1, count or max(2, min(MAX_LOCAL_PROCESSES, _count_cores())), "cpu")
    if count > len(gpus):
        raise UserError(
            f"{text} asks for {count} processes, but this machine has {len(gpus)} GPUs",
            remedy=f"use local:{len(gpus)} or fewer, or 1x{count}xcpu to run on CPU processes",
        )
    return _gpu_cluster(text, count or len(gpus), *gpus[0])


def _gpu_cluster(text: str, count: int, name: str, memory: int) -> Cluster:
    """GPUs by the name the driver gives; one that no preset knows gets the figures of L40S and the label
    "default"."""
    kind = next((k for k, d in DEVICE_PRESETS.items() if d.kind in name.replace("-", " ").split()), None)
    device = (
        DEVICE_PRESETS[kind]
        if kind
        else dataclasses.replace(DEVICE_PRESETS["l40s"], kind=name, label="default")
    )
    inside, between = LINK_PRESETS[kind or "l40s"]
    return Cluster(text, 1, count, dataclasses.replace(device, memory=memory), inside, between)


def list_local_gpus() -> list[tuple[str, int]]:
    """(name, bytes of memory) of each GPU of this machine."""
    import torch  # only here: reading any other description needs no torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [(p.name, p.total_memory) for p in found]


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
