"""`secc explain PLAN/`: what a plan decides, and why."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from secc.cli.compile import JSON
from secc.cli.console import out, print_differences, print_json, print_table

PLAN = Annotated[Path, typer.Argument(help="a plan directory made by secc compile", metavar="PLAN/")]


WHAT_IF = Annotated[
    list[str] | None,
    typer.Option(
        help="compare with another choice: SECTION.KEY=VALUE, cluster=SPEC, strategy=…", metavar="CHOICE"
    ),
]


def command(plan: PLAN, what_if: WHAT_IF = None, json: JSON = False) -> None:
    """Explain a plan: its sections, what travels between them, how the loss is put together."""
    if what_if:
        _compare(plan, what_if, json)
        return
    from secc.report.plan_tables import summary, tables
    from secc.runtime.plan.schema import load

    loaded = load(plan)
    if json:
        print_json(
            {"summary": dict(summary(loaded)), "tables": [dataclasses.asdict(t) for t in tables(loaded)]}
        )
        return
    for name, value in summary(loaded):
        out.print(f"{name:>16}  {value}")
    for table in tables(loaded):
        print_table(table)


def _compare(plan: Path, changes: list[str], json: bool) -> None:
    """What other choices would change, and the change in time."""
    from secc.driver import what_if as whatif
    from secc.report.plan_differences import differences

    print_differences(differences(*whatif.what_if(plan, changes)), json)
