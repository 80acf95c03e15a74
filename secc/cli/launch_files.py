"""`secc launch-files PLAN --for skypilot|trainjob`: writes a plan as a job of a cluster's scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from secc.cli.explain import PLAN_ARGUMENT


def command(
    plan: PLAN_ARGUMENT,
    scheduler: Annotated[
        str, typer.Option("--for", help="what starts the job: skypilot or trainjob", metavar="SCHEDULER")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="after --: options of secc run", metavar="[-- OPTIONS]")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="file to write (default: print)", metavar="FILE")
    ] = None,
) -> None:
    """Write the YAML of a SkyPilot task, or of a TrainJob of Kubeflow Trainer, that trains a plan on its
    nodes."""
    from secc.cli.console import out
    from secc.codegen.job_files import JOB_WRITERS
    from secc.codegen.plan_writer import replace_file
    from secc.errors import UserError
    from secc.runtime.plan.plan_file import load_plan
    from secc.runtime.training.options import parse_options

    if scheduler not in JOB_WRITERS:
        raise UserError(f"no scheduler has this name: {scheduler}", "--for", "skypilot or trainjob")
    parse_options(arguments or [])
    text = JOB_WRITERS[scheduler](load_plan(plan), plan, arguments or [])
    if output is None:
        print(text, end="")
        return
    try:
        replace_file(output, text)
    except OSError as error:
        raise UserError(f"cannot write: {error.strerror}", str(output), "choose another -o") from None
    out.print(f"wrote {output}", soft_wrap=True)
