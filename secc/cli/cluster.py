"""`secc cluster SPEC`: what a description of a cluster means, figure by figure, with the source of each."""

from __future__ import annotations

import json as json_
from typing import Annotated

import typer

from secc.cli.console import print_json, print_table

SPEC = Annotated[
    str, typer.Argument(help="local, local:N, 4x8xH100, 4x8xH100+4x8xA800, or a YAML file", metavar="SPEC")
]


def command(
    spec: SPEC, json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False
) -> None:
    """Show what a description of a cluster means."""
    from secc.cluster import parse
    from secc.cluster.presets import SOURCES
    from secc.report.cluster_tables import tables

    cluster = parse(spec)
    if json:
        sources = {g.device.kind: SOURCES.get(g.device.kind.lower(), {}) for g in cluster.kinds}
        print_json(json_.loads(cluster.to_json()) | {"sources": sources})
        return
    for table in tables(cluster):
        print_table(table)
