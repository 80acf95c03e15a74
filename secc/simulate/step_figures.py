"""Makes the figures of a simulated step for the report: where time goes, and the bars of its timeline."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from secc.errors import printable_text
from secc.report.step_figures import (
    COMPUTATION_KINDS,
    FIRST_COMPUTATION_CODE,
    MESSAGE_WAIT_CODE,
    OPTIMIZER_CODE,
    REDUCTION_CODE,
    RankTimes,
    StepFigures,
    TimePart,
)
from secc.report.text_table import ranks_text
from secc.simulate.drawing_rows import MESSAGE_WAIT, DrawnBar, build_rows
from secc.simulate.events import SimulatedStep

FORWARD, BACKWARD = "forward", "backward"
IN_TRANSIT, WAITING = "messages in transit", "waiting for other ranks"
REDUCING, OPTIMIZER = "summing gradients", "optimizer and overheads"
PARTS_WITHOUT_SECTION = (IN_TRANSIT, WAITING, REDUCING, OPTIMIZER)
TICKS = 1 << 18  # of a step at most: 100 times as fine as a screen
MAX_BARS = 24_000  # of a timeline; with more, rows are left out
_CODES = {MESSAGE_WAIT: MESSAGE_WAIT_CODE, "REDUCE": REDUCTION_CODE, "STEP": OPTIMIZER_CODE}


def make_step_figures(step: SimulatedStep) -> StepFigures:
    """Makes the figures of a simulated step."""
    return StepFigures(step.end / 1e9, tuple(_rank_times(step)), make_timeline(step))


# -- where time goes


def _rank_times(step: SimulatedStep) -> list[RankTimes]:
    """Parts of the step for each set of ranks with the same sections or stages, in the order of sections;
    idle ranks last."""
    order = {s.name: i for i, s in enumerate(step.plan.sections)}
    held: defaultdict[int, list[str]] = defaultdict(list)
    for s in step.plan.sections:
        for rank in s.mesh.ranks:
            held[rank].append(s.name)
    groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank in range(step.plan.world_size):
        groups[tuple(held[rank])].append(rank)
    spent = _seconds_by_rank(step)
    section_of_stage = {s.name: s.user_section_name for s in step.plan.sections}
    keys = [(s.name, kind) for s in step.plan.user_sections for kind in (FORWARD, BACKWARD)]
    keys += [("", what) for what in PARTS_WITHOUT_SECTION]
    times: list[RankTimes] = []
    for names, ranks in sorted(
        groups.items(), key=lambda group: [order[n] for n in group[0]] or [len(order)]
    ):
        means = {key: sum(spent[rank].get(key, 0) for rank in ranks) / len(ranks) / 1e9 for key in keys}
        parts = tuple(TimePart(*key, seconds) for key, seconds in means.items() if seconds > 0)
        sections = tuple(dict.fromkeys(section_of_stage[n] if len(names) > 1 else n for n in names))
        times.append(RankTimes(tuple(ranks), sections, parts))
    return times


def _seconds_by_rank(step: SimulatedStep) -> dict[int, Counter[tuple[str, str]]]:
    """Ns of each rank by (user's section, what); all parts of a rank add up to the step."""
    section_of_stage = {s.name: s.user_section_name for s in step.plan.sections}
    spent: dict[int, Counter[tuple[str, str]]] = {rank: Counter() for rank in range(step.plan.world_size)}
    for c in step.compute:
        kind = FORWARD if c.kind == "F" else BACKWARD
        spent[c.rank][section_of_stage[c.section], kind] += c.end - c.start
        spent[c.rank]["", IN_TRANSIT] += c.start - c.in_transit_from
    ends = Counter[int]()
    for r in step.reductions:
        for rank in r.ranks:
            stepped = step.program_ends[rank]
            ends[rank] += max(0, r.end - max(stepped, r.start))
    for rank, parts in spent.items():
        parts["", REDUCING] = min(ends[rank], max(0, step.gradients_summed - step.program_ends[rank]))
        parts["", OPTIMIZER] = step.end - step.gradients_summed
        parts["", WAITING] = max(0, step.end - parts.total())
    return spent


# -- the timeline


def make_timeline(step: SimulatedStep) -> dict[str, Any]:
    """Returns the timeline of a step as JSON values (`secc.report.step_figures`)."""
    bars = len(step.compute) + len(step.reductions) + step.plan.world_size
    most = step.plan.world_size if bars <= MAX_BARS else max(1, step.plan.world_size * MAX_BARS // bars)
    drawn = build_rows(step, most)
    ns_per_tick = max(1, -(-step.end // TICKS))
    stages = {s.name: i for i, s in enumerate(step.plan.sections)}
    users = {s.name: i for i, s in enumerate(step.plan.user_sections)}
    micros = [
        (name, micro.index, micro.replica, [step.samples[p].id for p in micro.samples])
        for name, found in step.schedule.micro_batches.items()
        for micro in found
    ]
    numbers = {(name, index): i for i, (name, index, _, _) in enumerate(micros)}
    patterns = {s.id: " ".join(sorted(map(printable_text, s.pattern))) for s in step.samples}
    return {
        "ns_per_tick": ns_per_tick,
        "end": step.end // ns_per_tick,
        "left_out": drawn.left_out,
        "sections": [[printable_text(s.name), users[s.user_section_name]] for s in step.plan.sections],
        "micros": [[stages[name], replica, index, ids] for name, index, replica, ids in micros],
        "rows": [
            {
                "label": printable_text(row.names),
                "ranks": ranks_text(row.ranks),
                "bars": _encode_bars(row.bars, ns_per_tick, numbers),
            }
            for row in drawn.rows
        ],
        "edges": [[stages[e.src], stages[e.dst], e.grad] for e in step.plan.edges],
        "samples": [[number, pattern] for number, pattern in sorted(patterns.items())],
    }


def _encode_bars(
    bars: Sequence[DrawnBar], ns_per_tick: int, numbers: dict[tuple[str, int], int]
) -> list[int]:
    encoded: list[int] = []
    last = 0
    for bar in bars:
        start, end = bar.start // ns_per_tick, bar.end // ns_per_tick
        code = _CODES.get(bar.kind)
        if code is None:
            kinds = len(COMPUTATION_KINDS)
            kind = COMPUTATION_KINDS.index(bar.kind)
            code = FIRST_COMPUTATION_CODE + kinds * numbers[bar.stage, bar.micro] + kind
        encoded += [start - last, end - start, code]
        last = end
    return encoded
