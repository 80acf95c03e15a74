"""The solver's best plan against plans near it, each under the real order, which finds what the closed forms
misjudge.

From the solver's plan with the shortest step under the order (`secc.alloc.refine.start_plans`,
`secc.alloc.refine.schedule_evaluation`), plans that differ in one thing are tried: one section run in another
way on as many ranks, or ranks handed to a group by another one, or by nobody where some are idle. Those come
first that the closed forms like best, but one for each section before the second for any, and other shapes
before other micro-batches. The shortest goes on, until none is shorter or so many have been tried, or their
orders became so long together. A plan whose order holds more than the memory there is does not count.

A trial searches orders of several batches. So plans are looked at first: one batch, in the first order found.
Those that are far behind the best in that are not tried, and those far behind in the order searched for this
batch not on the others; nor is a plan that is far ahead of all others, unless it is the last. Looks and
trials run on all cores.

Under `zero3` replicas wait for each other in every micro-batch, and on shared ranks for whatever else these
are at, which closed forms do not price: such steps take up to twice their time. So the solver's best plan is
tried with and without, and those near it are without.

As in the solver, replicas of several ranks have to be faster by a margin. Everything is counted and nothing
timed, so that the same inputs give the same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, islice, product

from secc import process_map
from secc.alloc.problem.candidate_pruning import LOCKSTEP_SHARDING
from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.types import Assignment, Candidate, Problem, exclude_candidates
from secc.alloc.refine.schedule_evaluation import (
    MIN_PARALLEL_TASKS,
    Evaluation,
    GroupRanks,
    PlanEvaluator,
    mean_evaluation,
)
from secc.alloc.refine.start_plans import start_plans
from secc.alloc.solver.cpsat_model import solve_allocation

MAX_EVALUATED_PLANS = 60
TASK_BUDGET_RANGE = (
    200_000,
    600_000,
    # forwards and backwards in the orders of all looks and trials, tens of microseconds each: at least, at most
)
TASK_BUDGET_PER_SAMPLE = 400  # of a batch, in between
ESTIMATE_MARGIN = 1 / 16  # a plan whose look takes longer than the best one's by more is not tried
FIRST_BATCH_MARGIN = (
    1 / 32
)  # a plan whose first batch takes longer than the best one's by more is not tried on others
CLOSED_FORM_MARGIN = (
    1 / 5
)  # of the step, the part by which closed forms may put a plan that is looked at behind the one it is near to
FULL_EVALUATIONS_AT_ONCE = (
    3  # of those that are closer, how many are tried at once, and then on other batches
)
NEIGHBOURS_AT_ONCE = 8  # neighbours of the best one, before the best of them goes on
VARIANTS_PER_SECTION = 6  # ways to run one section on as many ranks, of those that the closed forms like best
STEP_RESOLUTION = 1000  # steps that differ by less than one part in so many are about alike
RANK_COUNT_SHIFTS = (1, 2, 4, 8)  # of the numbers of ranks that a group may have, how many up or down


PlanKey = tuple[tuple[int, ...], tuple[str, ...]]
EvaluationRequest = tuple[Assignment, int | None]  # the step of a plan on a batch, or a look at it
EvaluateOne = Callable[[EvaluationRequest], Evaluation]
EvaluateMany = Callable[[Sequence[EvaluationRequest]], list[Evaluation]]


@dataclass(frozen=True)
class RefinedPlan:
    """The plan with the shortest step, that step under the order and by the closed forms, and how many plans
    were tried."""

    assignment: Assignment
    evaluation: Evaluation
    closed_form_ns: int
    evaluated_plans: int


def refine_by_simulation(
    trial: PlanEvaluator,
    problem: Problem,
    best: Assignment,
    hand_out: Callable[[Assignment], GroupRanks],
    margin: float,
) -> RefinedPlan:
    """The best under the real order of the solver's plan `best` and those near it. `hand_out` gives the ranks
    of a plan's groups."""
    plain, firsts = _solve_without_zero3(problem, best, margin)

    def step(item: EvaluationRequest) -> Evaluation:
        a, batch = item
        ranks = hand_out(a)
        return (
            trial.estimate(a, ranks)
            if batch is None
            else trial.evaluate_batch(a, ranks, trial.batches[batch])
        )

    with process_map.process_mapper(step) as steps:
        return _LocalSearch(trial, problem, plain, margin, step, steps).run(firsts)


