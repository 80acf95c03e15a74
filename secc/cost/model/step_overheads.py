"""Carries measured overheads (`secc.cluster.Overheads`) from where they are read to `allocate`, as an
attribute of the graph."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from xdsl.dialects.builtin import StringAttr

from secc.cluster import Cluster, Overheads
from secc.ir.dialect.ops import GraphOp


def annotate_overheads(graph: GraphOp, overheads: Overheads, backend: str) -> None:
    """Write overheads that were measured on devices of this torch device type on the graph."""
    graph.attributes["overheads"] = StringAttr(json.dumps({"backend": backend, **asdict(overheads)}))


def cluster_with_overheads(graph: GraphOp, cluster: Cluster) -> Cluster:
    """The cluster with the overheads that the graph carries for its backend, if there are any."""
    attribute = graph.attributes.get("overheads")
    if not isinstance(attribute, StringAttr):
        return cluster
    data: dict[str, Any] = json.loads(attribute.data)
    if data.pop("backend") != cluster.device.backend:
        return cluster
    return cluster.with_overheads(Overheads(**data))
