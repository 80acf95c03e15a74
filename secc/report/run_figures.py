"""What the report shows of a run: how it compares with its plan, its curves, waits and drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from secc.report.bar_rows import BarChart, BarPart, BarRow, section_colours
from secc.report.run_log import RunLog
from secc.report.text_table import TextTable, amount_text, seconds_text
from secc.runtime.plan.schema import Plan

AS_PREDICTED = 1.25  # measured over predicted, or its inverse, that needs no explanation


@dataclass(frozen=True)
class RunFigures:
    """A run compared with its plan: sentences, a chart of measured and predicted times, one of waits, what
    drifted (a table and sentences), and curves as JSON values: `losses`, `seconds`, `evaluations`,
    `predicted_s`."""

    sentences: tuple[str, ...]
    times: BarChart
    waits: BarChart
    drift: TextTable
    drift_sentences: tuple[str, ...]
    curves: dict[str, Any]


def make_run_figures(plan: Plan, log: RunLog, drift: TextTable, drift_sentences: Sequence[str]) -> RunFigures:
    """Makes the figures of a run from its log, and from what was found about its drift."""
    curves = {
        "losses": log.losses,
        "seconds": log.seconds,
        "evaluations": log.evaluations,
        "predicted_s": plan.predicted_step_s,
    }
    sentences = (_loss_sentence(log), *_step_sentences(plan, log))
    charts = _time_bars(plan, log), _wait_bars(plan, log)
    return RunFigures(sentences, *charts, drift, tuple(drift_sentences), curves)


def _loss_sentence(log: RunLog) -> str:
    steps = amount_text(log.steps, "step")
    return f"{steps} were logged; the loss went from {log.first_loss:.4g} to {log.last_loss:.4g}."


def _step_sentences(plan: Plan, log: RunLog) -> list[str]:
    measured = f"The median step took {seconds_text(log.median_s)}"
    predicted = plan.predicted_step_s
    if not predicted:
        return [f"{measured}."]
    ratio = log.median_s / predicted
    found = f"{measured}, {ratio:.2f} times the predicted {seconds_text(predicted)}."
    if 1 / AS_PREDICTED < ratio < AS_PREDICTED:
        return [found]
    return [
        found,
        "Measured costs predict better: secc profile MODEL.py -o costs.json, then --costs costs.json.",
    ]


def _time_bars(plan: Plan, log: RunLog) -> BarChart:
    colours = section_colours(plan)
    longest = max((max(s.measured_s, s.predicted_s) for s in log.sections), default=0.0) or 1.0
    rows: list[BarRow] = []
    for s in log.sections:
        for what, seconds in (("measured", s.measured_s), ("predicted", s.predicted_s)):
            colour = colours.get(s.name, "s0") if what == "measured" else "plain"
            part = BarPart(colour, what, seconds / longest, seconds_text(seconds))
            ratio = f" · {seconds / s.predicted_s:.2f}×" if what == "measured" and s.predicted_s else ""
            rows.append(BarRow(s.name, what, (part,), f"{seconds_text(seconds)}{ratio}"))
    return BarChart(
        tuple(rows), (), "Computing time of a step, summed over replicas; means of the last steps."
    )


def _wait_bars(plan: Plan, log: RunLog) -> BarChart:
    rows = [
        BarRow(
            s.name,
            what,
            (BarPart(colour, "waiting", min(1.0, share), f"{share:.1%}"),),
            f"{share:.1%}",
        )
        for s in log.sections
        for colour, what, share in (
            ("w-messages", "waits for messages of other sections", s.wait_share),
            ("w-summing", "waits for collectives of its own ranks", s.exposed_share),
        )
        if share is not None
    ]
    return BarChart(tuple(rows), (), "A whole bar is the step." if rows else "")
