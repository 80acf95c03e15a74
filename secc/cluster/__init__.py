"""Clusters: which devices there are and how they are linked, from a short description.

A description is `local` (this machine's GPUs, else CPU processes), `local:N`, `4x8xH100` (nodes x devices x
kind, or `8xH100`; several kinds with `+`), or the path of a YAML file. The cost model asks a cluster for
rates, memory and links; nobody else knows a device by its name.
"""

from __future__ import annotations

from secc.cluster.description import parse_cluster
from secc.cluster.types import COLLECTIVES, GIB, Cluster, Device, Link, MeasuredRing, NodeGroup, Overheads

__all__ = [
    "COLLECTIVES",
    "GIB",
    "Cluster",
    "Device",
    "Link",
    "MeasuredRing",
    "NodeGroup",
    "Overheads",
    "parse_cluster",
]
