"""`secc diff PLAN_A PLAN_B`: what another plan decides differently, and what that does to the step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from secc.cli.compile import JSON
from secc.cli.console import print_differences

FIRST = Annotated[Path, typer.Argument(help="a plan directory", metavar="PLAN_A")]
SECOND = Annotated[Path, typer.Argument(help="the plan directory to compare it with", metavar="PLAN_B")]


def command(first: FIRST, second: SECOND, json: JSON = False) -> None:
    """Compare two plans: sections, layouts, edges, loss, predictions. Equal plans print that they are."""
    from secc.report.plan_differences import differences
    from secc.runtime.plan.schema import load

    print_differences(differences(load(first), load(second)), json)
