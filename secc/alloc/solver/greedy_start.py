"""Finds a good assignment without a solver; a large problem's search starts from it, and its step time prunes
candidates.

Ignoring that groups wait for each other, the best division of ranks follows from bisection over the step time
(`secc.alloc.solver.group_bounds`). This is done for unrestricted groups, for all sections on the same
devices, and for every section on its own. Each result is then improved by changing one section at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.types import Assignment, Problem
from secc.alloc.solver.group_bounds import FewestRanks, GroupBounds, SectionGroup, SectionOption, fewest_ranks


class GroupChoice(NamedTuple):
    """A group with a candidate for each section, given by its index, and the group's work in ns."""

    work: int
    ranks: int
    choice: Mapping[str, int]


ChoicesBySections = Mapping[int, Sequence[GroupChoice]]  # of each set of sections


def greedy_assignment(problem: Problem, most: int) -> Assignment | None:
    """Returns an assignment that takes at most `most` ns, None if none was found."""
    assignments: list[tuple[int, int, Assignment]] = []
    for i, a in enumerate(_assignments_ignoring_waits(problem, most)):
        try:
            time, improved = _improve_assignment(problem, a)
        except ValueError:  # they are not whole nodes, say
            continue
        assignments += [(time, i, improved)] if time <= most else []
    return min(assignments)[2] if assignments else None


def _assignments_ignoring_waits(problem: Problem, most: int) -> Iterator[Assignment]:
    """Yields near-optimal assignments that ignore waiting between groups: unrestricted, all sections
    together, each section apart."""
    groups = GroupBounds(problem, most)
    options = {
        mask: [f for g in groups_of_mask if (f := _fit_group(g, groups.usable_bytes[g.key])) is not None]
        for mask, groups_of_mask in groups.by_sections.items()
    }
    for masks in (options, [groups.all_sections], [1 << i for i in range(len(groups.names))]):
        groups_of_mask = {mask: options[mask] for mask in masks if mask in options}
        times = sorted({f.work for filled in groups_of_mask.values() for f in filled})
        at = bisect_left(
            times,
            True,
            key=lambda time: (
                _fewest_ranks_within(groups_of_mask, groups.all_sections, time)[-1].ranks <= problem.ranks
            ),
        )
        if at < len(times):
            yield _assignment_within(groups, groups_of_mask, times[at])


def _fit_group(group: SectionGroup, usable: int) -> GroupChoice | None:
    """Chooses candidates of a group with little work that fit `usable` bytes.

    Starts with the fastest candidates and repeatedly swaps in the one that saves bytes at the least time for
    each byte.
    """
    chosen = {s: min(section_options) for s, section_options in group.sections.items()}
    while sum(c.memory for c in chosen.values()) > usable:
        swaps = [
            (s, c)
            for s, section_options in group.sections.items()
            for c in section_options
            if c.memory < chosen[s].memory
        ]
        if not swaps:
            return None
        section, c = min(swaps, key=lambda swap: _price_of_saving(chosen[swap[0]], swap[1]))
        chosen[section] = c
    return GroupChoice(
        sum(c.work for c in chosen.values()), group.key[0], {s: c.index for s, c in chosen.items()}
    )


def _price_of_saving(old: SectionOption, new: SectionOption) -> tuple[float, int]:
    """Additional time for each saved byte; among equals the candidate with the fewest bytes."""
    return (new.work - old.work) / (old.memory - new.memory), new.memory


def _fewest_ranks_within(options: ChoicesBySections, every: int, time: int) -> list[FewestRanks]:
    """The fewest ranks for each set of sections if no group works longer than `time`."""
    ranks = {mask: [f.ranks for f in filled if f.work <= time] for mask, filled in options.items()}
    return fewest_ranks({mask: min(counts) for mask, counts in ranks.items() if counts}, every)


def _assignment_within(groups: GroupBounds, options: ChoicesBySections, time: int) -> Assignment:
    """Assignment in which no group works longer than `time`, on the fewest ranks or a few more."""
    shared = _fewest_ranks_within(options, groups.all_sections, time)
    left = groups.all_sections
    filled = dict[int, GroupChoice]()
    while left:
        mask = shared[left].first_group
        filled[mask] = min((f for f in options[mask] if f.work <= time), key=lambda f: (f.ranks, f.work))
        left ^= mask
    choice, group = dict[str, int](), dict[str, str]()
    for group_choice in _fill_whole_nodes(groups.problem, options, filled, time).values():
        choice |= group_choice.choice
        group |= dict.fromkeys(group_choice.choice, next(s for s in groups.names if s in group_choice.choice))
    return Assignment({s: choice[s] for s in groups.names}, {s: group[s] for s in groups.names})


def _fill_whole_nodes(
    problem: Problem, options: ChoicesBySections, filled: Mapping[int, GroupChoice], time: int
) -> Mapping[int, GroupChoice]:
    """The groups, with one of them on more ranks so that all together use whole nodes, if that is
    possible."""
    ranks_used = sum(f.ranks for f in filled.values())
    if ranks_used <= problem.per_node or not ranks_used % problem.per_node:
        return filled
    larger = [
        (f.ranks - chosen.ranks, f.work, mask, f)
        for mask, chosen in filled.items()
        for f in options[mask]
        if f.work <= time
    ]
    fitting = [
        m
        for m in larger
        if 0 < m[0] <= problem.ranks - ranks_used and not (ranks_used + m[0]) % problem.per_node
    ]
    return {**filled, **{mask: f for *_, mask, f in sorted(fitting, key=lambda m: m[:3])[:1]}}


def _improve_assignment(problem: Problem, a: Assignment) -> tuple[int, Assignment]:
    """Improves an assignment by the best change of one section until none helps; returns its step time and
    the assignment.

    Raises ValueError if the assignment violates a constraint.
    """
    best = evaluate_assignment(problem, a).time_ns
    while True:
        current = a
        for s, i in _single_changes(problem, current):
            if problem.sections[s][i].busy_ns >= best:
                continue
            changed = current.with_choice(s, i)
            try:
                time = evaluate_assignment(problem, changed).time_ns
            except ValueError:
                continue
            if time < best:
                best, a = time, changed
        if a is current:
            return best, a


def _single_changes(problem: Problem, a: Assignment) -> Iterator[tuple[str, int]]:
    """Yields (section, index) of other candidates of one section; on as many ranks if it shares them."""
    for s, candidates in problem.sections.items():
        chosen, alone = candidates[a.choice[s]], list(a.group.values()).count(a.group[s]) == 1
        for i, c in enumerate(candidates):
            if not c.excluded and (alone or (c.ranks, c.kind) == (chosen.ranks, chosen.kind)):
                yield s, i
