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

from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.types import Assignment, Problem
from secc.alloc.solver.group_bounds import FewestRanks, GroupBounds, SectionGroup, SectionOption, fewest_ranks


class GroupChoice(NamedTuple):
    """A group in which each section is a candidate, given by its place, and its work."""

    work: int
    ranks: int
    choice: Mapping[str, int]


ChoicesBySections = Mapping[int, Sequence[GroupChoice]]  # of each set of sections


def greedy_assignment(problem: Problem, most: int) -> Assignment | None:
    """An assignment that takes at most `most` ns, or None where none was found."""
    found: list[tuple[int, int, Assignment]] = []
    for i, a in enumerate(_assignments_ignoring_waits(problem, most)):
        try:
            time, better = _improve_assignment(problem, a)
        except ValueError:  # they are not whole nodes, say
            continue
        found += [(time, i, better)] if time <= most else []
    return min(found)[2] if found else None


def _assignments_ignoring_waits(problem: Problem, most: int) -> Iterator[Assignment]:
    """Of several kinds the best, or nearly so, if groups did not wait for each other."""
    groups = GroupBounds(problem, most)
    options = {
        mask: [f for g in some if (f := _fit_group(g, groups.usable_bytes[g.key])) is not None]
        for mask, some in groups.by_sections.items()
    }
    for kind in (options, [groups.all_sections], [1 << i for i in range(len(groups.names))]):
        some = {mask: options[mask] for mask in kind if mask in options}
        times = sorted({f.work for filled in some.values() for f in filled})
        at = bisect_left(
            times,
            True,
            key=lambda time: _fewest_ranks_within(some, groups.all_sections, time)[-1].ranks <= problem.ranks,
        )
        if at < len(times):
            yield _assignment_within(groups, some, times[at])


def _fit_group(group: SectionGroup, usable: int) -> GroupChoice | None:
    """The group with the least work that memory allows, or nearly so: from the fastest on, the cheapest way
    to save bytes is taken."""
    chosen = {s: min(own) for s, own in group.sections.items()}
    while sum(c.memory for c in chosen.values()) > usable:
        swaps = [(s, c) for s, own in group.sections.items() for c in own if c.memory < chosen[s].memory]
        if not swaps:
            return None
        section, c = min(swaps, key=lambda swap: _price_of_saving(chosen[swap[0]], swap[1]))
        chosen[section] = c
    return GroupChoice(
        sum(c.work for c in chosen.values()), group.key[0], {s: c.index for s, c in chosen.items()}
    )


def _price_of_saving(old: SectionOption, new: SectionOption) -> tuple[float, int]:
    """Time for each byte that is saved; among equals the most bytes."""
    return (new.work - old.work) / (old.memory - new.memory), new.memory


def _fewest_ranks_within(options: ChoicesBySections, every: int, time: int) -> list[FewestRanks]:
    """The fewest ranks for each set of sections where no group works longer."""
    ranks = {mask: [f.ranks for f in filled if f.work <= time] for mask, filled in options.items()}
    return fewest_ranks({mask: min(counts) for mask, counts in ranks.items() if counts}, every)


def _assignment_within(groups: GroupBounds, options: ChoicesBySections, time: int) -> Assignment:
    """The sections in those groups on those ranks, or on a few more."""
    shared, left, filled = (
        _fewest_ranks_within(options, groups.all_sections, time),
        groups.all_sections,
        dict[int, GroupChoice](),
    )
    while left:
        mask = shared[left].first_group
        filled[mask] = min((f for f in options[mask] if f.work <= time), key=lambda f: (f.ranks, f.work))
        left ^= mask
    choice, group = dict[str, int](), dict[str, str]()
    for found in _fill_whole_nodes(groups.problem, options, filled, time).values():
        choice |= found.choice
        group |= dict.fromkeys(found.choice, next(s for s in groups.names if s in found.choice))
    return Assignment({s: choice[s] for s in groups.names}, {s: group[s] for s in groups.names})


def _fill_whole_nodes(
    problem: Problem, options: ChoicesBySections, filled: Mapping[int, GroupChoice], time: int
) -> Mapping[int, GroupChoice]:
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


def _improve_assignment(problem: Problem, a: Assignment) -> tuple[int, Assignment]:
    """The assignment after changes of one section at a time, each the best one, and its time. Raises
    ValueError where it breaks a rule."""
    best = evaluate_assignment(problem, a).time_ns
    while True:
        now = a
        for s, i in _single_changes(problem, now):
            if problem.sections[s][i].time_ns >= best:
                continue
            changed = replace(now, choice={**now.choice, s: i})
            try:
                time = evaluate_assignment(problem, changed).time_ns
            except ValueError:
                continue
            if time < best:
                best, a = time, changed
        if a is now:
            return best, a


def _single_changes(problem: Problem, a: Assignment) -> Iterator[tuple[str, int]]:
    """Other candidates of one section: on as many ranks where it shares them."""
    for s, candidates in problem.sections.items():
        own, alone = candidates[a.choice[s]], list(a.group.values()).count(a.group[s]) == 1
        for i, c in enumerate(candidates):
            if alone or (c.ranks, c.kind) == (own.ranks, own.kind):
                yield s, i
