"""`secc check MODEL.py`: checks exactness with small random weights, before any GPU is used."""

from __future__ import annotations

from typing import Annotated

import typer

from secc.cli.compile import ACCEPT_OPTION, JSON_OPTION, MODEL_ARGUMENT
from secc.cli.console import out, print_json, print_table, show_progress, styled


def command(
    model: MODEL_ARGUMENT,
    ranks: Annotated[int, typer.Option(help="number of CPU processes to plan for")] = 2,
    small: Annotated[bool, typer.Option(help="check small_model() instead of model()")] = False,
    stats_samples: Annotated[int, typer.Option(help="samples of dataset() to draw")] = 64,
    accept: ACCEPT_OPTION = None,
    json: JSON_OPTION = False,
) -> None:
    """Check that a model can be compiled and that its plan computes what plain PyTorch computes."""
    from secc.driver.compile import compile_model
    from secc.driver.compile_options import CompileOptions
    from secc.driver.exactness_check import check_exactness
    from secc.report.plan_tables import plan_tables

    with show_progress(quiet=json) as show:
        options = CompileOptions(
            cluster=f"local:{ranks}",
            global_batch=8 * ranks,
            stats_samples=stats_samples,
            small=small,
            accept=tuple(accept or ()),
        )
        compiled = compile_model(model, options, show)
        show("compare with the eager model")
        plan = check_exactness(compiled, required=True).plan
    if json:
        print_json({"exact": True, "sections": list(plan.pipelines), "widths": plan.widths, **plan.checks})
        return
    for table in plan_tables(plan):
        if table.title in {"Sections", "Loss", "Checks", "Notes"}:
            print_table(table)
    exception = ", except for the accepted approximations" if plan.checks.get("accepted") else ""
    said = f"{exception}: loss and every gradient are those of plain PyTorch"
    out.print(styled("exact", "green"), said, sep="")
