"""What ranks do beside computing, from where it was measured to `allocate`: the graph's attribute
`overheads`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from xdsl.dialects.builtin import StringAttr

from secc.cluster import Cluster, Overheads
from secc.ir.dialect.ops import GraphOp


def annotate_overheads(graph: GraphOp, overheads: Overheads, backend: str) -> None:
    """Note overheads that were measured on devices of torch's type `backend`."""
    graph.attributes["overheads"] = StringAttr(json.dumps({"backend": backend, **asdict(overheads)}))


def cluster_with_overheads(graph: GraphOp, cluster: Cluster) -> Cluster:
    """The cluster with the overheads that were measured on its backend, if any were."""
    noted = graph.attributes.get("overheads")
    if not isinstance(noted, StringAttr):
        return cluster
    found: dict[str, Any] = json.loads(noted.data)
    return (
        cluster.with_overheads(Overheads(**found))
        if found.pop("backend") == cluster.device.backend
        else cluster
    )
