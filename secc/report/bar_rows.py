"""Rows of stacked bars: where the time of a step goes, what fills the memory of ranks, and baselines.

The page draws them without a script, as tables with a drawing in one column, so that they can be read aloud.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secc.cluster import GIB, Cluster
from secc.report.step_figures import RankTimes, StepFigures, TimePart
from secc.report.text_table import amount_text, bytes_text, seconds_text, short_ranks_text
from secc.runtime.plan.schema import Plan

COLOURS = 8  # of sections in the style sheet; more sections share them
# Memory by kind, as far as the names of parts in plan.json begin so.
_MEMORY_KINDS = {
    "weights": "weights",
    "gradients of": "buffers and messages",
    "gradients": "gradients",
    "optimizer states": "optimizer states",
    "activations": "activations",
    "results": "results for the next step",
}
_OTHER_MEMORY, ALL_KINDS = "buffers and messages", "all kinds"
_OTHER_SECTIONS = "other sections on these ranks"
MEMORY_KINDS = (
    "weights",
    "gradients",
    "optimizer states",
    "activations",
    _OTHER_MEMORY,
    "results for the next step",
    ALL_KINDS,
)
NEARLY_EMPTY = 0.2  # of the memory: where less is used, bars are drawn larger


@dataclass(frozen=True)
class BarPart:
    """A part of a bar: its colour's class in the style sheet, what it is, its share of the bar's full length
    (0 to 1), and its amount as text."""

    colour: str
    name: str
    share: float
    amount: str


@dataclass(frozen=True)
class BarRow:
    """A bar with a name, a second line about it, and a value at its end. `limit`: a share at which a line
    is drawn, 0 for none. `marked`: whether the row stands out."""

    name: str
    about: str
    parts: tuple[BarPart, ...]
    value: str
    limit: float = 0.0
    marked: bool = False

    @property
    def summary(self) -> str:
        """The parts as text, largest first."""
        shown = sorted(self.parts, key=lambda part: -part.share)
        return ", ".join(f"{part.name} {part.amount}" for part in shown)


@dataclass(frozen=True)
class BarChart:
    """Rows of bars that share a scale, the legend of their colours as (class, name), a note on the scale,
    and further rows with a title, which are folded away."""

    rows: tuple[BarRow, ...]
    legend: tuple[tuple[str, str], ...]
    note: str = ""
    folded: tuple[BarRow, ...] = ()
    folded_title: str = ""


def section_colours(plan: Plan) -> dict[str, str]:
    """Returns the colour class of each of the user's sections."""
    return {s.name: f"s{i % COLOURS}" for i, s in enumerate(plan.user_sections)}


# -- time


def time_chart(plan: Plan, figures: StepFigures) -> BarChart:
    """The step of each set of ranks, as shares of the step; stages of pipelines are folded away."""
    joined = _join_stages(plan, figures.times)
    rows, legend = _time_rows(plan, joined, figures.seconds)
    if len(joined) == len(figures.times):
        return BarChart(rows, legend)
    stages, _ = _time_rows(plan, figures.times, figures.seconds)
    return BarChart(rows, legend, folded=stages, folded_title=f"By stage, {amount_text(len(stages), 'bar')}")


def _join_stages(plan: Plan, times: Sequence[RankTimes]) -> list[RankTimes]:
    """The mean over ranks that hold stages of the same sections, or the same sections."""
    section_of = {s.name: s.user_section_name for s in plan.sections}
    groups: defaultdict[tuple[str, ...], list[RankTimes]] = defaultdict(list)
    for found in times:
        groups[tuple(dict.fromkeys(section_of.get(name, name) for name in found.sections))].append(found)
    joined: list[RankTimes] = []
    for names, members in groups.items():
        ranks = tuple(sorted(rank for member in members for rank in member.ranks))
        sums: defaultdict[tuple[str, str], float] = defaultdict(float)
        for member in members:
            for part in member.parts:
                sums[part.section, part.what] += part.seconds * len(member.ranks)
        parts = tuple(TimePart(*key, seconds / len(ranks)) for key, seconds in sums.items())
        joined.append(RankTimes(ranks, names, tuple(sorted(parts, key=lambda part: not part.section))))
    return joined


def _time_rows(
    plan: Plan, times: Sequence[RankTimes], step_seconds: float
) -> tuple[tuple[BarRow, ...], tuple[tuple[str, str], ...]]:
    """(rows, legend) of the parts of a step."""
    colours = section_colours(plan)
    rows: list[BarRow] = []
    legend: dict[tuple[str, str], bool] = {}
    for found in times:
        parts: list[BarPart] = []
        for part in found.parts:
            colour = colours[part.section] if part.section else _wait_colour(part.what)
            colour += " back" if part.what == "backward" else ""
            name = f"{part.section} {part.what}" if part.section else part.what
            share = part.seconds / step_seconds if step_seconds else 0.0
            parts.append(BarPart(colour, name, share, f"{seconds_text(part.seconds)} ({share:.0%})"))
            legend[colour, name] = not part.section
        computing = sum(p.share for p, t in zip(parts, found.parts, strict=True) if t.section)
        name = ", ".join(found.sections) or "idle"
        rows.append(BarRow(name, short_ranks_text(found.ranks), tuple(parts), f"{computing:.0%} busy"))
    return tuple(rows), tuple(sorted(legend, key=lambda item: legend[item]))


def _wait_colour(what: str) -> str:
    return "w-" + what.split()[0]


