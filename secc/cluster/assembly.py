"""Builds clusters: nodes of one preset kind, and several parts joined to one cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from secc.cluster.presets import DEVICE_PRESETS, LINK_PRESETS
from secc.cluster.types import Cluster, Link, NodeGroup, mixed_cluster
from secc.errors import UserError

DESCRIPTION_FORMS = (
    "use `local`, `local:N`, NODESxDEVICESxKIND such as 4x8xH100 (several joined "
    "by `+`), or the path of a .yaml file"
)


def join_clusters(name: str, parts: Sequence[Cluster], between: Link) -> Cluster:
    """Join parts to one cluster. Raises UserError if nodes differ in more than the kind of device."""
    if len(parts) == 1:
        return dataclasses.replace(parts[0], name=name, between=between)
    if len({p.per_node for p in parts}) > 1:
        counts = " and ".join(str(p.per_node) for p in parts)
        raise UserError(
            f"the cluster {name!r} has nodes of {counts} devices",
            remedy="all nodes must have the same number of devices; use fewer devices of the larger nodes",
        )
    if len({p.device.backend for p in parts}) > 1:
        raise UserError(f"the cluster {name!r} mixes CPUs and GPUs", remedy="describe the GPUs alone")
    return mixed_cluster(
        name, [NodeGroup(p.nodes, p.device, p.inside) for p in parts], parts[0].per_node, between
    )


def preset_cluster(name: str, nodes: int, per_node: int, kind: str) -> Cluster:
    """A cluster of nodes with `per_node` preset devices. Raises UserError for no devices or an unknown
    kind."""
    if nodes < 1 or per_node < 1:
        raise UserError(f"the cluster {name!r} has no devices", remedy=DESCRIPTION_FORMS)
    if kind.lower() not in DEVICE_PRESETS:
        known = ", ".join(d.kind for d in DEVICE_PRESETS.values())
        remedy = f"known kinds are {known}; describe others in a .yaml file"
        raise UserError(f"the cluster {name!r} names an unknown device kind {kind!r}", remedy=remedy)
    inside, between = LINK_PRESETS[kind.lower()]
    return Cluster(name, nodes, per_node, DEVICE_PRESETS[kind.lower()], inside, between)
