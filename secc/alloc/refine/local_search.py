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
from secc.alloc.problem.candidate_pruning import IN_STEP
from secc.alloc.problem.closed_form import evaluate
from secc.alloc.problem.types import Assignment, Candidate, Problem
from secc.alloc.refine.schedule_evaluation import FEW_JOBS, Ranks, Trial, Tried, mean
from secc.alloc.refine.start_plans import starts, without
from secc.alloc.solver.cpsat_model import solve

MOST_TRIALS = 60
MOST_JOBS = (
    200_000,
    600_000,
    # forwards and backwards in the orders of all looks and trials, tens of microseconds each: at least, at most
)
JOBS_A_SAMPLE = 400  # of a batch, in between
CLOSE = 1 / 16  # a plan whose look takes longer than the best one's by more is not tried
CLOSER = 1 / 32  # a plan whose first batch takes longer than the best one's by more is not tried on others
BEHIND = (
    1 / 5
)  # of the step, the part by which closed forms may put a plan that is looked at behind the one it is near to
FEW = 3  # of those that are closer, how many are tried at once, and then on other batches
TRIED_AT_ONCE = 8  # neighbours of the best one, before the best of them goes on
ALIKE = 6  # ways to run one section on as many ranks, of those that the closed forms like best
ALIKE_STEPS = 1000  # steps that differ by less than one part in so many are about alike
SHIFTS = (1, 2, 4, 8)  # of the numbers of ranks that a group may have, how many up or down


Key = tuple[tuple[int, ...], tuple[str, ...]]
Wanted = tuple[Assignment, int | None]  # the step of a plan on a batch, or a look at it
Here = Callable[[Wanted], Tried]
Everywhere = Callable[[Sequence[Wanted]], list[Tried]]


@dataclass(frozen=True)
class Winner:
    """The plan with the shortest step, that step under the order and by the closed forms, and how many plans
    were tried."""

    assignment: Assignment
    tried: Tried
    closed_ns: int
    trials: int


def contest(
    trial: Trial,
    problem: Problem,
    best: Assignment,
    hand_out: Callable[[Assignment], Ranks],
    margin: float,
) -> Winner:
    """The best under the real order of the solver's plan `best` and those near it. `hand_out` gives the ranks
    of a plan's groups."""
    plain, firsts = _plain(problem, best, margin)

    def step(item: Wanted) -> Tried:
        a, batch = item
        ranks = hand_out(a)
        return trial.look(a, ranks) if batch is None else trial.step(a, ranks, trial.batches[batch])

    with process_map.mapping(step) as steps:
        return _Contest(trial, problem, plain, margin, step, steps).run(firsts)


def _plain(problem: Problem, best: Assignment, margin: float) -> tuple[Problem, list[Assignment]]:
    """The problem without replicas in step, and its best plan before that of the whole one; the problem
    itself where nothing else fits."""
    if problem.deadline is not None:
        return problem, [best]
    plain = without(problem, _in_step)
    if not any(_in_step(problem.sections[s][i]) for s, i in best.choice.items()):
        return plain, [best]
    found = solve(plain, margin=margin)
    return (problem, [best]) if found is None else (plain, [found.assignment, best])


