"""Clusters: devices, links and overheads, parsed from a short description.

A description is `local` (the GPUs of this machine, else CPU processes), `local:N`, `4x8xH100` (nodes x
devices x kind, or `8xH100`; several kinds joined by `+`), or the path of a YAML file. Only this package knows
devices by name; the cost model asks a cluster for rates, memory and links. Imports nothing but `secc.errors`.
"""

from __future__ import annotations

from secc.cluster.description import parse_cluster
from secc.cluster.framework import OWN_RUNTIME, Framework
from secc.cluster.types import COLLECTIVES, GIB, Cluster, Device, Link, MeasuredRing, NodeGroup, Overheads

__all__ = [
    "COLLECTIVES",
    "GIB",
    "OWN_RUNTIME",
    "Cluster",
    "Device",
    "Framework",
    "Link",
    "MeasuredRing",
    "NodeGroup",
    "Overheads",
    "parse_cluster",
]
