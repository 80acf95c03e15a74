"""A simulated step as a picture: rows are ranks, colours are sections, what is dark computes and what is blank is idle.

The same rows are drawn with characters for a terminal and as SVG in a page of its own, without scripts or outside resources. Forwards
are drawn full, backwards lighter, reductions and the optimizer grey.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from secc.simulate.events import Simulated
from secc.simulate.measures import Measures

COLOURS = ("#1f6fb2", "#d9741c", "#2e8b4f", "#9a4fb0", "#b23a48", "#7a6a1f", "#008a8a", "#555fbf")
TERMINAL = ("blue", "yellow", "green", "magenta", "red", "cyan", "bright_blue", "bright_green")
GREY, NO_SECTION = "#9a9a9a", -1
SWATCH = "display:inline-block;width:12px;height:12px;margin:0 4px 0 12px"  # of a legend
MOST_ROWS = 64  # ranks drawn; more are too many to read
ROW, GAP, LEFT, WIDTH, FOOT = 18, 4, 150, 1200, 40  # of the SVG, in pixels


@dataclass(frozen=True)
class Bar:
    """A stretch of a row: start and end in ns, the section's number (or NO_SECTION), its kind, and what a reader is told of it."""

    start: int
    end: int
    section: int
    kind: str
    title: str


@dataclass(frozen=True)
class Row:
    """A rank and what it does, in order of time."""

    label: str
    bars: tuple[Bar, ...]


def rows(step: Simulated) -> list[Row]:
    """The rows of a step, at most `MOST_ROWS`."""
    shown = min(step.plan.world_size, MOST_ROWS)
    found = [Row(_label(step, rank), tuple(sorted(_bars(step, rank), key=lambda b: b.start))) for rank in range(shown)]
    return found


def _label(step: Simulated, rank: int) -> str:
    return f"{rank} " + (", ".join(s.name for s in step.plan.sections if rank in s.mesh.ranks) or "idle")


def _bars(step: Simulated, rank: int) -> Iterator[Bar]:
    numbers = {s.name: i for i, s in enumerate(step.plan.sections)}
    for c in step.compute:
        if c.rank == rank:
            samples = step.schedule.micro_batches[c.section][c.micro].samples
            title = f"{c.kind} {c.section} {c.micro}: samples {', '.join(str(step.samples[p].id) for p in samples)}"
            yield Bar(c.start, c.end, numbers[c.section], c.kind, title)
    for r in step.reductions:
        if rank in r.ranks and r.end > r.start:
            yield Bar(r.start, r.end, NO_SECTION, "REDUCE", f"reduce the gradients of {', '.join(r.sections)}")
    if step.end > step.synced:
        yield Bar(step.synced, step.end, NO_SECTION, "STEP", "optimizer, and what a step takes beside its program")


# -- terminal ---------------------------------------------------------------------------------------------------------------------


def text(step: Simulated, width: int) -> list[list[tuple[str, str]]]:
    """Lines of (characters, style of rich) for a terminal of `width` columns; a last line tells what is what."""
    drawn = rows(step)
    labels = max((len(r.label) for r in drawn), default=0)
    columns = max(20, width - labels - 2)
    lines = [[(r.label.ljust(labels) + " ", "dim"), *_cells(r.bars, columns, step.end)] for r in drawn]
    if step.plan.world_size > len(drawn):
        lines.append([(f"({step.plan.world_size - len(drawn)} more ranks)", "dim")])
    legend = [(f"█ {s.name}  ", _style(i)) for i, s in enumerate(step.plan.sections)]
    return [*lines, [*legend, ("█ forward  ▒ backward  ─ reduce, optimizer  · idle", "dim")]]


