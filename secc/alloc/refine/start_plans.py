"""The solver's plans of other kinds than its best one, where they may come near: what closed forms misjudge
differs from kind to kind.

- Every section apart, and all on the same devices; each also without replicas of several ranks, because what
  stages wait for on devices
  that sections share is more than closed forms say.
- All on all devices with equally many replicas: samples stay where they are, and no replica waits for another
  one's.
- The pipeline on most ranks in twice and in four times as many stages: one sample that is far longer than
  others holds up that one of many
  replicas that has it for longer than one of few.
- Without sections that return what they hold in rounds, also where all are apart, because a place in flight
  is also kept while
  consumers wait for others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.types import Assignment, Problem, exclude_candidates
from secc.alloc.solver import subproblem
from secc.alloc.solver.cpsat_model import solve_allocation
from secc.process_map import run_in_background

MAX_START_RATIO = 2  # times the best plan's step by closed forms: what takes longer by them is no start


def start_plans(problem: Problem, best: Assignment, margin: float) -> list[Assignment]:
    """The plans; `best` is the problem's best one. As in the solver, replicas of several ranks have to be
    faster by a margin."""
    most = MAX_START_RATIO * evaluate_assignment(replace(problem, capacity=1 << 62, pools=()), best).time_ns
    kinds = _StartSolver(margin, most)
    if not any(problem.sections[s][i].rounds > 1 for s, i in best.choice.items()):
        return [*kinds.plans_by_strategy(problem, best)]
    with run_in_background(
        lambda: kinds.solve_within_limit(exclude_candidates(problem, lambda c: c.rounds > 1))
    ) as roomy:
        found = [*kinds.plans_by_strategy(problem, best), roomy()]
    return [a for a in found if a is not None]


class _StartSolver:
    """Plans that take at most `most` ns by closed forms."""

    def __init__(self, margin: float, most: int) -> None:
        self._margin, self._time_limit = margin, most

    def solve_within_limit(self, problem: Problem) -> Assignment | None:
        found = solve_allocation(problem, margin=self._margin, most=self._time_limit)
        return None if found is None else found.assignment

    def plans_by_strategy(self, problem: Problem, best: Assignment) -> Iterator[Assignment]:
        if problem.strategy != "auto" or len(problem.sections) < 2:
            return
        groups = len(set(best.group.values()))
        for strategy, count in ("apart", len(best.group)), ("colocate", 1):
            free = replace(problem, strategy=strategy)
            found = best if groups == count else self.solve_within_limit(free)
            if found is not None:
                yield found
            if (
                found is not None
                and groups != count
                and any(free.sections[s][i].rounds > 1 for s, i in found.choice.items())
            ):
                roomy = self.solve_within_limit(exclude_candidates(free, lambda c: c.rounds > 1))
                yield from () if roomy is None else (roomy,)
            if found is not None and any(free.sections[s][i].width for s, i in found.choice.items()):
                narrow = self.solve_within_limit(exclude_candidates(free, lambda c: c.width > 0))
                yield from () if narrow is None else (narrow,)
        yield from self._equal_replica_plans(replace(problem, strategy="colocate"))
        yield from self._plans_with_more_stages(problem, best)

    def _plans_with_more_stages(self, problem: Problem, best: Assignment) -> Iterator[Assignment]:
        """The plans in which the pipeline on most ranks is cut into more stages, and other sections run as in
        the best one."""
        chosen = {s: problem.sections[s][i] for s, i in best.choice.items()}
        section = max((s for s, c in chosen.items() if c.pp > 1), key=lambda s: chosen[s].ranks, default="")
        for s in chosen.keys() - {section}:
            problem = exclude_candidates(problem, lambda o, c=chosen[s]: o != c, (s,))
        for stages in (2 * chosen[section].pp, 4 * chosen[section].pp) if section else ():
            found = self.solve_within_limit(
                exclude_candidates(problem, lambda o, n=stages: o.pp != n, (section,))
            )
            yield from () if found is None else (found,)

    def _equal_replica_plans(self, together: Problem) -> Iterator[Assignment]:
        """The best plan with equally many replicas of all sections on all devices."""
        counts = (
            Counter({c.dp for c in cs if c.ranks == together.ranks}) for cs in together.sections.values()
        )
        common = sum(counts, Counter[int]())
        found: list[Assignment] = []
        for n in sorted(n for n, sections in common.items() if sections == len(together.sections)):
            part = subproblem.keep_candidates(
                together, lambda c, n=n: c.dp == n and c.ranks == together.ranks
            )
            level = None if part is None else self.solve_within_limit(part.problem)
            found += [] if part is None or level is None else [part.to_whole(level)]
        yield from sorted(found, key=lambda a: evaluate_assignment(together, a).time_ns)[:1]
