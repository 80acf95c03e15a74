"""Bounds for sets of sections on the same devices: their least work and memory, and the fewest ranks for all
others.

The work of sections on the same devices adds up, each of them has as many ranks as the others, and groups
share out the ranks. That alone rules most candidates out (`GroupBounds.remaining_candidates`). The members of
a group determine the edges that leave it, and these determine what its sections hold and wait for at least.
Sets of sections are bit masks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from secc.alloc.problem.types import AllocEdge, Problem

DeviceKey = tuple[int, int]  # number of ranks, and their kind
INFEASIBLE_RANKS = 1 << 62
MAX_GROUPED_SECTIONS = 10  # ten sections have about a thousand subsets


class SectionOption(NamedTuple):
    """A candidate of a section in a group: the work that it adds at least, this work with the least wait of
    the group, its bytes, and its index."""

    work: int
    time: int
    memory: int
    index: int


class FewestRanks(NamedTuple):
    """The fewest ranks for a set of sections (`INFEASIBLE_RANKS` if it does not fit), and the group of its
    first section as a bit mask."""

    ranks: int
    first_group: int


@dataclass(frozen=True)
class SectionGroup:
    """Sections on the devices `key`: the options of each, and the least work and bytes of all together."""

    key: DeviceKey
    sections: Mapping[str, Sequence[SectionOption]]
    work: int
    memory: int


class GroupBounds:
    """Groups that are possible in a step of at most `most` ns, by the bit mask of their sections (bit i:
    section i)."""

    def __init__(self, problem: Problem, most: int) -> None:
        self.problem, self.time_limit, self.names = problem, most, list(problem.sections)
        self.all_sections = (1 << len(self.names)) - 1
        self._least_waits = {
            (e.src, e.dst): (min(e.latency_ns), min(e.round_trip_ns), min(e.gradient_return_ns))
            for e in problem.edges
        }
        allowed_candidates = (c for cs in problem.sections.values() for c in cs if not c.excluded)
        by_key = {(c.ranks, c.kind): c for c in allowed_candidates}
        self.usable_bytes = {key: problem.usable_bytes(c) for key, c in by_key.items()}
        self._cached_options: dict[tuple[object, ...], Mapping[DeviceKey, Sequence[SectionOption]]] = {}
        allowed = filter(self._is_allowed, range(1, self.all_sections + 1))
        self.by_sections = {mask: groups for mask in allowed if (groups := [*self._feasible_groups(mask)])}

    def remaining_candidates(self) -> dict[str, list[int]]:
        """Indices of the candidates that a step within the time limit can have."""
        remaining: dict[str, set[int]] = {s: set() for s in self.names}
        fewest_of = fewest_ranks(
            {mask: min(g.key[0] for g in groups) for mask, groups in self.by_sections.items()},
            self.all_sections,
        )
        for mask, groups in self.by_sections.items():
            for group in (
                g
                for g in groups
                if g.key[0] + fewest_of[self.all_sections ^ mask].ranks <= self.problem.ranks
            ):
                for s, own in group.sections.items():
                    time = self.time_limit - group.work + min(c.work for c in own)
                    memory = self.usable_bytes[group.key] - group.memory + min(c.memory for c in own)
                    remaining[s].update(c.index for c in own if c.time <= time and c.memory <= memory)
        return {s: sorted(places) for s, places in remaining.items()}

    def _is_allowed(self, mask: int) -> bool:
        """Whether strategy and `together` allow exactly these sections on the same devices."""
        inside = {s for i, s in enumerate(self.names) if mask >> i & 1}
        if self.problem.strategy == "apart" and len(inside) > 1:
            return False
        if self.problem.strategy in {"colocate", "uniform"} and mask != self.all_sections:
            return False
        return all((a in inside) == (b in inside) for a, b in self.problem.together)

    def _feasible_groups(self, mask: int) -> Iterator[SectionGroup]:
        """Yields the groups of these sections, one for each number and kind of ranks."""
        names = [s for i, s in enumerate(self.names) if mask >> i & 1]
        ahead = all(any(c.runs_ahead for c in self.problem.sections[s]) for s in names)
        own = [
            self._section_options(
                s,
                [
                    e
                    for e in self.problem.edges
                    if s in (e.src, e.dst) and (e.src in names) != (e.dst in names)
                ],
                ahead,
            )
            for s in names
        ]
        for key in own[0]:
            if all(key in some for some in own):
                sections = {s: some[key] for s, some in zip(names, own, strict=True)}
                work, memory = (
                    sum(min(c[field] for c in some) for some in sections.values()) for field in (0, 2)
                )
                if work <= self.time_limit and memory <= self.usable_bytes[key]:
                    yield SectionGroup(key, sections, work, memory)

    def _section_options(
        self, section: str, leaving: Sequence[AllocEdge], ahead: bool
    ) -> Mapping[DeviceKey, Sequence[SectionOption]]:
        """Options of a section in a group that the edges `leaving` leave. `ahead`: whether the group may run
        ahead of the step."""
        cache_key = section, ahead, *(end for e in leaving for end in (e.src, e.dst))
        if cache_key in self._cached_options:
            return self._cached_options[cache_key]
        options, least = defaultdict[DeviceKey, list[SectionOption]](list), self._least_waits
        sent, received = [e for e in leaving if e.src == section], [e for e in leaving if e.dst == section]
        for i, c in enumerate(self.problem.sections[section]):
            if c.excluded or (work := c.busy_ns if ahead else c.time_ns) > self.time_limit:
                continue  # waits and messages only add to work and memory
            memory, usable = c.memory_ahead if sent else c.memory, self.usable_bytes[key := (c.ranks, c.kind)]
            if memory > usable:
                continue
            memory += sum(e.sent_bytes[i] for e in sent) + sum(e.returned_bytes[i] for e in received)
            delay = max(
                [0, *(least[e.src, e.dst][0] - e.independent_ns[i] + e.message_ns[i] for e in received)]
            )
            hidden = max([0, *(least[e.src, e.dst][1] - e.slack_ns[i] for e in sent)])
            rounds = max(
                [0, *(c.rounds * (e.latency_ns[i] + least[e.src, e.dst][2]) for e in sent if c.rounds > 1)]
            )
            if max(work + hidden, rounds) + delay <= self.time_limit and memory <= usable:
                options[key].append(SectionOption(work, work + delay + hidden, memory, i))
        self._cached_options[cache_key] = options
        return options


def fewest_ranks(ranks: Mapping[int, int], every: int) -> list[FewestRanks]:
    """For each set of sections the fewest ranks in all, given the fewest ranks of each set that can be one
    group.

    Dynamic programming over subsets: the group of the set's first section, and the best partition of the
    rest.
    """
    best = [FewestRanks(0, 0)]
    for whole in range(1, every + 1):
        groups = (part for part in _nonempty_subsets(whole) if part & whole & -whole and part in ranks)
        best.append(
            min(
                (FewestRanks(ranks[part] + best[whole ^ part].ranks, part) for part in groups),
                default=FewestRanks(INFEASIBLE_RANKS, 0),
            )
        )
    return best


def _nonempty_subsets(mask: int) -> Iterator[int]:
    """Yields all nonempty subsets of a bit mask."""
    part = mask
    while part:
        yield part
        part = (part - 1) & mask
