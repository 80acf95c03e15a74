"""Solves for plans of other kinds than the solver's best, as further starts of the local search.

What closed forms misjudge differs from kind to kind, so these plans may be better in truth:

- Every section apart, and all on the same devices; each also without replicas of several ranks, because on
  shared devices stages wait longer than closed forms say.
- All sections on all devices with the same number of replicas: samples stay where they are, and no replica
  waits for another one.
- The pipeline on most ranks in two and four times as many stages: one very long sample delays its replica,
  and fewer replicas with more stages suffer less from that.
- Without stages, where the best plan has stages with context parallelism: closed forms take means, and there
  are few long samples for each of the replicas that stages need.
- Without sections that use their in-flight budget in several rounds, also where all are apart, because the
  budget is also held while consumers wait for others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import TypeVar

from secc.alloc.problem.build_problem import PARALLEL_PRICING_RANKS
from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.types import Assignment, Candidate, Problem, exclude_candidates
from secc.alloc.solver import subproblem
from secc.alloc.solver.allocation_solver import solve_allocation
from secc.process_map import process_mapper, run_in_background

VariantT = TypeVar("VariantT")
ReplicaLayout = tuple[int, int, int, int]  # tp, pp, cp, ep

MAX_START_RATIO = 2  # times the best plan's step by closed forms: what takes longer by them is no start
MAX_KIND_RATIO = 1.3  # the same for plans of other kinds of mixtures, and with dealt samples
MOST_DEALT_STARTS = 4  # with dealt samples, apart and on the same devices each
LAYOUTS_AT_ONCE = 4  # with dealt samples, are solved before their plans bound the others


def start_plans(problem: Problem, best: Assignment, margin: float) -> list[Assignment]:
    """Returns the start plans; `best` is the problem's best plan by closed forms.

    Replicas of several ranks have to be faster by `margin`. Plans that take more than `MAX_START_RATIO` times
    the best plan's step are left out.
    """
    most = MAX_START_RATIO * evaluate_assignment(replace(problem, capacity=1 << 62, pools=()), best).time_ns
    solver = _StartSolver(margin, most)
    if not any(problem.sections[s][i].rounds > 1 for s, i in best.choice.items()):
        return [*solver.plans_by_strategy(problem, best)]
    with run_in_background(
        lambda: solver.solve_within_limit(exclude_candidates(problem, lambda c: c.rounds > 1)),
        forks=problem.ranks >= PARALLEL_PRICING_RANKS,
    ) as single_round_plan:
        plans = [*solver.plans_by_strategy(problem, best), single_round_plan()]
    return [a for a in plans if a is not None]


def sections_with_experts(problem: Problem) -> list[str]:
    """Sections that may divide experts over ranks."""
    return [s for s, cs in problem.sections.items() if any(c.ep > 1 for c in cs)]


def plans_of_kinds(problem: Problem, best: Assignment, margin: float) -> list[Assignment]:
    """Returns, for each mixture of experts, the best plan with each other number of parts of the experts, and
    with each other number of stages, as far as it takes at most `MAX_KIND_RATIO` times the best plan's step.

    Replicas that exchange tokens wait for the one with the longest samples, and stages for the longest
    micro-batch: by closed forms such plans are hard to compare with each other.
    """
    most = MAX_KIND_RATIO * evaluate_assignment(replace(problem, capacity=1 << 62, pools=()), best).time_ns
    solver, kinds = _StartSolver(margin, int(most)), list[tuple[str, str, int]]()
    for s in sections_with_experts(problem):
        own, usable = problem.sections[s][best.choice[s]], [c for c in problem.sections[s] if not c.excluded]
        for degree in ("ep", "pp"):
            others = {getattr(c, degree) for c in usable} - {getattr(own, degree)}
            kinds += [(s, degree, n) for n in sorted(others)]

    def solve_kind(kind: tuple[str, str, int]) -> Assignment | None:
        section, degree, n = kind
        other = exclude_candidates(problem, lambda c: getattr(c, degree) != n, (section,))
        return solver.solve_within_limit(other)

    with _variant_mapper(problem, solve_kind) as map_variants:
        return [a for a in map_variants(kinds) if a is not None]


def plans_with_dealt_samples(problem: Problem, best: Assignment, margin: float) -> list[Assignment]:
    """Returns the best plans, apart and on the same devices, in which the section with most work deals
    samples to its ranks of cp: one for each layout of its replicas (tp, pp, cp, ep), as far as they take at
    most `MAX_KIND_RATIO` times the best plan's step; the shortest `MOST_DEALT_STARTS` of each strategy.

    Closed forms do not see for which replicas long samples make others wait, nor that sections on the same
    devices never wait for other devices. They misjudge some of these plans by half of a step.
    """
    if problem.strategy != "auto" or len(problem.sections) < 2:
        return []
    most = int(
        MAX_KIND_RATIO * evaluate_assignment(replace(problem, capacity=1 << 62, pools=()), best).time_ns
    )
    chosen = {s: problem.sections[s][i] for s, i in best.choice.items()}
    heaviest = max(chosen, key=lambda s: chosen[s].time_ns * chosen[s].ranks)
    problems = {strategy: replace(problem, strategy=strategy) for strategy in ("apart", "colocate")}
    # Of each strategy the shortest plans so far: ns, the place of the layout among all, and the plan.
    shortest: dict[str, list[tuple[int, int, Assignment]]] = {strategy: [] for strategy in problems}

    def solve_variant(variant: tuple[str, ReplicaLayout, int]) -> Assignment | None:
        strategy, layout, limit_ns = variant
        other = exclude_candidates(problems[strategy], lambda c: _replica_layout(c) != layout, (heaviest,))
        return _StartSolver(margin, limit_ns).solve_within_limit(other)

    def limit_of(strategy: str) -> int:
        """What a further plan of this strategy may take in ns."""
        known = shortest[strategy]
        return known[-1][0] if len(known) == MOST_DEALT_STARTS else most

    # Layouts with least work come first: their plans rule out most of the others.
    least_ns = _least_steps_by_layout(problem, heaviest)
    places, layouts = [*least_ns], sorted(least_ns, key=least_ns.__getitem__)
    with _variant_mapper(problem, solve_variant) as map_variants:
        for start in range(0, len(layouts), LAYOUTS_AT_ONCE):
            variants = [
                (strategy, layout, limit_of(strategy))
                for strategy, layout in product(problems, layouts[start : start + LAYOUTS_AT_ONCE])
                if least_ns[layout] <= limit_of(strategy)
            ]
            for (strategy, layout, _), a in zip(variants, map_variants(variants), strict=True):
                if a is not None:
                    time_ns = evaluate_assignment(problems[strategy], a).time_ns
                    known = [*shortest[strategy], (time_ns, places.index(layout), a)]
                    shortest[strategy] = sorted(known, key=lambda k: k[:2])[:MOST_DEALT_STARTS]
    return [a for known in shortest.values() for _, _, a in known]


def _least_steps_by_layout(problem: Problem, section: str) -> dict[ReplicaLayout, int]:
    """For each layout of a section in which it may deal samples, the least step in ns of any plan with it:
    all work spread evenly over all ranks."""

    def least_work(candidates: Iterable[Candidate]) -> int:
        return min((c.busy_ns * c.ranks for c in candidates if not c.excluded), default=0)

    by_layout: dict[ReplicaLayout, list[Candidate]] = {}
    for c in problem.sections[section]:
        by_layout.setdefault(_replica_layout(c), []).append(c)
    others = sum(least_work(cs) for s, cs in problem.sections.items() if s != section)
    return {
        layout: (others + least_work(cs)) // problem.ranks
        for layout, cs in by_layout.items()
        if any(c.cp_per == "micro_batch" and not c.excluded for c in cs)
    }


@contextmanager
def _variant_mapper(
    problem: Problem, solve: Callable[[VariantT], Assignment | None]
) -> Iterator[Callable[[Sequence[VariantT]], list[Assignment | None]]]:
    """Context manager: yields a function that maps `solve` over variants of a problem; on all cores if it has
    many candidates."""
    if problem.ranks < PARALLEL_PRICING_RANKS:
        yield lambda variants: [*map(solve, variants)]
        return
    with process_mapper(solve) as map_variants:
        yield map_variants


def _replica_layout(c: Candidate) -> ReplicaLayout:
    """(tp, pp, cp, ep) of a candidate."""
    return c.tp, c.pp, c.cp, c.ep


class _StartSolver:
    """Solves variants of a problem for plans within a time limit in ns."""

    def __init__(self, margin: float, most: int) -> None:
        self._margin, self._time_limit = margin, most

    def solve_within_limit(self, problem: Problem) -> Assignment | None:
        """The best plan of a problem, None if none is within the limit."""
        found = solve_allocation(problem, margin=self._margin, most=self._time_limit)
        return None if found is None else found.assignment

    def plans_by_strategy(self, problem: Problem, best: Assignment) -> Iterator[Assignment]:
        """Yields the start plans that all searches have."""
        if any(c.pp > 1 and c.cp > 1 for c in (problem.sections[s][i] for s, i in best.choice.items())):
            without_stages = self.solve_within_limit(exclude_candidates(problem, lambda c: c.pp > 1))
            yield from () if without_stages is None else (without_stages,)
        if problem.strategy != "auto" or len(problem.sections) < 2:
            return
        groups = len(set(best.group.values()))
        for strategy, count in ("apart", len(best.group)), ("colocate", 1):
            variant = replace(problem, strategy=strategy)
            plan = best if groups == count else self.solve_within_limit(variant)
            if plan is not None:
                yield plan
            if (
                plan is not None
                and groups != count
                and any(variant.sections[s][i].rounds > 1 for s, i in plan.choice.items())
            ):
                single_round_plan = self.solve_within_limit(
                    exclude_candidates(variant, lambda c: c.rounds > 1)
                )
                yield from () if single_round_plan is None else (single_round_plan,)
            if plan is not None and any(variant.sections[s][i].width for s, i in plan.choice.items()):
                narrow_plan = self.solve_within_limit(exclude_candidates(variant, lambda c: c.width > 0))
                yield from () if narrow_plan is None else (narrow_plan,)
        yield from self._equal_replica_plans(replace(problem, strategy="colocate"))
        yield from self._plans_with_more_stages(problem, best)

    def _plans_with_more_stages(self, problem: Problem, best: Assignment) -> Iterator[Assignment]:
        """Yields plans in which the pipeline on most ranks has more stages; other sections run as in the
        best plan."""
        chosen = {s: problem.sections[s][i] for s, i in best.choice.items()}
        section = max((s for s, c in chosen.items() if c.pp > 1), key=lambda s: chosen[s].ranks, default="")
        for s in chosen.keys() - {section}:
            problem = exclude_candidates(problem, lambda o, c=chosen[s]: o != c, (s,))
        for stages in (2 * chosen[section].pp, 4 * chosen[section].pp) if section else ():
            plan = self.solve_within_limit(
                exclude_candidates(problem, lambda o, n=stages: o.pp != n, (section,))
            )
            yield from () if plan is None else (plan,)

    def _equal_replica_plans(self, together: Problem) -> Iterator[Assignment]:
        """Yields the best plan with equally many replicas of all sections on all devices."""
        replica_counts = (
            Counter({c.dp for c in cs if c.ranks == together.ranks}) for cs in together.sections.values()
        )
        common = sum(replica_counts, Counter[int]())
        plans: list[Assignment] = []
        for n in sorted(n for n, sections in common.items() if sections == len(together.sections)):
            with_n_replicas = subproblem.keep_candidates(
                together, lambda c, n=n: c.dp == n and c.ranks == together.ranks
            )
            solution = None if with_n_replicas is None else self.solve_within_limit(with_n_replicas.problem)
            plans += (
                [] if with_n_replicas is None or solution is None else [with_n_replicas.to_whole(solution)]
            )
        yield from sorted(plans, key=lambda a: evaluate_assignment(together, a).time_ns)[:1]
