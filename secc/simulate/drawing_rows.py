"""The rows of a drawn step: which ranks get one, in which order, and what each does.

The ranks of a replica compute the same, so they share a row. Rows stand section by section, replica by
replica, stage below stage, however ranks are numbered. Where there are more than can be read, each section
keeps replicas in proportion, the first and the last among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from secc.runtime.plan.replica_routes import ranks_by_replica
from secc.simulate.events import ComputeEvent, SimulatedStep

NO_SECTION = -1
MESSAGE_WAIT = "WAIT"  # the kind of a bar in which a rank waits for a message on its way
RowRanks = tuple[int, ...]


@dataclass(frozen=True)
class DrawnBar:
    """A stretch of a row: start and end in ns, the whole section's number (or NO_SECTION), its kind, and what
    a reader is told of it."""

    start: int
    end: int
    section: int
    kind: str
    title: str


@dataclass(frozen=True)
class DrawnRow:
    """Ranks that do the same, and what that is, in order of time."""

    label: str
    bars: tuple[DrawnBar, ...]


@dataclass(frozen=True)
class DrawnRows:
    """The rows that are drawn, and how many ranks are in none of them."""

    rows: tuple[DrawnRow, ...]
    left_out: int


@dataclass(frozen=True)
class _RankRow:
    """Ranks that hold the same replicas of sections, and the replica of which whole section their row stands
    with."""

    ranks: RowRanks
    label: str
    whole_section: str
    replica: int


def build_rows(step: SimulatedStep, most: int) -> DrawnRows:
    """At most about `most` rows of a step; every section has at least a replica, with all its stages."""
    lanes = _list_rank_rows(step)
    of = {
        name: sorted({lane.replica for lane in lanes if lane.whole_section == name})
        for name in dict.fromkeys(x.whole_section for x in lanes)
    }
    kept = {
        name: set(_pick_evenly(some, len(some) * min(most, len(lanes)) // len(lanes)))
        for name, some in of.items()
    }
    shown = [lane for lane in lanes if lane.replica in kept[lane.whole_section]]
    computed: dict[int, list[ComputeEvent]] = {lane.ranks[0]: [] for lane in shown}
    for c in step.compute:
        if c.rank in computed:
            computed[c.rank].append(c)
    numbers = _section_numbers(step)
    made = tuple(
        DrawnRow(lane.label, tuple(_rank_bars(step, lane.ranks[0], computed[lane.ranks[0]], numbers)))
        for lane in shown
    )
    return DrawnRows(made, step.plan.world_size - sum(len(lane.ranks) for lane in shown))


# -- which ranks


def _list_rank_rows(step: SimulatedStep) -> list[_RankRow]:
    """In the order in which they are drawn; ranks that hold nothing last."""
    order = {s.name: i for i, s in enumerate(step.plan.sections)}
    whole = {s.name: s.user_section_name for s in step.plan.sections}
    first = {name: min(order[s] for s, w in whole.items() if w == name) for name in whole.values()}
    found: list[tuple[tuple[int, int, int], _RankRow]] = []
    for held, ranks in _ranks_by_replicas(step).items():
        label = f"{_format_ranks(ranks)} {', '.join(name for name, _ in held) or 'idle'}"
        name, replica = held[0] if held else ("", 0)
        place = (first[whole[name]], replica, order[name]) if held else (len(order), 0, 0)
        found.append((place, _RankRow(ranks, label, whole.get(name, ""), replica)))
    return [lane for _, lane in sorted(found, key=lambda item: (item[0], item[1].ranks))]


def _ranks_by_replicas(step: SimulatedStep) -> dict[tuple[tuple[str, int], ...], RowRanks]:
    """The ranks that hold the same replicas: (section, replica) of each."""
    held: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for s in step.plan.sections:
        for replica, ranks in enumerate(ranks_by_replica(s)):
            for r in ranks:
                held[r].append((s.name, replica))
    found: defaultdict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for r in range(step.plan.world_size):
        found[tuple(held[r])].append(r)
    return {key: tuple(ranks) for key, ranks in found.items()}


def _pick_evenly(some: Sequence[int], count: int) -> Iterable[int]:
    """So many of them, evenly, with the first and the last; the first alone where there is room for fewer."""
    return (
        some
        if count >= len(some)
        else some[:1]
        if count < 2
        else [some[k * (len(some) - 1) // (count - 1)] for k in range(count)]
    )


def _format_ranks(ranks: RowRanks) -> str:
    if len(ranks) == 1:
        return str(ranks[0])
    return (
        f"{ranks[0]}-{ranks[-1]}"
        if ranks[-1] - ranks[0] == len(ranks) - 1
        else f"{ranks[0]} and {len(ranks) - 1} more"
    )


# -- what they do


def _section_numbers(step: SimulatedStep) -> dict[str, int]:
    """The number of the whole section that each section is of."""
    whole = {s.name: i for i, s in enumerate(step.plan.user_sections)}
    return {s.name: whole[s.user_section_name] for s in step.plan.sections}


def _rank_bars(
    step: SimulatedStep, rank: int, computed: Sequence[ComputeEvent], numbers: Mapping[str, int]
) -> list[DrawnBar]:
    found = [bar for c in computed for bar in _computation_bars(step, c, numbers[c.section])]
    for r in step.reductions:
        if rank in r.ranks and r.end > r.start:
            found.append(
                DrawnBar(
                    r.start, r.end, NO_SECTION, "REDUCE", f"reduce the gradients of {', '.join(r.sections)}"
                )
            )
    if step.end > step.gradients_summed:
        found.append(
            DrawnBar(
                step.gradients_summed,
                step.end,
                NO_SECTION,
                "STEP",
                "optimizer, and what a step takes beside its program",
            )
        )
    return sorted(found, key=lambda b: b.start)


def _computation_bars(step: SimulatedStep, c: ComputeEvent, section: int) -> Iterator[DrawnBar]:
    if c.start > c.in_transit_from:
        yield DrawnBar(
            c.in_transit_from,
            c.start,
            NO_SECTION,
            MESSAGE_WAIT,
            f"waits for a message to {c.kind} {c.section} {c.micro}",
        )
    samples = step.schedule.micro_batches[c.section][c.micro].samples
    title = f"{c.kind} {c.section} {c.micro}: samples {', '.join(str(step.samples[p].id) for p in samples)}"
    yield DrawnBar(c.start, c.end, section, c.kind, title)
