"""`secc drift PLAN/ LOGDIR/`: compares a run with its plan, and says what re-planning would gain."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from secc.cli.compile import JSON_OPTION
from secc.cli.console import out, print_json, print_table
from secc.cli.explain import PLAN_ARGUMENT


def command(
    plan: PLAN_ARGUMENT,
    log_dir: Annotated[
        Path,
        typer.Argument(
            help="log directory of a run of the plan (PLAN/logs, or its --log-dir)", metavar="LOGDIR"
        ),
    ],
    json: JSON_OPTION = False,
) -> None:
    """Compare a run with its plan: section times, mix of samples, and the gain of a new plan for them."""
    from secc.api.run_drift import drift_sentences, drift_table
    from secc.driver.replan_from_run import measure_drift

    report = measure_drift(plan, log_dir)
    if json:
        sections = {
            name: dataclasses.asdict(section_drift) for name, section_drift in report.sections.items()
        }
        print_json(
            {
                "steps": report.steps,
                "sections": sections,
                "mix": report.mix,
                "gain": report.gain,
                "set": report.best_pins,
            }
        )
        return
    print_table(drift_table(report))
    for line in drift_sentences(report, plan):
        out.print(line, soft_wrap=True)
