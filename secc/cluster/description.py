"""Reading a cluster's description: `local`, `local:N`, `4x8xH100`, `4x8xH100+4x8xA800`, or a YAML file
(`secc.cluster.cluster_file`).

Everything wrong with it is a UserError.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from secc.cluster.assembly import FORMS, joined, preset
from secc.cluster.presets import DEVICES, LINKS
from secc.cluster.types import Cluster
from secc.errors import UserError

MAX_LOCAL_CPUS = 8  # processes that plain `local` starts on a machine without GPUs, at most


def parse(text: str) -> Cluster:
    """The cluster that `text` describes. Raises UserError with what is wrong and the forms there are."""
    text = text.strip()
    if text == "local" or text.startswith("local:"):
        return _local(text)
    if text.endswith((".yaml", ".yml")):
        from secc.cluster.cluster_file import read  # only here: the other forms need no YAML

        return read(Path(text))
    parts = [_part(text, part) for part in text.split("+")]
    return joined(text, parts, min((p.between for p in parts), key=lambda link: link.bytes_per_s))


def _part(text: str, part: str) -> Cluster:
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z]\w*)", part.strip())
    if found is None:
        raise UserError(f"cannot read the cluster {text!r}", remedy=FORMS)
    nodes, per_node, kind = int(found[1] or 1), int(found[2]), found[3]
    return preset(part.strip(), nodes, per_node, kind)


# -- this machine
# ---------------------------------------------------------------------------------------------------------------------


def _local(text: str) -> Cluster:
    wanted = text.removeprefix("local").removeprefix(":")
    if wanted and (not wanted.isdecimal() or int(wanted) < 1):
        raise UserError(
            f"cannot read the cluster {text!r}",
            remedy="local:N takes the number of processes, such as local:4",
        )
    gpus = local_gpus()
    count = int(wanted or 0)
    if not gpus:
        return preset(text, 1, count or max(2, min(MAX_LOCAL_CPUS, _cores())), "cpu")
    if count > len(gpus):
        raise UserError(
            f"{text} asks for {count} processes, but this machine has {len(gpus)} GPUs",
            remedy=f"use local:{len(gpus)} or fewer, or 1x{count}xcpu to run on CPU processes",
        )
    return _local_gpus(text, count or len(gpus), *gpus[0])


def _local_gpus(text: str, count: int, name: str, memory: int) -> Cluster:
    """GPUs by the name the driver gives; one that no preset knows gets the figures of L40S and the label
    "default"."""
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
