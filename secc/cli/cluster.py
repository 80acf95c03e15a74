"""`secc cluster SPEC`: shows the figures that a cluster description stands for, with their sources."""

from __future__ import annotations

import json as json_
from typing import Annotated

import typer

from secc.cli.console import print_json, print_table

CLUSTER_ARGUMENT = Annotated[
    str, typer.Argument(help="local, local:N, 4x8xH100, 4x8xH100+4x8xA800, or a YAML file", metavar="SPEC")
]


def command(
    spec: CLUSTER_ARGUMENT,
    json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
) -> None:
    """Show the devices, links and figures of a cluster description."""
    from secc.cluster import parse_cluster
    from secc.cluster.presets import FIGURE_SOURCES
    from secc.report.cluster_tables import cluster_tables

    cluster = parse_cluster(spec)
    if json:
        sources = {g.device.kind: FIGURE_SOURCES.get(g.device.kind.lower(), {}) for g in cluster.node_groups}
        print_json(json_.loads(cluster.to_json()) | {"sources": sources})
        return
    for table in cluster_tables(cluster):
        print_table(table)
