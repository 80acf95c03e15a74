"""Local search around the solver's plan: plans are compared by the steps that the real scheduler makes of
them.

The search starts with the solver's plan and plans of other kinds (`secc.alloc.refine.start_plans`) and moves
to the best neighbour until none is better, `MAX_EVALUATED_PLANS` were evaluated, or the scheduled tasks reach
a budget. A neighbour differs in one thing: one section runs as another candidate on as many ranks, or ranks
move from one group to another, or idle ranks are added to a group. Neighbours are ranked by the closed forms,
such that each section gets its first neighbour before any gets its second, and other (tp, pp, cp, ranks)
come before other norms and micro-batches. A plan does not count if its scheduled step exceeds memory.

Closed forms may misjudge a section on few ranks. So the search goes on with plans that take ranks to the
section that the schedule of the best plan shows to be busiest, until none of them is better. Then two of its
groups are tried on shared ranks, and sections apart from their group. Then its pipeline on most ranks is
tried in other numbers of stages, on as many ranks: these are several moves away, as each number has its own
replicas and micro-batches. Norms decide which shapes are good, and shapes which
norms; as other shapes are tried first, the best plans are last tried with other norms. Of mixtures of experts
closed forms misjudge whole kinds of plans: replicas that exchange tokens wait for each other in every round,
and stages for the longest micro-batch. So the search also looks around the best plan of each number of parts
of the experts, and of each number of stages. In the end, neighbours of good plans are tried that are the
most promising by the ratios of estimates to closed forms so far (`secc.alloc.refine.step_model`).

A full evaluation schedules several global batches with the scheduler's own search. To save time there are
three levels. An *estimate* schedules one batch without search; where its step leaves no time for a search, it
is the evaluation on that batch. Plans within `ESTIMATE_MARGIN` of the best
estimate are evaluated on the first batch, those within `FIRST_BATCH_MARGIN` of the best there on the second,
and those within half of that of the best on both on all batches. A plan that is ahead of all others by more
than these margins is not evaluated until it is the final one. Estimates and evaluations run on all cores.

Under ZeRO-3 replicas wait for each other in every micro-batch, and on shared ranks for other sections; closed
forms do not price that, and such steps take up to twice the predicted time. So do steps of sections without
backward that divide experts over replicas and cannot run ahead: they deliver in rounds. The solver's best
plan is therefore evaluated with and without such choices, and neighbours are without.

As in the solver, replicas of several ranks have to be faster by a margin. Effort is counted in tasks and
never timed, so the same inputs give the same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations, compress, islice, product

from secc import process_map
from secc.alloc.problem.closed_form import evaluate_assignment, groups_that_run_ahead
from secc.alloc.problem.types import Assignment, Candidate, Problem, exclude_candidates
from secc.alloc.refine.schedule_evaluation import (
    MIN_PARALLEL_TASKS,
    Evaluation,
    EvaluationRequest,
    GroupRanks,
    PlanEvaluator,
    expect_searched_tasks,
    mean_evaluation,
)
from secc.alloc.refine.start_plans import (
    plans_of_kinds,
    plans_with_dealt_samples,
    sections_with_experts,
    start_plans,
)
from secc.alloc.refine.step_model import StepModel
from secc.alloc.solver.allocation_solver import solve_allocation

MAX_EVALUATED_PLANS = 60
# Tasks (forwards and backwards, tens of microseconds each) that all evaluations of a search may schedule:
# this many for each sample of a batch, within the range.
TASK_BUDGET_PER_SAMPLE = 400
TASK_BUDGET_RANGE = (200_000, 600_000)
# A plan is evaluated if its estimate is at most this share longer than the best estimate ...
ESTIMATE_MARGIN = 1 / 16
# ... and on further batches if the first batch is at most this share longer than the best one there, and half
# this share once there are several.
FIRST_BATCH_MARGIN = 1 / 32
DOES_NOT_FIT = 0.0  # in place of the ratio of two steps, where the first one lacks memory
# A neighbour is estimated if closed forms put it behind its origin by at most this share of the step.
CLOSED_FORM_MARGIN = 1 / 5
FULL_EVALUATIONS_AT_ONCE = 3  # plans that are evaluated together on the first batch, and then on all
NEIGHBOURS_AT_ONCE = 8  # neighbours that are estimated before the search moves to the best of them
VARIANTS_PER_SECTION = 6  # candidates of one section on as many ranks that become neighbours
STEP_RESOLUTION = 1000  # steps that differ by less than 1/1000 count as equal
RANK_COUNT_SHIFTS = (1, 2, 4, 8)  # steps up or down in the list of a group's possible rank counts
# Plans with other stages that may turn out shorter with several pieces of layers on a rank, and their tasks.
MOST_CLOSE_PLANS = 8
MOST_CLOSE_TASKS = 25_000
LIGHTER_PLANS_AT_ONCE = 4  # plans with a lighter load that are estimated before the search moves
MOST_LIGHTER_PLANS = 12  # that are estimated in all
SMALL_SHARE = 1 / 32  # of a step, by which waits may make it longer in a start plan of mixtures
MOST_PLANS_WITH_OTHER_GROUPS = 6  # are estimated in all
FASTEST_REGROUPED = 8  # candidates of a section are tried in its new group
NORMS_OF_BEST = 3  # of the best plans are tried with other norms once no neighbour is better ...
MOST_PLANS_WITH_OTHER_NORMS = 6  # ... and at most this many plans in all
MOST_PLANS_WITH_OTHER_STAGES = 4  # are tried at a time once no neighbour is better
# Once no neighbour is better, plans around the best one of each other kind of mixtures of experts are
# estimated, if it takes at most this share longer, in at most this many rounds ...
KIND_MARGIN = 1 / 2
MORE_PLANS_WITH_KINDS = 30  # than MAX_EVALUATED_PLANS
MOST_ROUNDS_OF_KIND = 4
NEIGHBOURS_OF_KIND = 5  # ... of this many neighbours and some plans with a lighter load each
# Neighbours of plans that take at most this share longer than the best one are estimated where ratios of
# estimates to closed forms make them promising, within these limits of plans and of tasks in a plan.
PROMISING_MARGIN = 1 / 4
PROMISING_GAIN = 1 / 50  # they have to be shorter than the best plan by this share
PROMISING_AT_ONCE = 4
MOST_PROMISING_PLANS = 24
MOST_PROMISING_TASKS = 200_000
LOAD_RESOLUTION = 32  # loads are counted in units of 1/32 of the step; smaller differences do not count


PlanKey = tuple[tuple[int, ...], tuple[str, ...]]
PlanKind = tuple[str, str, int]  # a section, "ep" or "pp", and its value
BatchRequest = tuple[Assignment, int | None]  # a plan and the index of a batch, None for an estimate
EvaluateRequests = Callable[[Sequence[BatchRequest]], list[Evaluation]]


@dataclass(frozen=True)
class RefinedPlan:
    """The best plan found, with its mean scheduled step, its step by the closed forms in ns, the number of
    evaluated plans, and plans with other stages that are close to it by their estimates."""

    assignment: Assignment
    evaluation: Evaluation
    closed_form_ns: int
    evaluated_plans: int
    close_plans: tuple[Assignment, ...] = ()


def refine_by_simulation(
    evaluator: PlanEvaluator,
    problem: Problem,
    best: Assignment,
    hand_out: Callable[[Assignment], GroupRanks],
    margin: float,
    others: Sequence[Assignment] = (),
) -> RefinedPlan:
    """Returns the best plan, by scheduled steps, among the solver's plan `best` and its neighbours.

    hand_out: returns the ranks of a plan's groups.
    margin: replicas of several ranks must be faster by more than this share.
    others: plans of another search, which this one goes on from if none of its own is better.
    """
    neighbourhood, first_plans = _solve_without_rounds(problem, best, margin)

    def evaluate_request(request: EvaluationRequest) -> Evaluation:
        a, ranks, batch = request
        return evaluator.estimate(a, ranks) if batch is None else evaluator.evaluate_batch(a, ranks, batch)

    with process_map.process_mapper(evaluate_request) as evaluate_in_parallel:

        def evaluate_here(requests: Sequence[BatchRequest]) -> list[Evaluation]:
            return evaluator.evaluate_once(
                [(a, hand_out(a), batch) for a, batch in requests], lambda new: [*map(evaluate_request, new)]
            )

        def evaluate_on_all_cores(requests: Sequence[BatchRequest]) -> list[Evaluation]:
            return evaluator.evaluate_once(
                [(a, hand_out(a), batch) for a, batch in requests], evaluate_in_parallel
            )

        return _LocalSearch(
            evaluator, problem, neighbourhood, margin, evaluate_here, evaluate_on_all_cores
        ).run(first_plans, others)


def _solve_without_rounds(
    problem: Problem, best: Assignment, margin: float
) -> tuple[Problem, list[Assignment]]:
    """(problem that neighbours come from, start plans): without choices that deliver in rounds and its best
    plan, where something fits without."""
    if problem.deadline is not None:
        return problem, [best]
    without_rounds = exclude_candidates(problem, _delivers_in_rounds)
    if not any(_delivers_in_rounds(problem.sections[s][i]) for s, i in best.choice.items()):
        return without_rounds, [best]
    solution = solve_allocation(without_rounds, margin=margin)
    return (problem, [best]) if solution is None else (without_rounds, [solution.assignment, best])


class _LocalSearch:
    """State of the search.

    evaluated: plans in the order of evaluation.
    estimates[plan]: result of the one-batch estimate.
    evaluations[plan]: results on the first batch, or on all.
    lighter_plans: number of plans estimated because their busiest ranks have less to do.
    plans_with_other_groups: number of plans estimated because they are a good one with other groups.
    plans_with_other_norms: number of plans estimated because they are a good one with other norms.
    promising: plans estimated because the model of steps expects them to be short.
    known: plans that it chooses from, with their steps by the closed forms.
    closed_forms_ns: steps by the closed forms, None for plans that violate a constraint.
    expanded: plans with neighbours that are among them.
    mixtures: sections that may divide experts.
    seeks_kinds: whether plans of other kinds are sought; a search that goes on from another one leaves them
      to it.
    sought_kinds: kinds of plans that are searched already: those of the best plans so far, and those with a
      best plan from which the search has tried neighbours.
    neighbourhood: the problem that new candidates come from.
    evaluate_here, evaluate_on_all_cores: run requests in this process, or on all cores.
    """

    def __init__(
        self,
        evaluator: PlanEvaluator,
        problem: Problem,
        neighbourhood: Problem,
        margin: float,
        evaluate_here: EvaluateRequests,
        evaluate_on_all_cores: EvaluateRequests,
    ) -> None:
        self.evaluator, self.problem, self.neighbourhood = evaluator, problem, neighbourhood
        self.margin = margin
        self.evaluate_here, self.evaluate_on_all_cores = evaluate_here, evaluate_on_all_cores
        self.evaluated: list[Assignment] = []
        self.estimates: dict[PlanKey, Evaluation] = {}
        self.evaluations: dict[PlanKey, list[Evaluation]] = {}
        self.lighter_plans = self.plans_with_other_groups = self.plans_with_other_norms = 0
        self.promising: list[Assignment] = []
        self.known: dict[PlanKey, tuple[Assignment, int]] = {}
        self.closed_forms_ns: dict[PlanKey, int | None] = {}
        self.expanded = set[PlanKey]()
        self.step_model = StepModel(problem)
        self.mixtures = sections_with_experts(neighbourhood)
        self.seeks_kinds, self.sought_kinds = False, set[PlanKind]()
        self.candidates_by_ranks = {
            s: _index_by_ranks(cs, neighbourhood != problem) for s, cs in problem.sections.items()
        }

    def run(self, best: Sequence[Assignment], others: Sequence[Assignment] = ()) -> RefinedPlan:
        """Runs the search from several plans. The first one is the best of the neighbourhood; `others` are
        those of other searches."""
        # With a deadline the objective is the number of devices, which the solver has already minimised.
        searches = self.problem.deadline is None
        other_starts = start_plans(self.neighbourhood, best[0], self.margin) if searches else ()
        starts = [*best, *map(self._shorten_waits, (*best, *other_starts) if searches else ())]
        self.seeks_kinds = searches and not others and bool(self.mixtures)
        if self.seeks_kinds:
            of_kinds = plans_of_kinds(self.neighbourhood, best[0], self.margin)
            starts += [self._shorten_waits(a, SMALL_SHARE) for a in of_kinds]
        if searches and others:
            dealt = plans_with_dealt_samples(self.neighbourhood, best[0], self.margin)
            starts += [self._shorten_waits(a, SMALL_SHARE) for a in dealt]
        self._estimate_plans([*{_plan_key(a): a for a in (*starts, *others)}.values()])
        shortest = self._select_best()
        while True:
            if searches and self._may_evaluate():
                self._estimate_plans(self._affordable(self._untried_neighbours(shortest)))
            challenger = self._select_best()
            for estimate_more in (
                self._estimate_lighter_plans,
                self._estimate_other_groups,
                self._estimate_other_stages,
                self._estimate_other_norms,
                self._estimate_other_kinds,
                self._estimate_promising_plans,
            ):
                if challenger is shortest and searches and estimate_more(shortest):
                    challenger = self._select_best()
            if challenger is shortest:
                if self._confirm_on_all_batches(shortest):
                    return RefinedPlan(
                        shortest,
                        mean_evaluation(self.evaluations[_plan_key(shortest)]),
                        self._closed_form_ns(shortest),
                        len(self.estimates),
                        self._close_plans_with_stages(shortest),
                    )
                challenger = self._select_best()
            shortest = challenger

    def _close_plans_with_stages(self, shortest: Assignment) -> tuple[Assignment, ...]:
        """The best plans with a few other shapes, norms and micro-batches, of those with stages that are
        close to `shortest`."""

        def shapes_of(a: Assignment) -> tuple[tuple[int, int, int, int, str], ...]:
            chosen = [self.problem.sections[s][i] for s, i in a.choice.items()]
            return tuple((c.tp, c.pp, c.cp, c.micro_batch * (c.pp > 1), c.norms) for c in chosen)

        most = self._estimated_ns(shortest) * (1 + ESTIMATE_MARGIN)
        best = {shapes_of(shortest): shortest}
        for a in sorted(self.evaluated, key=self._estimated_ns):
            if (
                self._estimated_ns(a) <= most
                and self._fits_memory(a)
                and any(pp > 1 for _, pp, *_ in shapes_of(a))
            ):
                best.setdefault(shapes_of(a), a)
        close = [a for a in best.values() if a is not shortest][:MOST_CLOSE_PLANS]
        spent = accumulate(self.estimates[_plan_key(a)].tasks for a in close)
        return tuple(a for a, tasks in zip(close, spent, strict=True) if tasks <= MOST_CLOSE_TASKS)

    def _affordable(self, plans: Sequence[Assignment]) -> list[Assignment]:
        """The first plans, as far as their tasks and their number are within what is left of both budgets.
        As many as are within it if each has the tasks of the longest plan so far are in any case."""
        most = MAX_EVALUATED_PLANS + MORE_PLANS_WITH_KINDS * self.seeks_kinds - len(self.evaluated)
        first, left = plans[: max(0, min(NEIGHBOURS_AT_ONCE, most))], self._tasks_left()
        longest = max((evaluation.tasks for evaluation in self.estimates.values()), default=left + 1)
        sums = accumulate(map(self._expected_tasks, first))
        fitting = sum(tasks <= left for tasks in sums)
        return [*first[: max(fitting, left // max(1, longest))]]

    def _may_evaluate(self) -> bool:
        """Whether anything is left of both budgets."""
        most = MAX_EVALUATED_PLANS + MORE_PLANS_WITH_KINDS * self.seeks_kinds
        return len(self.evaluated) < most and self._tasks_left() > 0

    def _tasks_left(self) -> int:
        """What is left of the budget of tasks."""
        spent = sum(
            evaluation.tasks
            for evaluations in ([*self.estimates.values()], *self.evaluations.values())
            for evaluation in evaluations
        )
        budget = sorted((*TASK_BUDGET_RANGE, TASK_BUDGET_PER_SAMPLE * len(self.evaluator.batches[0])))[1]
        return budget - spent

    def _expected_tasks(self, a: Assignment) -> int:
        """Tasks of a plan's step: the forward, backward, and second part of a split one, of each micro-batch
        in each stage; the last stage of what nothing consumes does a forward and its backward at once."""
        tasks, consumed = 0, {e.src for e in self.problem.edges}
        for s, i in a.choice.items():
            c = self.problem.sections[s][i]
            tasks += c.micro_batches * c.dp * (c.shape.stages * (1 + c.backward_parts) - (s not in consumed))
        return tasks

    def _estimate_plans(self, plans: Sequence[Assignment]) -> None:
        """Adds plans with their estimates."""
        self.evaluated += plans
        self.estimates |= zip(
            map(_plan_key, plans), self._evaluate_requests([(a, None) for a in plans]), strict=True
        )

    def _evaluate_plans(self, plans: Sequence[Assignment], count: int) -> None:
        """Evaluates plans on the first `count` batches, unless that was done before."""
        requests = [(a, i) for a in plans for i in range(len(self.evaluations.get(_plan_key(a), ())), count)]
        for (a, _), evaluation in zip(requests, self._evaluate_requests(requests), strict=True):
            self.evaluations.setdefault(_plan_key(a), []).append(evaluation)

    def _select_best(self) -> Assignment:
        """The best plan so far. A plan that is far ahead of all others is taken for the best without
        evaluation."""
        close = self._within_margin(self.evaluated, lambda key: self.estimates[key], ESTIMATE_MARGIN)
        if len(close) > 1:
            self._evaluate_plans(close := self._limit_evaluations(close, 1), 1)
            close = self._within_margin(close, lambda key: self.evaluations[key][0], FIRST_BATCH_MARGIN)
        every = len(self.evaluator.batches)
        for count in dict.fromkeys((min(2, every), every)):
            if len(close) == 1 or not self._fits_memory(close[0]):
                break
            self._evaluate_plans(close := self._limit_evaluations(close, count), count)
            close = self._within_margin(
                close,
                lambda key, count=count: mean_evaluation(self.evaluations[key][:count]),
                FIRST_BATCH_MARGIN / 2,
            )
        best = min(close, key=self._score_evaluated) if len(close) > 1 else close[0]
        # Evaluation may have shown that the best plan exceeds memory on a later batch. It then no longer
        # counts, so the selection is repeated; each repetition evaluates at least one more plan.
        return (
            best
            if self._fits_memory(best) or not any(map(self._fits_memory, self.evaluated))
            else self._select_best()
        )

    def _confirm_on_all_batches(self, a: Assignment) -> bool:
        """Evaluates the best plan on all batches; whether it fits there, or no plan fits."""
        self._evaluate_plans([a], len(self.evaluator.batches))
        return self._fits_memory(a) or not any(map(self._fits_memory, self.evaluated))

    def _fits_memory(self, a: Assignment) -> bool:
        """Whether a plan fits on all batches where it was evaluated."""
        return all(
            evaluation.fits
            for evaluation in (self.estimates[_plan_key(a)], *self.evaluations.get(_plan_key(a), ()))
        )

    def _within_margin(
        self, plans: Sequence[Assignment], step: Callable[[PlanKey], Evaluation], share: float
    ) -> Sequence[Assignment]:
        """Plans that fit and take at most `share` longer than the shortest of them, shortest first; all
        plans if none fits."""
        fitting = sorted(
            ((step(_plan_key(a)).time_ns, i, a) for i, a in enumerate(plans) if self._fits_memory(a)),
            key=lambda x: x[:2],
        )
        return [a for time, _, a in fitting if time <= fitting[0][0] * (1 + share)] or plans

    def _limit_evaluations(self, plans: Sequence[Assignment], count: int) -> list[Assignment]:
        """Plans that were already evaluated on `count` batches, and a few more: many differ hardly."""
        is_evaluated = [len(self.evaluations.get(_plan_key(a), ())) >= count for a in plans]
        return [
            *compress(plans, is_evaluated),
            *islice(
                (a for a, done in zip(plans, is_evaluated, strict=True) if not done), FULL_EVALUATIONS_AT_ONCE
            ),
        ]

    def _evaluate_requests(self, requests: Sequence[BatchRequest]) -> list[Evaluation]:
        """Evaluates requests, on all cores if their schedules have enough tasks."""
        most_tasks = max(
            (evaluation.tasks for evaluation in self.estimates.values()),
            default=2 * len(self.evaluator.batches[0]) * len(self.candidates_by_ranks),
        )
        tasks = most_tasks * len(requests) + sum(
            expect_searched_tasks(self.estimates[_plan_key(a)]) for a, batch in requests if batch is not None
        )
        return (
            self.evaluate_on_all_cores(requests)
            if tasks >= MIN_PARALLEL_TASKS
            else self.evaluate_here(requests)
        )

    # -- what a plan is worth

    def _score_evaluated(self, a: Assignment) -> tuple[bool, int, int]:
        """Sort key of evaluated plans: fits, shorter step (rounded to the resolution), plainer plan."""
        evaluation = mean_evaluation(self.evaluations[_plan_key(a)])
        chosen = [self.problem.sections[s][i] for s, i in a.choice.items()]
        has_wide_replicas = any(c.width for c in chosen)
        return (
            not evaluation.fits,
            round(evaluation.time_ns * (1 + self.margin * has_wide_replicas) / self._step_resolution_ns),
            sum(c.extras for c in chosen),
        )

    def _closed_form_ns(self, a: Assignment) -> int:
        """Step time by the closed forms. Raises ValueError for a plan that violates a constraint."""
        if (closed_form_ns := self._closed_form_if_feasible(a)) is None:
            raise ValueError("the plan violates a constraint")
        return closed_form_ns

    def _closed_form_if_feasible(self, a: Assignment) -> int | None:
        """Step time by the closed forms (memoised), None for a plan that violates a constraint. Neighbours
        of similar plans are mostly the same."""
        key = _plan_key(a)
        if key not in self.closed_forms_ns:
            try:
                self.closed_forms_ns[key] = evaluate_assignment(self.problem, a).time_ns
            except ValueError:
                self.closed_forms_ns[key] = None
        return self.closed_forms_ns[key]

    @cached_property
    def _step_resolution_ns(self) -> int:
        """Steps that differ by less than this count as equal."""
        return max(1, self.estimates[_plan_key(self.evaluated[0])].time_ns // STEP_RESOLUTION)

    def _closed_form_rank(self, a: Assignment) -> tuple[int, int, int]:
        """Sort key of plans that are not evaluated (lower is better): predicted step, then rounds of the
        in-flight budget, then fill and drain time; scheduled steps pay for both more than closed forms
        say."""
        chosen = [self.problem.sections[s][i] for s, i in a.choice.items()]
        return (
            self._closed_form_ns(a) // self._step_resolution_ns,
            max(c.rounds for c in chosen),
            sum(c.fill_ns + c.drain_ns for c in chosen),
        )

    def _shorten_waits(self, a: Assignment, share: float = 1 / STEP_RESOLUTION) -> Assignment:
        """A start plan with other micro-batches and memory for sections that closed forms do not put on the
        critical path: as short by them, up to a `share` of the step, and with the shortest fill and drain
        times.

        Closed forms leave such choices open, and scheduled steps do not: large micro-batches of an encoder
        that has just enough ranks keep its consumers waiting.
        """
        resolution = max(1, int(self._closed_form_ns(a) * share))

        def rank(option: Assignment) -> tuple[int, int, int]:
            chosen = [self.problem.sections[s][i] for s, i in option.choice.items()]
            waits = sum(c.fill_ns + c.drain_ns for c in chosen)
            return self._closed_form_ns(option) // resolution, max(c.rounds for c in chosen), waits

        for s, i in a.choice.items():
            own = self.problem.sections[s][i]
            options = [
                a.with_choice(s, k)
                for k in self.candidates_by_ranks[s].get(own.ranks, ())
                if self.problem.sections[s][k].shape == own.shape
            ]
            a = min([a, *(o for o in options if self._is_feasible(o))], key=rank)
        return a

    def _is_feasible(self, a: Assignment) -> bool:
        return self._closed_form_if_feasible(a) is not None

    # -- plans near it

    def _untried_neighbours(self, shortest: Assignment) -> list[Assignment]:
        """New neighbours of a plan, the most promising first."""
        new = {_plan_key(a): a for a in self._neighbour_plans(shortest) if _plan_key(a) not in self.estimates}
        most = self._longest_closed_form(shortest)
        return self._diversify_plans(
            sorted((a for a in new.values() if self._closed_form_ns(a) <= most), key=self._closed_form_rank),
            shortest,
        )

    def _longest_closed_form(self, origin: Assignment) -> float:
        """The longest step in ns by closed forms with which a plan near `origin` is estimated."""
        return self._closed_form_ns(origin) + CLOSED_FORM_MARGIN * self._estimated_ns(origin)

    def _estimate_lighter_plans(self, shortest: Assignment) -> bool:
        """Estimates plans near the best one in which the busiest ranks have less to do, the lightest first.
        Returns whether there are any that were not tried."""
        most = min(LIGHTER_PLANS_AT_ONCE, MOST_LIGHTER_PLANS - self.lighter_plans)
        self._estimate_plans(plans := self._lighter_plans(shortest)[:most] if most > 0 else [])
        self.lighter_plans += len(plans)
        return bool(plans)

    def _lighter_plans(self, origin: Assignment) -> list[Assignment]:
        """New plans near `origin` in which the busiest ranks have less to do, the lightest first."""
        own, loads = self._expected_load(origin, origin), dict[PlanKey, tuple[int, Assignment]]()
        for a in self._plans_with_moved_ranks(origin):
            key, load = _plan_key(a), self._expected_load(a, origin)
            if load < own and key not in self.estimates:
                loads[key] = load, a
        lighter = sorted(loads.values(), key=lambda found: (found[0], *self._closed_form_rank(found[1])))
        return [a for _, a in lighter]

    def _estimate_other_groups(self, shortest: Assignment) -> bool:
        """Estimates plans in which two groups of the best one share their ranks, or a section leaves its
        group with some of the ranks, the best ones by closed forms. Returns whether there are any that were
        not tried."""
        most = MOST_PLANS_WITH_OTHER_GROUPS - self.plans_with_other_groups
        if self.problem.strategy != "auto" or most <= 0:
            return False
        longest = self._longest_closed_form(shortest)
        new = {
            _plan_key(a): a
            for a in self._plans_with_other_groups(shortest)
            if _plan_key(a) not in self.estimates and self._closed_form_ns(a) <= longest
        }
        plans = sorted(new.values(), key=self._closed_form_rank)[:most]
        self._estimate_plans(plans)
        self.plans_with_other_groups += len(plans)
        return bool(plans)

    def _plans_with_other_groups(self, a: Assignment) -> Iterator[Assignment]:
        """Yields plans in which two groups share their ranks, and plans in which a section leaves its group
        with as many of the ranks as suit its part of the work, all with short waits."""
        chosen = {s: self.problem.sections[s][i] for s, i in a.choice.items()}
        members = {g: [s for s in a.group if a.group[s] == g] for g in a.group.values()}
        for g, h in combinations(members, 2):
            together = [*members[g], *members[h]]
            ranks = dict.fromkeys(together, chosen[g].ranks + chosen[h].ranks)
            yield from self._regroup(a, [together], ranks)
        for g, sections in members.items():
            for s in sections if len(sections) > 1 else ():
                others = [o for o in sections if o != s]
                own, rest = chosen[s].busy_ns, sum(chosen[o].busy_ns for o in others)
                counts = [n for n in self.candidates_by_ranks[s] if n < chosen[g].ranks]
                if counts:
                    n = min(counts, key=lambda n: max(own / n, rest / (chosen[g].ranks - n)))
                    left = dict.fromkeys(others, chosen[g].ranks - n)
                    yield from self._regroup(a, [[s], others], {s: n} | left)

    def _regroup(
        self, a: Assignment, groups: Sequence[Sequence[str]], ranks: Mapping[str, int]
    ) -> Iterator[Assignment]:
        """Yields the plan with these groups of sections on `ranks` ranks in which they take least time, with
        short waits, if one is possible; other sections stay as they are in `a`. Closed forms alone would
        leave open what sections do on ranks that have time left."""
        names = {s: min(group, key=[*a.group].index) for group in groups for s in group}
        regrouped = replace(a, group={s: names.get(s, g) for s, g in a.group.items()})
        fastest = {
            s: sorted(
                self.candidates_by_ranks[s].get(n, ()), key=lambda i: self.problem.sections[s][i].time_ns
            )
            for s, n in ranks.items()
        }
        options = product(*(found[:FASTEST_REGROUPED] for found in fastest.values()))
        plans = (
            replace(regrouped, choice={**a.choice, **dict(zip(ranks, found, strict=True))})
            for found in options
        )
        feasible = (p for p in self._sort_by_section_time(plans) if self._is_feasible(p))
        yield from (self._shorten_waits(p, SMALL_SHARE) for p in islice(feasible, 1))

    def _estimate_other_stages(self, shortest: Assignment) -> bool:
        """Estimates the best plan with other numbers of stages in its pipeline on most ranks, on as many
        ranks. Returns whether there are any that were not tried. Of pipelines with cp, plans without stages
        are starts already."""
        chosen = {s: self.problem.sections[s][i] for s, i in shortest.choice.items()}
        section = max((s for s, c in chosen.items() if c.pp > 1), key=lambda s: chosen[s].ranks, default="")
        if not section or chosen[section].cp > 1:
            return False
        own, best = chosen[section], dict[int, Assignment]()
        options = (
            shortest.with_choice(section, i)
            for i in self.candidates_by_ranks[section][own.ranks]
            if self.problem.sections[section][i].shape._replace(pp=own.pp, backward_parts=own.backward_parts)
            == own.shape
        )
        for a in self._feasible_plans(options):
            best.setdefault(self.problem.sections[section][a.choice[section]].pp, a)
        most = self._longest_closed_form(shortest)
        plans = [
            a
            for pp, a in best.items()
            if pp != own.pp and _plan_key(a) not in self.estimates and self._closed_form_ns(a) <= most
        ]
        self._estimate_plans(plans := plans[:MOST_PLANS_WITH_OTHER_STAGES])
        return bool(plans)

    def _estimate_other_norms(self, shortest: Assignment) -> bool:
        """Estimates the best plans, where no neighbour is better than `shortest`, with other norms in one
        section. Returns whether there are any that were not tried."""
        if (most := MOST_PLANS_WITH_OTHER_NORMS - self.plans_with_other_norms) <= 0:
            return False
        known = [a for a in self.evaluated if _plan_key(a) in self.evaluations and self._fits_memory(a)]
        close = [shortest, *(a for a in sorted(known, key=self._score_evaluated) if a is not shortest)]
        found = {
            _plan_key(b): b
            for a in close[:NORMS_OF_BEST]
            for s in a.choice
            if (b := self._with_other_norms(a, s)) is not None and _plan_key(b) not in self.estimates
        }
        self._estimate_plans(plans := [*found.values()][:most])
        self.plans_with_other_norms += len(plans)
        return bool(plans)

    def _estimate_other_kinds(self, shortest: Assignment) -> bool:
        """Estimates plans around the best one of each kind that the search has not come to, the best kinds
        first, until none of them is better. Returns whether there are any that were not tried."""
        if not self.seeks_kinds:
            return False
        before, own = len(self.evaluated), self._kinds_of(shortest)
        kinds = {kind for a in self.evaluated for kind in self._kinds_of(a)} - own - self.sought_kinds
        best = {kind: found for kind in kinds if (found := self._best_of_kind(kind)) is not None}
        self.sought_kinds |= own | kinds
        for kind in sorted(best, key=lambda k: (self._estimated_ns(best[k]), k)):
            for _ in range(MOST_ROUNDS_OF_KIND):
                found = self._best_of_kind(kind) or best[kind]
                if self._estimated_ns(found) > self._estimated_ns(shortest) * (1 + KIND_MARGIN):
                    break
                near = self._untried_neighbours(found)[:NEIGHBOURS_OF_KIND] + self._lighter_plans(found)
                near = [*{_plan_key(a): a for a in near if kind in self._kinds_of(a)}.values()]
                self._estimate_plans(self._affordable(near))
                now = self._best_of_kind(kind)
                if now is None or now is found or not self._fits_memory(now):
                    break
        return len(self.evaluated) > before

    def _estimate_promising_plans(self, shortest: Assignment) -> bool:
        """Estimates neighbours of good plans, the most promising first by the model of steps, until one is
        clearly shorter than the best plan. Only then it counts as evaluated, since later choices change steps
        by some percent. Returns whether there is one."""
        best_ns = self._estimated_ns(shortest)
        good = (a for a in self.evaluated if self._estimated_ns(a) <= best_ns * (1 + PROMISING_MARGIN))
        for a in good:
            if _plan_key(a) not in self.expanded:
                self.expanded.add(_plan_key(a))
                self.known |= self._changed_plans(a)
        longest = self._longest_closed_form(shortest)
        while self._may_try_promising():
            near = [x for key, x in self.known.items() if key not in self.estimates and x[1] <= longest]
            if not near:
                break
            tried = [*{_plan_key(a): a for a in (*self.evaluated, *self.promising)}.values()]
            plans = self.step_model.choose_promising(
                tried,
                [self._estimated_ns(a) / self._closed_form_ns(a) for a in tried],
                [a for a, _ in near],
                [closed_form_ns for _, closed_form_ns in near],
                PROMISING_AT_ONCE,
            )
            evaluations = self._evaluate_requests([(a, None) for a in plans])
            self.estimates |= zip(map(_plan_key, plans), evaluations, strict=True)
            self.promising += plans
            most = best_ns * (1 - PROMISING_GAIN)
            shorter = [a for a in plans if self._fits_memory(a) and self._estimated_ns(a) < most]
            self.evaluated += shorter
            if shorter:
                return True
        return False

    def _changed_plans(self, origin: Assignment) -> dict[PlanKey, tuple[Assignment, int]]:
        """New plans in which one section is any other candidate on as many ranks, or ranks are moved, with
        their steps by the closed forms."""
        found = dict[PlanKey, tuple[Assignment, int]]()
        changed = (
            origin.with_choice(s, k)
            for s, i in origin.choice.items()
            for k in self.candidates_by_ranks[s][self.problem.sections[s][i].ranks]
        )
        for a in (*changed, *self._plans_with_moved_ranks(origin)):
            key = _plan_key(a)
            if key not in self.known and key not in found:
                closed_form_ns = self._closed_form_if_feasible(a)
                if closed_form_ns is not None:
                    found[key] = a, closed_form_ns
        return found

    def _may_try_promising(self) -> bool:
        """Whether anything is left of the budgets of promising plans."""
        tasks = sum(self.estimates[_plan_key(a)].tasks for a in self.promising)
        return len(self.promising) < MOST_PROMISING_PLANS and tasks < MOST_PROMISING_TASKS

    def _kinds_of(self, a: Assignment) -> set[PlanKind]:
        """Into how many parts a plan divides the experts of each mixture, and in how many stages it runs."""
        chosen = {s: self.problem.sections[s][a.choice[s]] for s in self.mixtures}
        return {(s, key, n) for s, c in chosen.items() for key, n in (("ep", c.ep), ("pp", c.pp))}

    def _best_of_kind(self, kind: PlanKind) -> Assignment | None:
        """The plan of a kind with the shortest estimate, one that fits if there is one."""
        known = [a for a in self.evaluated if kind in self._kinds_of(a)]
        return min(known, key=lambda a: (not self._fits_memory(a), self._estimated_ns(a)), default=None)

    def _estimated_ns(self, a: Assignment) -> int:
        return self.estimates[_plan_key(a)].time_ns

    def _with_other_norms(self, a: Assignment, section: str) -> Assignment | None:
        """The best plan by closed forms that differs in the norms of a section and not in its shape, None if
        there is none."""
        options = (
            a.with_choice(section, i)
            for i in self.candidates_by_ranks[section][self._parallel_shape(a, section)[-1]]
        )
        alike = (
            o
            for o in options
            if self._norms(o, section) != self._norms(a, section)
            and self._parallel_shape(o, section) == self._parallel_shape(a, section)
        )
        return next(iter(self._feasible_plans(alike)), None)

    def _expected_load(self, a: Assignment, origin: Assignment) -> int:
        """How long the busiest ranks of plan `a` compute, in units of 1/LOAD_RESOLUTION of the estimated step
        of plan `origin`. The schedule of `origin` gives the load of each section, and the closed forms give
        how it changes from there to `a`."""
        evaluation = self.estimates[_plan_key(origin)]
        loads = Counter[str]()
        for s, i in a.choice.items():
            before = self.problem.sections[s][origin.choice[s]]
            after = self.problem.sections[s][i]
            loads[a.group[s]] += evaluation.busy_ns.get(s, 0) * after.busy_ns // max(1, before.busy_ns)
        return max(loads.values(), default=0) * LOAD_RESOLUTION // max(1, evaluation.time_ns)

    def _plans_with_moved_ranks(self, a: Assignment) -> Iterator[Assignment]:
        """Yields plans in which a group has more ranks and another one as many as are left, both with short
        waits."""
        ranks = {g: self.problem.sections[g][a.choice[g]].ranks for g in a.group.values()}
        idle = self.problem.ranks - sum(ranks.values())
        for g, shift in product(ranks, RANK_COUNT_SHIFTS):
            if not (more := self._shifted_rank_count(g, ranks[g], shift)):
                continue
            for h in ranks:
                left = ranks[h] + idle - (more - ranks[g])
                fewer = more if h == g else self._largest_rank_count(h, min(left, ranks[h]), a.choice[h])
                if fewer and (h != g or more - ranks[g] <= idle):
                    changed = {
                        s: more if a.group[s] == g else fewer for s in a.choice if a.group[s] in (g, h)
                    }
                    yield from map(self._shorten_waits, self._best_variants(a, changed, VARIANTS_PER_SECTION))

    def _largest_rank_count(self, section: str, most: int, now: int) -> int | None:
        """The largest number of ranks, up to `most`, that a section may have in replicas of the same shape as
        candidate `now`, else in any; None if there is none."""
        candidates, shape = self.problem.sections[section], self.problem.sections[section][now].shape
        counts = {n: found for n, found in self.candidates_by_ranks[section].items() if found and n <= most}
        alike = [n for n, found in counts.items() if any(candidates[i].shape == shape for i in found)]
        return max(alike or counts, default=None)

    def _neighbour_plans(self, a: Assignment) -> Iterator[Assignment]:
        """Yields plans that differ in one section's candidate, or in the number of ranks of one or two
        groups."""
        ranks = {g: self.problem.sections[g][a.choice[g]].ranks for g in a.group.values()}
        for s in a.choice:
            yield from self._best_variants(a, {s: ranks[a.group[s]]}, VARIANTS_PER_SECTION)
        for g, h in product(ranks, ranks):
            for shift in RANK_COUNT_SHIFTS if g != h else ():
                more = self._shifted_rank_count(g, ranks[g], shift)
                fewer = self._shifted_rank_count(h, ranks[h], -shift)
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
        """Returns the number of ranks `shift` steps above or below `ranks` in the sorted numbers that a
        section may have, None beyond the ends."""
        counts = sorted(self.candidates_by_ranks[section])
        at = counts.index(ranks) + shift
        return counts[at] if 0 <= at < len(counts) else None

    def _best_variants(self, a: Assignment, ranks: Mapping[str, int], most: int) -> list[Assignment]:
        """At most `most` plans with other candidates for the sections in `ranks`, on as many ranks as it
        says; best first by the closed forms."""
        variants = [a]
        for s, count in ranks.items():
            options = (
                b.with_choice(s, i) for b in variants for i in self.candidates_by_ranks[s].get(count, ())
            )
            unfinished = s != list(ranks)[-1]
            variants = (
                self._sort_by_section_time(options)[:most]
                if unfinished
                else self._diversify_plans(self._feasible_plans(options), a, most)
            )
        return variants

    def _diversify_plans(
        self, plans: Sequence[Assignment], a: Assignment, most: int | None = None
    ) -> list[Assignment]:
        """Reorders plans such that the first plan that changes some sections comes before the second that
        changes the same ones. Returns the first `most` of them, by default all.

        Without this, many plans that differ from `a` in minor choices would use up the evaluations. Plans
        that change only norms, micro-batches or memory count as second; of these, norms are a kind of their
        own.
        """
        count_of_kind = Counter[object]()
        order, first_of_kinds = list[int](), list[Assignment]()
        for plan in plans:
            changed = [s for s, i in plan.choice.items() if i != a.choice[s]]
            same_shapes = all(self._parallel_shape(plan, s) == self._parallel_shape(a, s) for s in changed)
            same_norms = all(self._norms(plan, s) == self._norms(a, s) for s in changed)
            kind = (
                same_shapes,
                same_shapes and same_norms,
                *((s, self._parallel_shape(plan, s)[-1]) for s in changed),
            )
            order.append(count_of_kind[kind] + same_shapes)
            count_of_kind[kind] += 1
            if not order[-1]:
                first_of_kinds.append(plan)
            if len(first_of_kinds) == most:
                return first_of_kinds  # none of the others can come before them
        return [plan for _, plan in sorted(zip(order, plans, strict=True), key=lambda p: p[0])][:most]

    def _parallel_shape(self, a: Assignment, section: str) -> tuple[int, int, int, int]:
        """(tp, pp, cp, ranks) of a section in a plan."""
        c = self.problem.sections[section][a.choice[section]]
        return c.tp, c.pp, c.cp, c.ranks

    def _norms(self, a: Assignment, section: str) -> str:
        return self.problem.sections[section][a.choice[section]].norms

    def _feasible_plans(self, options: Iterable[Assignment]) -> list[Assignment]:
        """Plans that violate no constraint, best first by the closed forms."""
        return sorted(filter(self._is_feasible, options), key=self._closed_form_rank)

    def _sort_by_section_time(self, options: Iterable[Assignment]) -> list[Assignment]:
        """Partly changed plans by the sum of their candidates' times; their groups may not match yet."""

        def total_ns(option: Assignment) -> int:
            chosen = {s: self.problem.sections[s][i] for s, i in option.choice.items()}
            ahead = groups_that_run_ahead(chosen, option.group)
            return sum(c.busy_ns if option.group[s] in ahead else c.time_ns for s, c in chosen.items())

        return sorted(options, key=total_ns)


def _delivers_in_rounds(c: Candidate) -> bool:
    return c.sharding == "zero3" or (c.in_flight == 0 and c.runs_in_lockstep and not c.runs_ahead)


def _plan_key(a: Assignment) -> PlanKey:
    return tuple(a.choice.values()), tuple(a.group.values())


def _index_by_ranks(candidates: Iterable[Candidate], plain: bool) -> dict[int, list[int]]:
    """Indices of candidates by number of ranks, with `plain` without those that deliver in rounds."""
    by_ranks: dict[int, list[int]] = {}
    for i, c in enumerate(candidates):
        by_ranks.setdefault(c.ranks, []).extend(() if plain and _delivers_in_rounds(c) else (i,))
    return by_ranks
