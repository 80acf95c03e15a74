"""`secc diff PLAN_A PLAN_B`: lists what a second plan decides differently, and the effect on the step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from secc.cli.compile import JSON_OPTION
from secc.cli.console import print_differences

FIRST_PLAN_ARGUMENT = Annotated[Path, typer.Argument(help="plan directory", metavar="PLAN_A")]
SECOND_PLAN_ARGUMENT = Annotated[
    Path, typer.Argument(help="plan directory to compare with", metavar="PLAN_B")
]


def command(first: FIRST_PLAN_ARGUMENT, second: SECOND_PLAN_ARGUMENT, json: JSON_OPTION = False) -> None:
    """Compare two plans: sections, layouts, edges, loss and predictions."""
    from secc.report.plan_differences import plan_differences
    from secc.runtime.plan.plan_file import load_plan

    print_differences(plan_differences(load_plan(first), load_plan(second)), json)
