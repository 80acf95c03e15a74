"""Draws a simulated step: rows are ranks, colours are sections, dark is computing and blank is idle.

The same rows are drawn with characters for a terminal, and as SVG in a self-contained HTML page. Forwards are
opaque, backwards lighter, reductions and the optimizer grey; waiting for a message in transit is marked, in
contrast to waiting for other ranks to compute. The rows come from `secc.simulate.drawing_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from secc.errors import printable_text
from secc.report.html_policy import content_policy
from secc.simulate.drawing_rows import MESSAGE_WAIT, NO_SECTION, DrawnBar, DrawnRows, build_rows
from secc.simulate.events import SimulatedStep
from secc.simulate.step_measures import StepMeasures

COLOURS = ("#1f6fb2", "#d9741c", "#2e8b4f", "#9a4fb0", "#b23a48", "#7a6a1f", "#008a8a", "#555fbf")
TERMINAL_COLOURS = ("blue", "yellow", "green", "magenta", "red", "cyan", "bright_blue", "bright_green")
NO_SECTION_COLOUR, WAIT_COLOUR = "#9a9a9a", "#f2c4b8"
MAX_TERMINAL_ROWS, MAX_PAGE_ROWS = 32, 64
MAX_LABEL_LENGTH = 30  # characters
ROW_HEIGHT, ROW_GAP, LEFT_MARGIN, CHART_WIDTH, FOOT_HEIGHT = 18, 4, 200, 1200, 40  # pixels of the SVG


# -- terminal


def render_terminal(step: SimulatedStep, width: int) -> list[list[tuple[str, str]]]:
    """Returns lines of (characters, rich style) for a terminal with `width` columns; the last lines are
    time axis and legend."""
    drawn = build_rows(step, MAX_TERMINAL_ROWS)
    shown = [_shorten_label(row.label) for row in drawn.rows]
    labels = max(map(len, shown), default=0)
    columns = max(20, width - labels - 2)
    lines = [
        [(label.ljust(labels) + " ", "dim"), *_terminal_cells(row.bars, columns, step.end)]
        for label, row in zip(shown, drawn.rows, strict=True)
    ]
    lines.append([(" " * (labels + 1) + _time_axis_text(columns, step.end), "dim")])
    if drawn.left_out:
        lines.append([(_left_out_text(drawn), "dim")])
    legend = [(f"█ {s.name}  ", _section_style(i)) for i, s in enumerate(step.plan.user_sections)]
    return [
        *lines,
        [*legend, ("█ forward  ▒ backward  ─ reduce, optimizer  ~ message in transit  · idle", "dim")],
    ]


def _shorten_label(label: str) -> str:
    return label if len(label) <= MAX_LABEL_LENGTH else label[: MAX_LABEL_LENGTH - 1] + "…"


def _time_axis_text(columns: int, end: int) -> str:
    """Times at both ends of the rows and in the middle."""
    last, middle = _format_time(end), _format_time(end // 2)
    return f"{'0':<{columns // 2}}{middle:<{columns - columns // 2 - len(last)}}{last}"


def _format_time(ns: int) -> str:
    return f"{ns / 1e9:.4g} s" if ns >= 10**9 else f"{ns / 1e6:.4g} ms"


def _left_out_text(drawn: DrawnRows) -> str:
    return f"({drawn.left_out} more ranks, which take part in the same sections, are not drawn)"


def _terminal_cells(bars: Sequence[DrawnBar], columns: int, end: int) -> list[tuple[str, str]]:
    """One character for each column: the kind that fills most of it."""
    share: list[dict[tuple[int, str], int]] = [{} for _ in range(columns)]
    for bar in bars:
        what = (bar.section, bar.kind)
        for c in range(
            bar.start * columns // max(end, 1), min(columns, -(-bar.end * columns // max(end, 1)))
        ):
            inside = min(bar.end * columns, (c + 1) * end) - max(bar.start * columns, c * end)
            share[c][what] = share[c].get(what, 0) + max(0, inside)
    cells: list[tuple[str, str]] = []
    for column in share:
        idle = end - sum(column.values())
        (section, kind), most = max(column.items(), key=lambda item: item[1], default=((NO_SECTION, ""), 0))
        cells.append(
            ("·", "dim") if idle > most or not column else (_kind_glyph(kind), _section_style(section))
        )
    return cells


def _kind_glyph(kind: str) -> str:
    return {"F": "█", "B": "▒", "W": "░", MESSAGE_WAIT: "~"}.get(kind, "─")


def _section_style(section: int) -> str:
    return "dim" if section == NO_SECTION else TERMINAL_COLOURS[section % len(TERMINAL_COLOURS)]


# -- SVG and page


def render_svg(step: SimulatedStep) -> str:
    """The step as an SVG element; each bar has a tooltip."""
    drawn = build_rows(step, MAX_PAGE_ROWS)
    height = len(drawn.rows) * (ROW_HEIGHT + ROW_GAP) + FOOT_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT_MARGIN + CHART_WIDTH + 10} {height}"'
        ' font-family="sans-serif" font-size="11">'
    ]
    for i, row in enumerate(drawn.rows):
        y = i * (ROW_HEIGHT + ROW_GAP)
        parts.append(
            f'<text x="{LEFT_MARGIN - 6}" y="{y + 13}" text-anchor="end">'
            f"{_escape_name(_shorten_label(row.label))}<title>{_escape_name(row.label)}</title></text>"
        )
        parts.append(
            f'<rect x="{LEFT_MARGIN}" y="{y}" width="{CHART_WIDTH}" height="{ROW_HEIGHT}" fill="#f1f1f1"/>'
        )
        parts += [_svg_bar(bar, y, step.end) for bar in row.bars]
    parts += _svg_axis(len(drawn.rows) * (ROW_HEIGHT + ROW_GAP), step.end)
    if drawn.left_out:
        parts.append(
            f'<text x="{LEFT_MARGIN}" y="{height - 8}" fill="#5a6678">{escape(_left_out_text(drawn))}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def _escape_name(name: str) -> str:
    """A name for a page: markup, and characters that XML may not hold, as escapes."""
    return escape(printable_text(name))


def _svg_bar(bar: DrawnBar, y: int, end: int) -> str:
    x = LEFT_MARGIN + bar.start * CHART_WIDTH / max(end, 1)
    w = (bar.end - bar.start) * CHART_WIDTH / max(end, 1)
    if bar.kind == MESSAGE_WAIT:
        colour = WAIT_COLOUR
    else:
        colour = NO_SECTION_COLOUR if bar.section == NO_SECTION else COLOURS[bar.section % len(COLOURS)]
    opacity = {"B": "0.55", "W": "0.3"}.get(bar.kind, "1")
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{ROW_HEIGHT}" fill="{colour}"'
        f" fill-opacity=\"{opacity}\" stroke='white' stroke-width='0.3'>"
        f"<title>{_escape_name(bar.title)}, {(bar.end - bar.start) / 1e6:.3f} ms</title></rect>"
    )


def _svg_axis(y: int, end: int) -> list[str]:
    ticks = [(LEFT_MARGIN + CHART_WIDTH * k / 5, end * k / 5) for k in range(6)]
    anchors = ["start", *["middle"] * 4, "end"]
    return [
        f'<text x="{x:.0f}" y="{y + 14}" text-anchor="{a}">{_format_time(int(ns))}</text>'
        for (x, ns), a in zip(ticks, anchors, strict=True)
    ]


def render_html_figure(step: SimulatedStep, measures: StepMeasures) -> str:
    """The drawing with its legend, for an HTML page."""
    named = [
        (COLOURS[i % len(COLOURS)], f"{s.name} (busy {measures.sections[s.name].busy:.0%})")
        for i, s in enumerate(step.plan.user_sections)
    ]
    legend = " ".join(
        f'<span><svg width="24" height="12"><rect x="8" width="12" height="12" fill="{colour}"/></svg>'
        f"{_escape_name(name)}</span>"
        for colour, name in [
            *named,
            (NO_SECTION_COLOUR, "reductions, optimizer"),
            (WAIT_COLOUR, "message in transit"),
        ]
    )
    return f"<p>{legend}; forwards full, backwards lighter, blank is idle.</p>{render_svg(step)}"


def render_html_page(step: SimulatedStep, measures: StepMeasures) -> str:
    """HTML page with the headline figures, the legend and the drawing."""
    facts = (
        f"step {measures.step_time_s:.6g} s, "
        f"schedule bound {measures.schedule_bound_s:.6g} s ({_escape_name(measures.bound_reason)}), "
        f"plan bound {measures.plan_bound_s:.6g} s, {measures.gpus} ranks"
    )
    style = "body{font:14px sans-serif;margin:24px}"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{content_policy(style)}">'
        f"<title>Simulated step</title><style>{style}</style>"
        f"<h1>One step</h1><p>{facts}</p>{render_html_figure(step, measures)}</html>\n"
    )