def _solve_without_zero3(
    problem: Problem, best: Assignment, margin: float
) -> tuple[Problem, list[Assignment]]:
    """The problem without replicas in step, and its best plan before that of the whole one; the problem
    itself where nothing else fits."""
    if problem.deadline is not None:
        return problem, [best]
    plain = exclude_candidates(problem, _uses_zero3)
    if not any(_uses_zero3(problem.sections[s][i]) for s, i in best.choice.items()):
        return plain, [best]
    found = solve_allocation(plain, margin=margin)
    return (problem, [best]) if found is None else (plain, [found.assignment, best])


class _LocalSearch:
    """`plans` are those that were looked at, `looks` what they took then, `steps` what on the first batch, or
    on all. Plans of `plain` are sought. `here` gives a step that is wanted, `everywhere` several, on all
    cores."""

    def __init__(
        self,
        trial: PlanEvaluator,
        problem: Problem,
        plain: Problem,
        margin: float,
        here: EvaluateOne,
        everywhere: EvaluateMany,
    ) -> None:
        (
            self.evaluator,
            self.problem,
            self.neighbourhood,
            self.margin,
            self.evaluate_one,
            self.evaluate_many,
        ) = (
            trial,
            problem,
            plain,
            margin,
            here,
            everywhere,
        )
        self.evaluated: list[Assignment] = []
        self.estimates: dict[PlanKey, Evaluation] = {}
        self.evaluations: dict[PlanKey, list[Evaluation]] = {}
        self.candidates_by_ranks = {
            s: _index_by_ranks(cs, plain != problem) for s, cs in problem.sections.items()
        }

    def run(self, best: Sequence[Assignment]) -> RefinedPlan:
        free = (
            self.problem.deadline is None
        )  # with a deadline the fewest devices are wanted, and the solver has them
        others = start_plans(self.neighbourhood, best[0], self.margin) if free else ()
        self._estimate_plans([*{_plan_key(a): a for a in (*best, *others)}.values()])
        shortest = self._select_best()
        while True:
            if free and (left := self._remaining_evaluations()):
                self._estimate_plans(self._untried_neighbours(shortest)[: min(NEIGHBOURS_AT_ONCE, left)])
            challenger = self._select_best()
            if challenger is shortest:
                if self._confirm_on_all_batches(shortest):
                    return RefinedPlan(
                        shortest,
                        mean_evaluation(self.evaluations[_plan_key(shortest)]),
                        self._closed_form_ns(shortest),
                        len(self.evaluated),
                    )
                challenger = self._select_best()
            shortest = challenger

    def _remaining_evaluations(self) -> int:
        """How many more plans may be tried."""
        jobs = sum(
            tried.tasks for some in ([*self.estimates.values()], *self.evaluations.values()) for tried in some
        )
        longest = max(tried.tasks for tried in self.estimates.values())
        most = sorted((*TASK_BUDGET_RANGE, TASK_BUDGET_PER_SAMPLE * len(self.evaluator.batches[0])))[1]
        return max(0, min(MAX_EVALUATED_PLANS - len(self.evaluated), (most - jobs) // max(1, longest)))

    def _estimate_plans(self, plans: Sequence[Assignment]) -> None:
        self.evaluated += plans
        self.estimates |= zip(
            map(_plan_key, plans), self._evaluate_requests([(a, None) for a in plans]), strict=True
        )

    def _evaluate_plans(self, plans: Sequence[Assignment], count: int) -> None:
        """Plans on the first batches, so many."""
        wanted = [(a, i) for a in plans for i in range(len(self.evaluations.get(_plan_key(a), ())), count)]
        for (a, _), tried in zip(wanted, self._evaluate_requests(wanted), strict=True):
            self.evaluations.setdefault(_plan_key(a), []).append(tried)

    def _select_best(self) -> Assignment:
        """The best plan of those that were looked at. What is far ahead of all others is taken for the best
        without being tried."""
        close = self._within_margin(self.evaluated, lambda key: self.estimates[key], ESTIMATE_MARGIN)
        if len(close) > 1:
            self._evaluate_plans(close := self._limit_evaluations(close, 1), 1)
            close = self._within_margin(close, lambda key: self.evaluations[key][0], FIRST_BATCH_MARGIN)
        if len(close) > 1 and self._fits_memory(close[0]):
            self._evaluate_plans(
                close := self._limit_evaluations(close, len(self.evaluator.batches)),
                len(self.evaluator.batches),
            )
        best = min(close, key=self._score_evaluated) if len(close) > 1 else close[0]
        return (
            best
            if self._fits_memory(best) or not any(map(self._fits_memory, self.evaluated))
            else self._select_best()
        )

    def _confirm_on_all_batches(self, a: Assignment) -> bool:
        """Whether the best plan fits on all batches, or none does."""
        self._evaluate_plans([a], len(self.evaluator.batches))
        return self._fits_memory(a) or not any(map(self._fits_memory, self.evaluated))

    def _fits_memory(self, a: Assignment) -> bool:
        return all(
            tried.fits for tried in (self.estimates[_plan_key(a)], *self.evaluations.get(_plan_key(a), ()))
        )

    def _within_margin(
        self, plans: Sequence[Assignment], step: Callable[[PlanKey], Evaluation], share: float
    ) -> Sequence[Assignment]:
        """Those of the plans that take no longer than the shortest by more than a share, or all where none
        fits."""
        fitting = sorted(
            ((step(_plan_key(a)).time_ns, i, a) for i, a in enumerate(plans) if self._fits_memory(a)),
            key=lambda x: x[:2],
        )
        return [a for time, _, a in fitting if time <= fitting[0][0] * (1 + share)] or plans

    def _limit_evaluations(self, plans: Sequence[Assignment], count: int) -> list[Assignment]:
        """Those of the plans that were tried on so many batches, and a few of the others: many are hardly
        different."""
        tried = [len(self.evaluations.get(_plan_key(a), ())) >= count for a in plans]
        return [
            *compress(plans, tried),
            *islice(
                (a for a, known in zip(plans, tried, strict=True) if not known), FULL_EVALUATIONS_AT_ONCE
            ),
        ]

    def _evaluate_requests(self, wanted: Sequence[EvaluationRequest]) -> list[Evaluation]:
        """The steps of plans on batches, or looks at them: on all cores where the orders have enough jobs
        together."""
        jobs = max(
            (tried.tasks for tried in self.estimates.values()),
            default=2 * len(self.evaluator.batches[0]) * len(self.candidates_by_ranks),
        )
        return (
            self.evaluate_many(wanted)
            if jobs * len(wanted) >= MIN_PARALLEL_TASKS
            else [*map(self.evaluate_one, wanted)]
        )

    # -- what a plan is worth
    # -----------------------------------------------------------------------------------------------------

    def _score_evaluated(self, a: Assignment) -> tuple[bool, int, int]:
        """Less is better: what fits, the shorter step, the plainer plan. Steps that are about alike count as
        equal."""
        tried, chosen = (
            mean_evaluation(self.evaluations[_plan_key(a)]),
            [self.problem.sections[s][i] for s, i in a.choice.items()],
        )
        wide = any(c.width for c in chosen)
        return (
            not tried.fits,
            round(tried.time_ns * (1 + self.margin * wide) / self._step_resolution_ns),
            sum(c.extras for c in chosen),
        )

    def _closed_form_ns(self, a: Assignment) -> int:
        return evaluate_assignment(self.problem, a).time_ns

    @cached_property
    def _step_resolution_ns(self) -> int:
        """What makes a difference, ns."""
        return max(1, self.estimates[_plan_key(self.evaluated[0])].time_ns // STEP_RESOLUTION)

    def _closed_form_rank(self, a: Assignment) -> tuple[int, int, int]:
        """Of closed forms the less the better: the step and, where steps are about alike, the rounds in which
        places in flight are taken, and how long a sample is under way; what both cost in a real order is more
        than they say."""
        chosen = [self.problem.sections[s][i] for s, i in a.choice.items()]
        return (
            self._closed_form_ns(a) // self._step_resolution_ns,
            max(c.rounds for c in chosen),
            sum(c.fill_ns + c.drain_ns for c in chosen),
        )

    # -- plans near it
    # ------------------------------------------------------------------------------------------------------------

    def _untried_neighbours(self, shortest: Assignment) -> list[Assignment]:
        """The plans near it that nobody looked at, those first that are worth most."""
        new = {_plan_key(a): a for a in self._neighbour_plans(shortest) if _plan_key(a) not in self.estimates}
        most = (
            self._closed_form_ns(shortest) + CLOSED_FORM_MARGIN * self.estimates[_plan_key(shortest)].time_ns
        )
        return self._diversify_plans(
            sorted((a for a in new.values() if self._closed_form_ns(a) <= most), key=self._closed_form_rank),
            shortest,
        )

    def _neighbour_plans(self, a: Assignment) -> Iterator[Assignment]:
        ranks = {g: self.problem.sections[g][a.choice[g]].ranks for g in a.group.values()}
        for s in a.choice:
            yield from self._best_variants(a, {s: ranks[a.group[s]]}, VARIANTS_PER_SECTION)
        for g, h in product(ranks, ranks):
            for shift in RANK_COUNT_SHIFTS if g != h else ():
                more, fewer = (
                    self._shifted_rank_count(g, ranks[g], shift),
                    self._shifted_rank_count(h, ranks[h], -shift),
                )
                if more and fewer:
                    changed = {
                        s: more if a.group[s] == g else fewer for s in a.choice if a.group[s] in (g, h)
                    }
                    yield from self._best_variants(a, changed, 1)
        idle = self.problem.ranks - sum(ranks.values())
        for g, shift in product(ranks, RANK_COUNT_SHIFTS if idle else ()):
            if (more := self._shifted_rank_count(g, ranks[g], shift)) and more - ranks[g] <= idle:
                yield from self._best_variants(
                    a, {s: more for s in a.choice if a.group[s] == g}, VARIANTS_PER_SECTION
                )

    def _shifted_rank_count(self, section: str, ranks: int, shift: int) -> int | None:
        """The number of ranks so many steps up or down of those that a section may have."""
        counts = sorted(self.candidates_by_ranks[section])
        at = counts.index(ranks) + shift
        return counts[at] if 0 <= at < len(counts) else None

    def _best_variants(self, a: Assignment, ranks: Mapping[str, int], most: int) -> list[Assignment]:
        """The plans with other candidates on so many ranks for some sections, one after the other; best first
        by the closed forms."""
        found = [a]
        for s, count in ranks.items():
            options = (
                replace(b, choice={**b.choice, s: i})
                for b in found
                for i in self.candidates_by_ranks[s].get(count, ())
            )
            partial = s != list(ranks)[-1]
            found = list(
                islice(
                    self._diversify_plans(self._feasible_plans(options), a)
                    if not partial
                    else self._sort_by_section_time(options),
                    most,
                )
            )
        return found

    def _diversify_plans(self, plans: Sequence[Assignment], a: Assignment) -> list[Assignment]:
        """The plans, the first that changes some sections before the second that changes the same ones: many
        that differ from `a` in what hardly matters would keep others from being tried. Micro-batches and
        memory alone count as second."""
        seen = Counter[object]()
        places: list[int] = []
        for plan in plans:
            changed = [s for s, i in plan.choice.items() if i != a.choice[s]]
            alike = all(self._parallel_shape(plan, s) == self._parallel_shape(a, s) for s in changed)
            kind = alike, *((s, self._parallel_shape(plan, s)[-1]) for s in changed)
            places.append(seen[kind] + alike)
            seen[kind] += 1
        return [plan for _, plan in sorted(zip(places, plans, strict=True), key=lambda p: p[0])]

    def _parallel_shape(self, a: Assignment, section: str) -> tuple[int, int, int]:
        c = self.problem.sections[section][a.choice[section]]
        return c.tp, c.pp, c.ranks

    def _feasible_plans(self, options: Iterable[Assignment]) -> list[Assignment]:
        found: list[tuple[tuple[int, int, int], int, Assignment]] = []
        for i, option in enumerate(options):
            try:
                found.append((self._closed_form_rank(option), i, option))
            except ValueError:
                continue
        return [option for _, _, option in sorted(found, key=lambda t: t[:2])]

    def _sort_by_section_time(self, options: Iterable[Assignment]) -> list[Assignment]:
        """Options of which other sections are not settled yet: those whose own candidates take the least
        time."""
        return sorted(
            options, key=lambda o: sum(self.problem.sections[s][i].time_ns for s, i in o.choice.items())
        )


def _uses_zero3(c: Candidate) -> bool:
    return c.sharding == LOCKSTEP_SHARDING


def _plan_key(a: Assignment) -> PlanKey:
    return tuple(a.choice.values()), tuple(a.group.values())


def _index_by_ranks(candidates: Iterable[Candidate], plain: bool) -> dict[int, list[int]]:
    """The places of the candidates on so many ranks; `plain`: of those that are not in step."""
    found: dict[int, list[int]] = {}
    for i, c in enumerate(candidates):
        found.setdefault(c.ranks, []).extend(() if plain and _uses_zero3(c) else (i,))
    return found
