"""Sets of sections as groups: what each takes at least on so many ranks, and on how few ranks the sections
beside it fit.

Sections on the same devices add up, each on as many ranks as the others, and groups share out the ranks: that
alone rules most candidates out (`Groups.left`). Which sections a group has tells which edges leave it, and so
what its sections hold and wait for at least.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from secc.alloc.problem.types import Edge, Problem

Key = tuple[int, int]  # how many ranks, and of which kind
NEVER = 1 << 62
MOST_SECTIONS = 10  # of which there are a thousand sets


class Own(NamedTuple):
    """A section's candidate in a group, by its place: the work that it adds, this with what the group then
    waits at least, its bytes."""

    work: int
    time: int
    memory: int
    place: int


class Fewest(NamedTuple):
    """The fewest ranks on which a set of sections fits, `NEVER` where it does not, and the group of its first
    section, as a set."""

    ranks: int
    group: int


@dataclass(frozen=True)
class Group:
    """Sections on `key` devices: what each of them can be there, and the least work and bytes of all
    together."""

    key: Key
    sections: Mapping[str, Sequence[Own]]
    work: int
    memory: int


class Groups:
    """The groups that may be in a step of at most `most` ns, by the set of their sections: bit i stands for
    the i-th one."""

    def __init__(self, problem: Problem, most: int) -> None:
        self.problem, self.most, self.names = problem, most, list(problem.sections)
        self.every = (1 << len(self.names)) - 1
        self._least = {
            (e.src, e.dst): (min(e.latency), min(e.round), min(e.returned_after)) for e in problem.edges
        }
        self.usable = {(c.ranks, c.kind): problem.usable(c) for cs in problem.sections.values() for c in cs}
        self._known: dict[tuple[str, ...], Mapping[Key, Sequence[Own]]] = {}
        allowed = filter(self._allowed, range(1, self.every + 1))
        self.of = {mask: groups for mask in allowed if (groups := [*self._groups(mask)])}

    def left(self) -> dict[str, list[int]]:
        """The places of the candidates that such a step may have."""
        found: dict[str, set[int]] = {s: set() for s in self.names}
        beside = fewest({mask: min(g.key[0] for g in groups) for mask, groups in self.of.items()}, self.every)
        for mask, groups in self.of.items():
            for group in (
                g for g in groups if g.key[0] + beside[self.every ^ mask].ranks <= self.problem.ranks
            ):
                for s, own in group.sections.items():
                    time = self.most - group.work + min(c.work for c in own)
                    memory = self.usable[group.key] - group.memory + min(c.memory for c in own)
                    found[s].update(c.place for c in own if c.time <= time and c.memory <= memory)
        return {s: sorted(places) for s, places in found.items()}

    def _allowed(self, mask: int) -> bool:
        """Whether the problem lets these sections, and no others, be on the same devices."""
        inside = {s for i, s in enumerate(self.names) if mask >> i & 1}
        if self.problem.strategy == "apart" and len(inside) > 1:
            return False
        if self.problem.strategy in {"colocate", "uniform"} and mask != self.every:
            return False
        return all((a in inside) == (b in inside) for a, b in self.problem.together)

    def _groups(self, mask: int) -> Iterator[Group]:
        names = [s for i, s in enumerate(self.names) if mask >> i & 1]
        own = [
            self._own(
                s,
                [
                    e
                    for e in self.problem.edges
                    if s in (e.src, e.dst) and (e.src in names) != (e.dst in names)
                ],
            )
            for s in names
        ]
        for key in own[0]:
            if all(key in some for some in own):
                sections = {s: some[key] for s, some in zip(names, own, strict=True)}
                work, memory = (
                    sum(min(c[field] for c in some) for some in sections.values()) for field in (0, 2)
                )
                if work <= self.most and memory <= self.usable[key]:
                    yield Group(key, sections, work, memory)

    def _own(self, section: str, leaving: Sequence[Edge]) -> Mapping[Key, Sequence[Own]]:
        """The candidates of a section in a group that these of its edges leave."""
        case = section, *(end for e in leaving for end in (e.src, e.dst))
        if case in self._known:
            return self._known[case]
        found, least = defaultdict[Key, list[Own]](list), self._least
        sent, received = [e for e in leaving if e.src == section], [e for e in leaving if e.dst == section]
        for i, c in enumerate(self.problem.sections[section]):
            memory = c.memory_ahead if sent else c.memory
            memory += sum(e.sent[i] for e in sent) + sum(e.returned[i] for e in received)
            delay = max([0, *(least[e.src, e.dst][0] - e.free[i] + e.messages[i] for e in received)])
            hidden = max([0, *(least[e.src, e.dst][1] - e.slack[i] for e in sent)])
            rounds = max(
                [0, *(c.rounds * (e.latency[i] + least[e.src, e.dst][2]) for e in sent if c.rounds > 1)]
            )
            if (
                max(c.time_ns + hidden, rounds) + delay <= self.most
                and memory <= self.usable[c.ranks, c.kind]
            ):
                found[c.ranks, c.kind].append(Own(c.time_ns, c.time_ns + delay + hidden, memory, i))
        self._known[case] = found
        return found


def fewest(ranks: Mapping[int, int], every: int) -> list[Fewest]:
    """For each set of sections the fewest ranks in all, given those of sets that are a group of their own."""
    found = [Fewest(0, 0)]
    for whole in range(1, every + 1):
        parts = (part for part in _subsets(whole) if part & whole & -whole and part in ranks)
        found.append(
            min(
                (Fewest(ranks[part] + found[whole ^ part].ranks, part) for part in parts),
                default=Fewest(NEVER, 0),
            )
        )
    return found


def _subsets(mask: int) -> Iterator[int]:
    """All sets in a set but the empty one."""
    part = mask
    while part:
        yield part
        part = (part - 1) & mask
