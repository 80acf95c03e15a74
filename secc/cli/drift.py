"""`secc drift PLAN/ LOGDIR/`: compares a run with its plan, and says what re-planning would gain."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from secc.cli.compile import JSON_OPTION
from secc.cli.console import out, print_json
from secc.cli.explain import PLAN_ARGUMENT

if TYPE_CHECKING:
    from secc.driver.replan_from_run import DriftReport
    from secc.runtime.plan.schema import Plan

MIN_GAIN = 0.02  # a smaller gain is not worth a new plan


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
    _print_drift(report, plan)


def _print_drift(report: DriftReport, directory: Path) -> None:
    from rich.table import Table

    from secc.driver.replan_from_run import plan_pins

    table = Table(
        "section",
        "forward",
        "backward",
        box=None,
        padding=(0, 2),
        title=f"measured over predicted, {report.steps} steps",
    )
    for name, section_drift in report.sections.items():
        table.add_row(
            name,
            *(
                f"{ratio:.3g}" if ratio is not None else "-"
                for ratio in (section_drift.forward, section_drift.backward)
            ),
        )
    out.print(table)
    for when, (before, now) in report.mix.items() if len(report.mix) > 1 else ():
        out.print(f"  samples with {when}: {before:.1%} when the plan was made, {now:.1%} in the run")
    if report.gain < MIN_GAIN:
        out.print("re-planning for these times and samples would gain less than 2%")
        return
    best, current = _step_time_text(report.best_plan), _step_time_text(report.plan)
    times = f"{best} s per step instead of {current} s, both with the measured times"
    out.print(f"another plan would be {1 - 1 / (1 + report.gain):.0%} faster: {times}", soft_wrap=True)
    now = set(plan_pins(report.plan))
    out.print(
        f"  different choices: {' '.join(pin for pin in report.best_pins if pin not in now)}", soft_wrap=True
    )
    pins = " ".join(f"--set {pin}" for pin in report.best_pins)
    out.print(f"  compile again with the options of {directory} and {pins}", soft_wrap=True)


def _step_time_text(plan: Plan) -> str:
    return f"{float(plan.prediction['step_time_s']):.4g}"
