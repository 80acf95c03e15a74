"""`secc diff PLAN_A PLAN_B`: what another plan decides differently, and what that does to the step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from secc.cli.compile import JSON
from secc.cli.console import out, print_json, print_table

FIRST = Annotated[Path, typer.Argument(help="a plan directory", metavar="PLAN_A")]
SECOND = Annotated[Path, typer.Argument(help="the plan directory to compare it with", metavar="PLAN_B")]


def command(first: FIRST, second: SECOND, json: JSON = False) -> None:
    """Compare two plans: sections, layouts, edges, loss, predictions. Equal plans print that they are."""
    from secc.report.differences import differences
    from secc.runtime.plan import load

    found = differences(load(first), load(second))
    if json:
        print_json({"equal": not found, "tables": [dataclasses.asdict(t) for t in found]})
        return
    for table in found:
        print_table(table)
    if not found:
        out.print("the plans decide the same")
