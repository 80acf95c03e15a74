"""`secc check MODEL.py`: checks exactness with small random weights, before any GPU is used."""

from __future__ import annotations

from typing import Annotated

import typer

from secc.cli.compile import (
    ACCEPT_OPTION,
    BALANCE_OPTION,
    COMPILE_STAGES,
    GATHER_OPTION,
    GLOBAL_SUMS_OPTION,
    JSON_OPTION,
    MODEL_ARGUMENT,
    WHOLE_BATCH_OPTION,
)
from secc.cli.console import out, print_json, print_table, show_progress, styled
from secc.runtime.host.gc_control import pause_gc, slow_gc


@slow_gc()
def command(
    model: MODEL_ARGUMENT,
    ranks: Annotated[
        int | None,
        typer.Option(help="number of CPU processes to plan for (default 2; 1 if there is work for no more)"),
    ] = None,
    small: Annotated[
        bool | None,
        typer.Option(
            "--small/--no-small",
            help="check small_model() instead of model() (default: if model() is too large to be built here)",
        ),
    ] = None,
    stats_samples: Annotated[int, typer.Option(help="samples of dataset() to draw")] = 64,
    accept: ACCEPT_OPTION = None,
    balance_loss: BALANCE_OPTION = "",
    global_sums: GLOBAL_SUMS_OPTION = False,
    gather: GATHER_OPTION = None,
    whole_batch: WHOLE_BATCH_OPTION = None,
    json: JSON_OPTION = False,
) -> None:
    """Check that a model can be compiled and that its plan computes what plain PyTorch computes."""
    with pause_gc(exempt=True):  # objects created by imports are never garbage
        from secc.api.plan import check

    with show_progress(json, COMPILE_STAGES[:-1]) as show:
        result = check(
            model,
            ranks=ranks,
            small=small,
            stats_samples=stats_samples,
            accept=accept or (),
            balance_loss=balance_loss,
            global_sums=global_sums,
            gather=gather or (),
            whole_batch=whole_batch or (),
            progress=show,
        )
    plan = result.plan
    if json:
        sections = list(plan.pipelines)
        checked = {"exact": True, "checked": result.checked, "sections": sections, "widths": plan.widths}
        print_json(checked | plan.checks)
        return
    for table in result.tables:
        print_table(table)
    for name, verdict in result.facts:
        out.print(styled(name, "green"), f": {verdict}", sep="")
