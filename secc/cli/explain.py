"""`secc explain PLAN/`: prints what a plan decides, and why."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from secc.cli.compile import JSON_OPTION
from secc.cli.console import out, print_differences, print_json, print_table

PLAN_ARGUMENT = Annotated[
    Path, typer.Argument(help="plan directory written by secc compile", metavar="PLAN/")
]


WHAT_IF_OPTION = Annotated[
    list[str] | None,
    typer.Option(
        help="compare with another choice: SECTION.KEY=VALUE, cluster=SPEC, strategy=…", metavar="CHOICE"
    ),
]


def command(plan: PLAN_ARGUMENT, what_if: WHAT_IF_OPTION = None, json: JSON_OPTION = False) -> None:
    """Explain a plan: its sections, the tensors sent between them, the loss, and the reasons for its
    choices."""
    if what_if:
        _print_what_if(plan, what_if, json)
        return
    from secc.report.plan_tables import plan_summary, plan_tables
    from secc.runtime.plan.plan_file import load_plan

    loaded = load_plan(plan)
    if json:
        print_json(
            {
                "summary": dict(plan_summary(loaded)),
                "tables": [dataclasses.asdict(t) for t in plan_tables(loaded)],
            }
        )
        return
    for name, value in plan_summary(loaded):
        out.print(f"{name:>16}  {value}")
    for table in plan_tables(loaded):
        print_table(table)


def _print_what_if(plan: Path, changes: list[str], json: bool) -> None:
    """Print what other choices would change in the plan."""
    from secc.driver import what_if as whatif
    from secc.report.plan_differences import plan_differences

    print_differences(plan_differences(*whatif.replan_with_changes(plan, changes)), json)