def _cells(bars: Sequence[Bar], columns: int, end: int) -> list[tuple[str, str]]:
    """Each column shows what fills most of it."""
    share: list[dict[tuple[int, str], int]] = [{} for _ in range(columns)]
    for bar in bars:
        what = (bar.section, bar.kind)
        for c in range(bar.start * columns // max(end, 1), min(columns, -(-bar.end * columns // max(end, 1)))):
            inside = min(bar.end * columns, (c + 1) * end) - max(bar.start * columns, c * end)
            share[c][what] = share[c].get(what, 0) + max(0, inside)
    cells: list[tuple[str, str]] = []
    for column in share:
        idle = end - sum(column.values())
        (section, kind), most = max(column.items(), key=lambda item: item[1], default=((NO_SECTION, ""), 0))
        cells.append(("·", "dim") if idle > most or not column else (_glyph(kind), _style(section)))
    return cells


def _glyph(kind: str) -> str:
    return {"F": "█", "B": "▒", "W": "░"}.get(kind, "─")


def _style(section: int) -> str:
    return "dim" if section == NO_SECTION else TERMINAL[section % len(TERMINAL)]


# -- SVG and page -----------------------------------------------------------------------------------------------------------------


def svg(step: Simulated) -> str:
    """The step as an SVG element; hovering over a bar tells what it is."""
    drawn = rows(step)
    height = len(drawn) * (ROW + GAP) + FOOT
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 10} {height}" font-family="sans-serif" font-size="11">']
    for i, row in enumerate(drawn):
        y = i * (ROW + GAP)
        parts.append(f'<text x="{LEFT - 6}" y="{y + 13}" text-anchor="end">{escape(row.label)}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{ROW}" fill="#f1f1f1"/>')
        parts += [_rect(bar, y, step.end) for bar in row.bars]
    parts += _axis(len(drawn) * (ROW + GAP), step.end)
    return "\n".join([*parts, "</svg>"])


def _rect(bar: Bar, y: int, end: int) -> str:
    x, w = LEFT + bar.start * WIDTH / max(end, 1), (bar.end - bar.start) * WIDTH / max(end, 1)
    colour = GREY if bar.section == NO_SECTION else COLOURS[bar.section % len(COLOURS)]
    opacity = {"B": "0.55", "W": "0.3"}.get(bar.kind, "1")
    shape = f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="{ROW}" fill="{colour}" fill-opacity="{opacity}"'
    return f"{shape} stroke='white' stroke-width='0.3'><title>{escape(bar.title)}, {(bar.end - bar.start) / 1e6:.3f} ms</title></rect>"


def _axis(y: int, end: int) -> list[str]:
    ticks = [(LEFT + WIDTH * k / 5, end * k / 5 / 1e6) for k in range(6)]
    anchors = ["start", *["middle"] * 4, "end"]
    return [f'<text x="{x:.0f}" y="{y + 14}" text-anchor="{a}">{ms:.4g} ms</text>' for (x, ms), a in zip(ticks, anchors, strict=True)]


def figure(step: Simulated, measures: Measures) -> str:
    """The drawing for an HTML page, below its legend."""
    legend = " ".join(
        f'<span><i style="{SWATCH};background:{COLOURS[i % len(COLOURS)]}"></i>'
        f"{escape(s.name)} (busy {measures.sections[s.whole].busy:.0%})</span>"
        for i, s in enumerate(step.plan.sections)
    )
    return f"<p>{legend}; forwards full, backwards lighter, reductions and optimizer grey.</p>{svg(step)}"


def page(step: Simulated, measures: Measures) -> str:
    """An HTML page with the drawing, the legend and the headline figures."""
    facts = (
        f"step {measures.step_time_s:.6g} s, schedule bound {measures.schedule_bound_s:.6g} s ({escape(measures.bound_reason)}), "
        f"plan bound {measures.plan_bound_s:.6g} s, {measures.gpus} ranks"
    )
    style = "body{font:14px sans-serif;margin:24px}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Simulated step</title><style>{style}</style>'
        f"<h1>One step</h1><p>{facts}</p>{figure(step, measures)}</html>\n"
    )
