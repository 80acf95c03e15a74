"""Rows of a drawn step: which ranks get one, in which order, and the bars in it.

The ranks of a replica compute the same, so they share a row. Rows are ordered by section, then replica, then
stage, however ranks are numbered. If there are too many, each section keeps replicas in proportion, the first
and last among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from secc.runtime.plan.replica_routes import ranks_by_replica
from secc.simulate.events import ComputeEvent, SimulatedStep

NO_SECTION = -1
MESSAGE_WAIT = "WAIT"  # kind of a bar: the rank waits for a message in transit
RowRanks = tuple[int, ...]


@dataclass(frozen=True)
class DrawnBar:
    """A bar: start and end in ns, the index of the whole section (or NO_SECTION), its kind, a tooltip, and
    what is computed: the section or stage and its micro-batch ("" and -1 for other bars)."""

    start: int
    end: int
    section: int
    kind: str
    title: str
    stage: str = ""
    micro: int = -1


@dataclass(frozen=True)
class DrawnRow:
    """Ranks that do the same, the names of what they hold, and their bars in order of time."""

    label: str
    bars: tuple[DrawnBar, ...]
    ranks: RowRanks
    names: str


@dataclass(frozen=True)
class DrawnRows:
    """The rows, and the number of ranks that are in none of them."""

    rows: tuple[DrawnRow, ...]
    left_out: int


@dataclass(frozen=True)
class _RankRow:
    """Ranks that hold the same replicas of sections, and the whole section and replica that their row is
    sorted by."""

    ranks: RowRanks
    names: str
    whole_section: str
    replica: int


def build_rows(step: SimulatedStep, most: int) -> DrawnRows:
    """Builds about `most` rows of a step at most; every section keeps at least one replica with all its
    stages."""
    rank_rows = _list_rank_rows(step)
    replicas_by_section = {
        name: sorted({row.replica for row in rank_rows if row.whole_section == name})
        for name in dict.fromkeys(x.whole_section for x in rank_rows)
    }
    kept_replicas = {
        name: set(_pick_evenly(replicas, len(replicas) * min(most, len(rank_rows)) // len(rank_rows)))
        for name, replicas in replicas_by_section.items()
    }
    kept_rows = [row for row in rank_rows if row.replica in kept_replicas[row.whole_section]]
    section_indices = _section_numbers(step)
    drawn_rows = tuple(
        DrawnRow(
            f"{_format_ranks(row.ranks)} {row.names}",
            tuple(
                _rank_bars(step, row.ranks[0], step.compute_by_rank.get(row.ranks[0], ()), section_indices)
            ),
            row.ranks,
            row.names,
        )
        for row in kept_rows
    )
    return DrawnRows(drawn_rows, step.plan.world_size - sum(len(row.ranks) for row in kept_rows))


# -- which ranks


def _list_rank_rows(step: SimulatedStep) -> list[_RankRow]:
    """Rows in the order in which they are drawn; idle ranks last."""
    order = {s.name: i for i, s in enumerate(step.plan.sections)}
    whole_of = {s.name: s.user_section_name for s in step.plan.sections}
    first = {name: min(order[s] for s, w in whole_of.items() if w == name) for name in whole_of.values()}
    keyed_rows: list[tuple[tuple[int, int, int], _RankRow]] = []
    for held, ranks in _ranks_by_replicas(step).items():
        names = ", ".join(name for name, _ in held) or "idle"
        name, replica = held[0] if held else ("", 0)
        sort_key = (first[whole_of[name]], replica, order[name]) if held else (len(order), 0, 0)
        keyed_rows.append((sort_key, _RankRow(ranks, names, whole_of.get(name, ""), replica)))
    return [lane for _, lane in sorted(keyed_rows, key=lambda item: (item[0], item[1].ranks))]


def _ranks_by_replicas(step: SimulatedStep) -> dict[tuple[tuple[str, int], ...], RowRanks]:
    """Ranks by the (section, replica) pairs that they hold."""
    held: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for s in step.plan.sections:
        for replica, ranks in enumerate(ranks_by_replica(s)):
            for r in ranks:
                held[r].append((s.name, replica))
    found: defaultdict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for r in range(step.plan.world_size):
        found[tuple(held[r])].append(r)
    return {key: tuple(ranks) for key, ranks in found.items()}


def _pick_evenly(items: Sequence[int], count: int) -> Iterable[int]:
    """`count` items, evenly spaced, with the first and the last; the first alone if `count` is 1."""
    return (
        items
        if count >= len(items)
        else items[:1]
        if count < 2
        else [items[k * (len(items) - 1) // (count - 1)] for k in range(count)]
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
    """Index of the whole section that each section belongs to."""
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
                "optimizer, and overheads of the step",
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
    yield DrawnBar(c.start, c.end, section, c.kind, title, c.section, c.micro)
