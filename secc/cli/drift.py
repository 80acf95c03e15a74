"""`secc drift PLAN/ LOGDIR/`: what moved in a run since its plan was made, and what another plan would
gain."""

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

MIN_GAIN = 0.02  # a gain that is not worth a new plan


def command(
    plan: PLAN_ARGUMENT,
    log_dir: Annotated[
        Path,
        typer.Argument(
            help="the log directory of a run of the plan (PLAN/logs, or its --log-dir)", metavar="LOGDIR"
        ),
    ],
    json: JSON_OPTION = False,
) -> None:
    """Compare a run with its plan: times of sections, the mix of samples, and the gain of a plan made for
    them."""
    from secc.driver.replan_from_run import measure_drift

    found = measure_drift(plan, log_dir)
    if json:
        sections = {name: dataclasses.asdict(moved) for name, moved in found.sections.items()}
        print_json(
            {
                "steps": found.steps,
                "sections": sections,
                "mix": found.mix,
                "gain": found.gain,
                "set": found.best_pins,
            }
        )
        return
    _print_drift(found, plan)


def _print_drift(found: DriftReport, directory: Path) -> None:
    from rich.table import Table

    from secc.driver.replan_from_run import plan_pins

    table = Table(
        "section",
        "forward",
        "backward",
        box=None,
        padding=(0, 2),
        title=f"measured over predicted, {found.steps} steps",
    )
    for name, moved in found.sections.items():
        table.add_row(
            name, *(f"{ratio:.3g}" if ratio is not None else "-" for ratio in (moved.forward, moved.backward))
        )
    out.print(table)
    for when, (before, now) in found.mix.items() if len(found.mix) > 1 else ():
        out.print(f"  samples with {when}: {before:.1%} when the plan was made, {now:.1%} in the run")
    if found.gain < MIN_GAIN:
        out.print("no plan for these times and samples is faster by 2% or more")
        return
    times = f"{_step_time_text(found, 'best')} s a step instead of {_step_time_text(found, 'plan')} s, both by what was measured"
    out.print(f"another plan would be {1 - 1 / (1 + found.gain):.0%} faster: {times}", soft_wrap=True)
    now = set(plan_pins(found.plan))
    out.print(f"  what differs: {' '.join(pin for pin in found.best_pins if pin not in now)}", soft_wrap=True)
    pins = " ".join(f"--set {pin}" for pin in found.best_pins)
    out.print(f"  compile again with the options of {directory} and {pins}", soft_wrap=True)


def _step_time_text(found: DriftReport, which: str) -> str:
    return f"{float(getattr(found, which).prediction['step_time_s']):.4g}"
