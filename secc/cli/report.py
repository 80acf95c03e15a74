"""`secc report PLAN/ [LOGDIR]`: writes the plan's report again, with a run or published schemes in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from secc.cli.compile import JSON_OPTION
from secc.cli.console import out, print_json, show_progress
from secc.cli.explain import PLAN_ARGUMENT


def command(
    plan: PLAN_ARGUMENT,
    log_dir: Annotated[
        Path | None,
        typer.Argument(
            help="log directory of a run of the plan (PLAN/logs, or its --log-dir)", metavar="[LOGDIR]"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="file to write (default: report.html in LOGDIR or PLAN)", metavar="FILE"
        ),
    ] = None,
    baselines: Annotated[
        str, typer.Option(help="compare with published schemes: all, or a list such as uniform,mimo")
    ] = "",
    json: JSON_OPTION = False,
) -> None:
    """Write the report of a plan again: with a step of any size, with published schemes, with a run."""
    from secc.api.plan_report import write_report
    from secc.baselines.compare import parse_baseline_names

    names = parse_baseline_names(baselines) if baselines else []
    with show_progress(quiet=json) as show:
        path = write_report(plan, log_dir, output, names, show)
    if json:
        print_json({"report": str(path)})
    else:
        out.print(f"wrote {path}", soft_wrap=True)