# -- memory


def memory_chart(plan: Plan) -> BarChart:
    """The memory of the fullest rank of each set of ranks by kind, against what its device has.

    The plan knows the parts of whole sections as they were allocated, and of stages the sum only; what stages
    hold, and the parts that pipelines were allocated for, are folded away.
    """
    holders: defaultdict[frozenset[int], list[str]] = defaultdict(list)
    for s in plan.user_sections:
        holders[frozenset(s.mesh.ranks)].append(s.name)
    totals = {name: max(s.memory_gib for s in stages) * GIB for name, stages in plan.pipelines.items()}
    main: list[_RankMemory] = []
    folded: list[_RankMemory] = []
    for held, names in holders.items():
        ranks, kinds = tuple(sorted(held)), _memory_by_kind(plan, names)
        if any(len(plan.pipelines[name]) > 1 for name in names):
            folded.append((f"{', '.join(names)} as allocated", ranks, kinds))
            kinds = {ALL_KINDS: max(totals[name] for name in names)}
        main.append((", ".join(names), ranks, kinds))
    folded += [(s.name, s.mesh.ranks, {ALL_KINDS: s.memory_gib * GIB}) for s in plan.sections if s.pipeline]
    main, folded = ([item for item in items if sum(item[2].values())] for items in (main, folded))
    cluster = Cluster.from_dict(plan.cluster)
    capacities = [
        cluster.view_of_ranks(ranks).device.memory if cluster is not None else 0 for _, ranks, _ in main
    ]
    most = max((sum(kinds.values()) for _, _, kinds in (*main, *folded)), default=0.0)
    enlarged = any(most < NEARLY_EMPTY * capacity or not capacity for capacity in capacities)
    rows, more = (_memory_rows(cluster, items, most if enlarged else 0.0) for items in (main, folded))
    used = {part.name for row in (*rows, *more) for part in row.parts}
    legend = tuple((_memory_colour(kind), kind) for kind in MEMORY_KINDS if kind in used)
    amounts = ", ".join(dict.fromkeys(map(bytes_text, filter(None, capacities))))
    if enlarged:
        note = "The longest bar is the fullest rank" + (f"; a device has {amounts}." if amounts else ".")
    else:
        note = f"A whole bar is the memory of a device, {amounts}; the line is the limit for tensors."
    title = "By stage, and the parts that were allocated" if more else ""
    return BarChart(rows, legend, note if rows else "", more, title)


_RankMemory = tuple[str, tuple[int, ...], dict[str, float]]  # names, ranks, bytes by kind


def _memory_rows(cluster: Cluster | None, items: Sequence[_RankMemory], scale: float) -> tuple[BarRow, ...]:
    """Rows of bytes by kind; a whole bar is `scale` bytes, or with 0 the memory of the rank's device."""
    rows: list[BarRow] = []
    for name, ranks, kinds in items:
        device = cluster.view_of_ranks(ranks).device if cluster is not None else None
        whole = scale or float(device.memory if device is not None else 1)
        parts = tuple(
            BarPart(_memory_colour(kind), kind, kinds[kind] / whole, bytes_text(kinds[kind]))
            for kind in MEMORY_KINDS
            if kinds.get(kind)
        )
        total = sum(kinds.values())
        share = f" · {_percent_text(total / device.memory)}" if device is not None else ""
        limit = device.usable_memory / device.memory if device is not None and not scale else 0.0
        rows.append(BarRow(name, short_ranks_text(ranks), parts, f"{bytes_text(total)}{share}", limit))
    return tuple(rows)


def _percent_text(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "below 1%"


def _memory_by_kind(plan: Plan, names: Iterable[str]) -> dict[str, float]:
    """Bytes by kind of all parts that sections hold on one rank."""
    kinds: defaultdict[str, float] = defaultdict(float)
    for name in names:
        parts: Mapping[str, Any] = plan.reasons.get(name, {}).get("memory", {}).get("parts", {})
        for part, size in parts.items():
            if part != _OTHER_SECTIONS:
                kind = next(
                    (k for begin, k in _MEMORY_KINDS.items() if part.startswith(begin)), _OTHER_MEMORY
                )
                kinds[kind] += float(size)
    return dict(kinds)


def _memory_colour(kind: str) -> str:
    return f"m{MEMORY_KINDS.index(kind)}"


# -- baselines


def baseline_chart(step_seconds: float, baselines: Mapping[str, tuple[float | None, str]]) -> BarChart:
    """The plan's step and those of published schemes (seconds, or None where nothing fits, and the layout),
    fastest first."""
    steps: list[tuple[str, float | None, str]] = [("this plan", step_seconds, "")]
    steps += [(name, seconds, layout) for name, (seconds, layout) in baselines.items()]
    steps.sort(key=lambda item: (item[1] is None, item[1] or 0.0))
    longest = max(seconds or 0.0 for _, seconds, _ in steps) or 1.0
    rows: list[BarRow] = []
    for name, seconds, layout in steps:
        own = name == "this plan"
        if seconds is None:
            rows.append(BarRow(name, layout, (), "does not fit"))
            continue
        part = BarPart("s0" if own else "plain", "step", seconds / longest, seconds_text(seconds))
        ratio = "" if own or not step_seconds else f" · {seconds / step_seconds:.2f}×"
        value = f"{seconds_text(seconds)}{ratio}"
        rows.append(BarRow(name, layout, (part,), value, marked=own))
    return BarChart(tuple(rows), ())