class _Contest:
    """`plans` are those that were looked at, `looks` what they took then, `steps` what on the first batch, or
    on all. Plans of `plain` are sought. `here` gives a step that is wanted, `everywhere` several, on all
    cores."""

    def __init__(
        self,
        trial: Trial,
        problem: Problem,
        plain: Problem,
        margin: float,
        here: Here,
        everywhere: Everywhere,
    ) -> None:
        self.trial, self.problem, self.plain, self.margin, self.here, self.everywhere = (
            trial,
            problem,
            plain,
            margin,
            here,
            everywhere,
        )
        self.plans: list[Assignment] = []
        self.looks: dict[Key, Tried] = {}
        self.steps: dict[Key, list[Tried]] = {}
        self.by_ranks = {s: _by_ranks(cs, plain != problem) for s, cs in problem.sections.items()}

    def run(self, best: Sequence[Assignment]) -> Winner:
        free = (
            self.problem.deadline is None
        )  # with a deadline the fewest devices are wanted, and the solver has them
        others = starts(self.plain, best[0], self.margin) if free else ()
        self._look([*{_key(a): a for a in (*best, *others)}.values()])
        shortest = self._shortest()
        while True:
            if free and (left := self._left()):
                self._look(self._near(shortest)[: min(TRIED_AT_ONCE, left)])
            challenger = self._shortest()
            if challenger is shortest:
                if self._settled(shortest):
                    return Winner(
                        shortest, mean(self.steps[_key(shortest)]), self._closed(shortest), len(self.plans)
                    )
                challenger = self._shortest()
            shortest = challenger

    def _left(self) -> int:
        """How many more plans may be tried."""
        jobs = sum(tried.jobs for some in ([*self.looks.values()], *self.steps.values()) for tried in some)
        longest = max(tried.jobs for tried in self.looks.values())
        most = sorted((*MOST_JOBS, JOBS_A_SAMPLE * len(self.trial.batches[0])))[1]
        return max(0, min(MOST_TRIALS - len(self.plans), (most - jobs) // max(1, longest)))

    def _look(self, plans: Sequence[Assignment]) -> None:
        self.plans += plans
        self.looks |= zip(map(_key, plans), self._run([(a, None) for a in plans]), strict=True)

    def _try(self, plans: Sequence[Assignment], count: int) -> None:
        """Plans on the first batches, so many."""
        wanted = [(a, i) for a in plans for i in range(len(self.steps.get(_key(a), ())), count)]
        for (a, _), tried in zip(wanted, self._run(wanted), strict=True):
            self.steps.setdefault(_key(a), []).append(tried)

    def _shortest(self) -> Assignment:
        """The best plan of those that were looked at. What is far ahead of all others is taken for the best
        without being tried."""
        close = self._close(self.plans, lambda key: self.looks[key], CLOSE)
        if len(close) > 1:
            self._try(close := self._few(close, 1), 1)
            close = self._close(close, lambda key: self.steps[key][0], CLOSER)
        if len(close) > 1 and self._fits(close[0]):
            self._try(close := self._few(close, len(self.trial.batches)), len(self.trial.batches))
        best = min(close, key=self._score) if len(close) > 1 else close[0]
        return best if self._fits(best) or not any(map(self._fits, self.plans)) else self._shortest()

    def _settled(self, a: Assignment) -> bool:
        """Whether the best plan fits on all batches, or none does."""
        self._try([a], len(self.trial.batches))
        return self._fits(a) or not any(map(self._fits, self.plans))

    def _fits(self, a: Assignment) -> bool:
        return all(tried.fits for tried in (self.looks[_key(a)], *self.steps.get(_key(a), ())))

    def _close(
        self, plans: Sequence[Assignment], step: Callable[[Key], Tried], share: float
    ) -> Sequence[Assignment]:
        """Those of the plans that take no longer than the shortest by more than a share, or all where none
        fits."""
        fitting = sorted(
            ((step(_key(a)).time_ns, i, a) for i, a in enumerate(plans) if self._fits(a)), key=lambda x: x[:2]
        )
        return [a for time, _, a in fitting if time <= fitting[0][0] * (1 + share)] or plans

    def _few(self, plans: Sequence[Assignment], count: int) -> list[Assignment]:
        """Those of the plans that were tried on so many batches, and a few of the others: many are hardly
        different."""
        tried = [len(self.steps.get(_key(a), ())) >= count for a in plans]
        return [
            *compress(plans, tried),
            *islice((a for a, known in zip(plans, tried, strict=True) if not known), FEW),
        ]

    def _run(self, wanted: Sequence[Wanted]) -> list[Tried]:
        """The steps of plans on batches, or looks at them: on all cores where the orders have enough jobs
        together."""
        jobs = max(
            (tried.jobs for tried in self.looks.values()),
            default=2 * len(self.trial.batches[0]) * len(self.by_ranks),
        )
        return self.everywhere(wanted) if jobs * len(wanted) >= FEW_JOBS else [*map(self.here, wanted)]

    # -- what a plan is worth
    # -----------------------------------------------------------------------------------------------------

    def _score(self, a: Assignment) -> tuple[bool, int, int]:
        """Less is better: what fits, the shorter step, the plainer plan. Steps that are about alike count as
        equal."""
        tried, chosen = mean(self.steps[_key(a)]), [self.problem.sections[s][i] for s, i in a.choice.items()]
        wide = any(c.width for c in chosen)
        return (
            not tried.fits,
            round(tried.time_ns * (1 + self.margin * wide) / self._step),
            sum(c.extras for c in chosen),
        )

    def _closed(self, a: Assignment) -> int:
        return evaluate(self.problem, a).time_ns

    @cached_property
    def _step(self) -> int:
        """What makes a difference, ns."""
        return max(1, self.looks[_key(self.plans[0])].time_ns // ALIKE_STEPS)

    def _promise(self, a: Assignment) -> tuple[int, int, int]:
        """Of closed forms the less the better: the step and, where steps are about alike, the rounds in which
        places in flight are taken, and how long a sample is under way; what both cost in a real order is more
        than they say."""
        chosen = [self.problem.sections[s][i] for s, i in a.choice.items()]
        return (
            self._closed(a) // self._step,
            max(c.rounds for c in chosen),
            sum(c.fill_ns + c.drain_ns for c in chosen),
        )

    # -- plans near it
    # ------------------------------------------------------------------------------------------------------------

    def _near(self, shortest: Assignment) -> list[Assignment]:
        """The plans near it that nobody looked at, those first that are worth most."""
        new = {_key(a): a for a in self._neighbours(shortest) if _key(a) not in self.looks}
        most = self._closed(shortest) + BEHIND * self.looks[_key(shortest)].time_ns
        return self._varied(
            sorted((a for a in new.values() if self._closed(a) <= most), key=self._promise), shortest
        )

    def _neighbours(self, a: Assignment) -> Iterator[Assignment]:
        ranks = {g: self.problem.sections[g][a.choice[g]].ranks for g in a.group.values()}
        for s in a.choice:
            yield from self._best(a, {s: ranks[a.group[s]]}, ALIKE)
        for g, h in product(ranks, ranks):
            for shift in SHIFTS if g != h else ():
                more, fewer = self._beside(g, ranks[g], shift), self._beside(h, ranks[h], -shift)
                if more and fewer:
                    changed = {
                        s: more if a.group[s] == g else fewer for s in a.choice if a.group[s] in (g, h)
                    }
                    yield from self._best(a, changed, 1)
        idle = self.problem.ranks - sum(ranks.values())
        for g, shift in product(ranks, SHIFTS if idle else ()):
            if (more := self._beside(g, ranks[g], shift)) and more - ranks[g] <= idle:
                yield from self._best(a, {s: more for s in a.choice if a.group[s] == g}, ALIKE)

    def _beside(self, section: str, ranks: int, shift: int) -> int | None:
        """The number of ranks so many steps up or down of those that a section may have."""
        counts = sorted(self.by_ranks[section])
        at = counts.index(ranks) + shift
        return counts[at] if 0 <= at < len(counts) else None

    def _best(self, a: Assignment, ranks: Mapping[str, int], most: int) -> list[Assignment]:
        """The plans with other candidates on so many ranks for some sections, one after the other; best first
        by the closed forms."""
        found = [a]
        for s, count in ranks.items():
            options = (
                replace(b, choice={**b.choice, s: i}) for b in found for i in self.by_ranks[s].get(count, ())
            )
            partial = s != list(ranks)[-1]
            found = list(
                islice(self._varied(self._legal(options), a) if not partial else self._fast(options), most)
            )
        return found

    def _varied(self, plans: Sequence[Assignment], a: Assignment) -> list[Assignment]:
        """The plans, the first that changes some sections before the second that changes the same ones: many
        that differ from `a` in what hardly matters would keep others from being tried. Micro-batches and
        memory alone count as second."""
        seen = Counter[object]()
        places: list[int] = []
        for plan in plans:
            changed = [s for s, i in plan.choice.items() if i != a.choice[s]]
            alike = all(self._shape(plan, s) == self._shape(a, s) for s in changed)
            kind = alike, *((s, self._shape(plan, s)[-1]) for s in changed)
            places.append(seen[kind] + alike)
            seen[kind] += 1
        return [plan for _, plan in sorted(zip(places, plans, strict=True), key=lambda p: p[0])]

    def _shape(self, a: Assignment, section: str) -> tuple[int, int, int]:
        c = self.problem.sections[section][a.choice[section]]
        return c.tp, c.pp, c.ranks

    def _legal(self, options: Iterable[Assignment]) -> list[Assignment]:
        found: list[tuple[tuple[int, int, int], int, Assignment]] = []
        for i, option in enumerate(options):
            try:
                found.append((self._promise(option), i, option))
            except ValueError:
                continue
        return [option for _, _, option in sorted(found, key=lambda t: t[:2])]

    def _fast(self, options: Iterable[Assignment]) -> list[Assignment]:
        """Options of which other sections are not settled yet: those whose own candidates take the least
        time."""
        return sorted(
            options, key=lambda o: sum(self.problem.sections[s][i].time_ns for s, i in o.choice.items())
        )


def _in_step(c: Candidate) -> bool:
    return c.sharding == IN_STEP


def _key(a: Assignment) -> Key:
    return tuple(a.choice.values()), tuple(a.group.values())


def _by_ranks(candidates: Iterable[Candidate], plain: bool) -> dict[int, list[int]]:
    """The places of the candidates on so many ranks; `plain`: of those that are not in step."""
    found: dict[int, list[int]] = {}
    for i, c in enumerate(candidates):
        found.setdefault(c.ranks, []).extend(() if plain and _in_step(c) else (i,))
    return found
