"""A good assignment without a solver, from which a large problem's search starts: its step bounds what is
worth a look.

Without the waits of groups for each other the best shares of the ranks are found at once
(`secc.alloc.solver.group_bounds`): for the groups that are best so, with all sections on the same devices,
and with each apart. Then one section at a time becomes what makes the step shortest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from secc.alloc.problem.closed_form import evaluate
from secc.alloc.problem.types import Assignment, Problem
from secc.alloc.solver.group_bounds import Fewest, Group, Groups, Own, fewest


class Filled(NamedTuple):
    """A group in which each section is a candidate, given by its place, and its work."""

    work: int
    ranks: int
    choice: Mapping[str, int]


Options = Mapping[int, Sequence[Filled]]  # of each set of sections


def guess(problem: Problem, most: int) -> Assignment | None:
    """An assignment that takes at most `most` ns, or None where none was found."""
    found: list[tuple[int, int, Assignment]] = []
    for i, a in enumerate(_relaxed(problem, most)):
        try:
            time, better = _better(problem, a)
        except ValueError:  # they are not whole nodes, say
            continue
        found += [(time, i, better)] if time <= most else []
    return min(found)[2] if found else None


def _relaxed(problem: Problem, most: int) -> Iterator[Assignment]:
    """Of several kinds the best, or nearly so, if groups did not wait for each other."""
    groups = Groups(problem, most)
    options = {
        mask: [f for g in some if (f := _filled(g, groups.usable[g.key])) is not None]
        for mask, some in groups.of.items()
    }
    for kind in (options, [groups.every], [1 << i for i in range(len(groups.names))]):
        some = {mask: options[mask] for mask in kind if mask in options}
        times = sorted({f.work for filled in some.values() for f in filled})
        at = bisect_left(
            times, True, key=lambda time: _shared_out(some, groups.every, time)[-1].ranks <= problem.ranks
        )
        if at < len(times):
            yield _assignment(groups, some, times[at])


def _filled(group: Group, usable: int) -> Filled | None:
    """The group with the least work that memory allows, or nearly so: from the fastest on, the cheapest way
    to save bytes is taken."""
    chosen = {s: min(own) for s, own in group.sections.items()}
    while sum(c.memory for c in chosen.values()) > usable:
        swaps = [(s, c) for s, own in group.sections.items() for c in own if c.memory < chosen[s].memory]
        if not swaps:
            return None
        section, c = min(swaps, key=lambda swap: _price(chosen[swap[0]], swap[1]))
        chosen[section] = c
    return Filled(sum(c.work for c in chosen.values()), group.key[0], {s: c.place for s, c in chosen.items()})


def _price(old: Own, new: Own) -> tuple[float, int]:
    """Time for each byte that is saved; among equals the most bytes."""
    return (new.work - old.work) / (old.memory - new.memory), new.memory


def _shared_out(options: Options, every: int, time: int) -> list[Fewest]:
    """The fewest ranks for each set of sections where no group works longer."""
    ranks = {mask: [f.ranks for f in filled if f.work <= time] for mask, filled in options.items()}
    return fewest({mask: min(counts) for mask, counts in ranks.items() if counts}, every)


def _assignment(groups: Groups, options: Options, time: int) -> Assignment:
    """The sections in those groups on those ranks, or on a few more."""
    shared, left, filled = _shared_out(options, groups.every, time), groups.every, dict[int, Filled]()
    while left:
        mask = shared[left].group
        filled[mask] = min((f for f in options[mask] if f.work <= time), key=lambda f: (f.ranks, f.work))
        left ^= mask
    choice, group = dict[str, int](), dict[str, str]()
    for found in _whole_nodes(groups.problem, options, filled, time).values():
        choice |= found.choice
        group |= dict.fromkeys(found.choice, next(s for s in groups.names if s in found.choice))
    return Assignment({s: choice[s] for s in groups.names}, {s: group[s] for s in groups.names})


def _whole_nodes(
    problem: Problem, options: Options, filled: Mapping[int, Filled], time: int
) -> Mapping[int, Filled]:
    """The groups, one of them on as many more ranks as make whole nodes of all, if there is such a one."""
    used = sum(f.ranks for f in filled.values())
    if used <= problem.per_node or not used % problem.per_node:
        return filled
    more = [
        (f.ranks - old.ranks, f.work, mask, f)
        for mask, old in filled.items()
        for f in options[mask]
        if f.work <= time
    ]
    fitting = [m for m in more if 0 < m[0] <= problem.ranks - used and not (used + m[0]) % problem.per_node]
    return {**filled, **{mask: f for *_, mask, f in sorted(fitting, key=lambda m: m[:3])[:1]}}


def _better(problem: Problem, a: Assignment) -> tuple[int, Assignment]:
    """The assignment after changes of one section at a time, each the best one, and its time. Raises
    ValueError where it breaks a rule."""
    best = evaluate(problem, a).time_ns
    while True:
        now = a
        for s, i in _changes(problem, now):
            if problem.sections[s][i].time_ns >= best:
                continue
            changed = replace(now, choice={**now.choice, s: i})
            try:
                time = evaluate(problem, changed).time_ns
            except ValueError:
                continue
            if time < best:
                best, a = time, changed
        if a is now:
            return best, a


def _changes(problem: Problem, a: Assignment) -> Iterator[tuple[str, int]]:
    """Other candidates of one section: on as many ranks where it shares them."""
    for s, candidates in problem.sections.items():
        own, alone = candidates[a.choice[s]], list(a.group.values()).count(a.group[s]) == 1
        for i, c in enumerate(candidates):
            if alone or (c.ranks, c.kind) == (own.ranks, own.kind):
                yield s, i
