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
    from secc.api.plan import Plan
    from secc.report.table_renderers import make_facts_grid

    loaded = Plan(plan)
    explanation = loaded.explain()
    if json:
        tables = [dataclasses.asdict(t) for t in explanation.tables]
        print_json({"summary": dict(explanation.facts), "tables": tables})
        return
    out.print(str(loaded), soft_wrap=True, markup=False)
    out.print()
    out.print(make_facts_grid(explanation.facts))
    for table in explanation.tables:
        print_table(table)


def _print_what_if(plan: Path, changes: list[str], json: bool) -> None:
    """Print what other choices would change in the plan."""
    from secc.api.plan import Plan

    print_differences(Plan(plan).what_if(*changes).tables, json)
