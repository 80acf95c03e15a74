"""What drifted in a run, as a table and as sentences."""

from __future__ import annotations

from pathlib import Path

from secc.driver.replan_from_run import DriftReport, plan_pins
from secc.report.text_table import TextTable
from secc.runtime.plan.schema import Plan

MIN_GAIN = 0.02  # a smaller gain is not worth a new plan


def drift_table(report: DriftReport) -> TextTable:
    """Measured over predicted times of each section."""
    rows = tuple(
        (name, *(f"{ratio:.3g}" if ratio is not None else "-" for ratio in (drift.forward, drift.backward)))
        for name, drift in report.sections.items()
    )
    title = f"Measured over predicted, {report.steps} steps"
    return TextTable(title, ("section", "forward", "backward"), rows)


def drift_sentences(report: DriftReport, directory: Path) -> list[str]:
    """Says how the mix of samples changed, what another plan would gain, and how to compile it; `directory`
    is that of the plan."""
    lines = [
        f"samples with {when}: {before:.1%} when the plan was made, {now:.1%} in the run"
        for when, (before, now) in (report.mix.items() if len(report.mix) > 1 else ())
    ]
    if report.gain < MIN_GAIN:
        return [*lines, "re-planning for these times and samples would gain less than 2%"]
    best, current = _step_time_text(report.best_plan), _step_time_text(report.plan)
    times = f"{best} s per step instead of {current} s, both with the measured times"
    now = set(plan_pins(report.plan))
    pins = " ".join(f"--set {pin}" for pin in report.best_pins)
    return [
        *lines,
        f"another plan would be {1 - 1 / (1 + report.gain):.0%} faster: {times}",
        f"different choices: {' '.join(pin for pin in report.best_pins if pin not in now)}",
        f"compile again with the options of {directory} and {pins}",
    ]


def _step_time_text(plan: Plan) -> str:
    return f"{float(plan.prediction['step_time_s']):.4g}"
