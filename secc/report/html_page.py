"""The page `report.html` of a plan: one file without external resources; all names in it are escaped.

What explains the plan is in the markup: verdict, warnings, cards of sections, bars, tables. The scripts of
`secc/report/page` arrange the graph and draw the timeline and charts from JSON in the page; without them the
rest can still be read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from secc.codegen.render import render_template
from secc.errors import printable_text
from secc.report.alternatives_chart import alternatives_chart
from secc.report.bar_rows import BarChart, baseline_chart, memory_chart, time_chart
from secc.report.html_policy import content_policy
from secc.report.plan_tables import plan_summary, plan_tables
from secc.report.plan_warnings import page_warnings
from secc.report.run_figures import RunFigures
from secc.report.section_graph_figure import section_graph_figure
from secc.report.step_figures import StepFigures
from secc.report.text_table import TextTable
from secc.report.verdict import CERTAINTY, cost_labels, describe_plan
from secc.runtime.plan.sample_predicates import is_active
from secc.runtime.plan.schema import Plan

_PAGE_FILES = Path(__file__).parent / "page"
_SCRIPTS = ("libraries.js", "charts.js", "timeline.js", "graph.js")
# Tables that a part of the page shows; the others are listed at its end.
_TABLES_OF_PARTS = {
    "sections": ("Sections", "Ranks", "Blocks", "Stages", "Work and memory", "Edges"),
    "time": ("Bottlenecks",),
    "memory": ("Memory",),
    "alternatives": ("Alternatives",),
    "costs": ("Cost origins",),
}


@dataclass(frozen=True)
class ReportExtras:
    """What a report shows in addition to the plan: a simulated step, a run, the steps of published schemes
    (seconds, or None where nothing fits, and layout, by name), and a note on the step's figure."""

    step: StepFigures | None = None
    run: RunFigures | None = None
    baselines: Mapping[str, tuple[float | None, str]] | None = None
    note: str = ""


def report_page(plan: Plan, extras: ReportExtras | None = None) -> str:
    """Returns the page of a plan."""
    extras = extras or ReportExtras()
    scripts = [_read_page_file(name) for name in _SCRIPTS]
    style = _read_page_file("page.css")
    tables = list(map(_printable_table, plan_tables(plan)))
    shown = {title for titles in _TABLES_OF_PARTS.values() for title in titles}
    values = {
        "plan": plan,
        "name": PurePosixPath(plan.model.path).name or "a model",
        "cluster": plan.cluster.get("text") or plan.cluster.get("name") or plan.cluster.get("kind", ""),
        "verdict": describe_plan(plan),
        "warnings": page_warnings(plan),
        "graph": section_graph_figure(plan),
        "activity": _active_samples(plan, extras.step),
        "time": time_chart(plan, extras.step) if extras.step is not None else BarChart((), ()),
        "memory": memory_chart(plan),
        "baselines": _baselines(plan, extras),
        "certainty": [(label, CERTAINTY.get(label, "")) for label in cost_labels(plan)],
        "run": extras.run,
        "note": extras.note,
        "summary": plan_summary(plan),
        "tables": {
            part: [t for t in tables if t.title in titles] for part, titles in _TABLES_OF_PARTS.items()
        },
        "other_tables": [t for t in tables if t.title not in shown],
    }
    data = {
        "timeline": extras.step.timeline if extras.step is not None else None,
        "alternatives": alternatives_chart(plan),
        "run": extras.run.curves if extras.run is not None else None,
    }
    return render_template(
        "report.html.j2",
        **{name: _make_printable(value) for name, value in values.items()},
        style=style,
        scripts=scripts,
        policy=content_policy(style, scripts),
        data=_json_for_page(data),
    )


def _baselines(plan: Plan, extras: ReportExtras) -> BarChart:
    step = plan.predicted_step_s
    if not extras.baselines or step is None:
        return BarChart((), ())
    return baseline_chart(step, extras.baselines)


def _active_samples(plan: Plan, step: StepFigures | None) -> dict[str, tuple[int, int] | None]:
    """For each section that is not active for every sample, for how many samples of the simulated batch it
    is, and of how many; None without a simulated step."""
    patterns = [pattern.split() for _, pattern in step.timeline["samples"]] if step is not None else []
    return {
        s.name: (sum(is_active(s.when, pattern) for pattern in patterns), len(patterns)) if patterns else None
        for s in plan.sections
        if s.when
    }


def _printable_table(table: TextTable) -> TextTable:
    return dataclasses.replace(
        table, rows=tuple(tuple(printable_text(cell, newlines=True) for cell in row) for row in table.rows)
    )


def _make_printable(value: Any) -> Any:
    """The value with escapes in its texts for what is not printable."""
    if isinstance(value, str):
        return printable_text(value, newlines=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Plan):
        texts = {f.name: _make_printable(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **texts)
    if isinstance(value, Mapping):
        return {_make_printable(key): _make_printable(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return type(value)(map(_make_printable, value)) if isinstance(value, list | tuple) else value
    return value


def _json_for_page(data: object) -> str:
    """JSON that may stand in a `<script>` element: without `<`, `>` and `&`."""
    text = json.dumps(_make_printable(data), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _read_page_file(name: str) -> str:
    return (_PAGE_FILES / name).read_text(encoding="utf-8")
