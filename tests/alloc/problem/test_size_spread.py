"""What the spread of samples adds to closed forms: nothing where samples are alike, and what waiting for the
longest takes where not."""

from __future__ import annotations

from dataclasses import replace

from secc.alloc.problem.build_problem import problem
from secc.alloc.problem.candidates import Load, Workload, bubbles_ns, candidate, on_rank
from secc.alloc.problem.pins import parse
from secc.alloc.problem.size_spread import WHOLE, Spread, spread
from secc.alloc.refine.schedule_evaluation import Trial
from secc.alloc.solver.cpsat_model import solve
from secc.runtime.schedule.load_balance import balance_rounds
from secc.runtime.schedule.scheduler import ordered
from tests.alloc.refine.test_local_search import handed, vlm


def language_model() -> tuple[Workload, Load]:
    work = vlm()[2].work
    return work, work.loads["lm"]


def test_alike_samples_have_no_spread() -> None:
    even = Spread((WHOLE,) * 8)
    assert (even.longest(2), even.in_rounds(4, 2, 1), even.uneven(4, 2)) == (WHOLE, WHOLE, WHOLE)
    assert Spread().longest(1) == 0 and Spread().in_rounds(2, 2, 2) == WHOLE


def test_rounds_take_as_long_as_their_longest() -> None:
    """Samples of 4, 2, 1, 1 on two replicas: rounds of (4, 2) and (1, 1)."""
    four = Spread((2000, 1000, 500, 500))
    assert four.in_rounds(2, 2, 1) == (2000 + 500) // 2
    assert four.longest(1) == 2000 and four.longest(2) == 1500


def test_the_mean_of_samples_is_more_than_the_mean_sample_where_time_grows_faster_than_size() -> None:
    work, own = language_model()
    assert own.spread.sorted[0] > WHOLE > own.spread.sorted[-1]
    squares = spread(work.graph, own.active, "S*S")
    assert all(squares.means[when] > own.spread.means[when] for when in squares.means)


def test_stages_wait_for_the_longest_micro_batch() -> None:
    work, own = language_model()
    staged = on_rank(own, 1, 2, work.cluster)
    even = replace(staged, spread=Spread((WHOLE,), own.spread.means))
    busy = (1000, 10, 40, 60)
    assert (
        bubbles_ns(even, 1, busy)
        == 100
        < bubbles_ns(staged, 1, busy)
        < 100 * staged.spread.sorted[0] // WHOLE
    )


def test_replicas_that_gather_wait_for_each_other() -> None:
    work, own = language_model()
    even = replace(own, spread=Spread((WHOLE,), own.spread.means))
    ragged, alike = (candidate(work, each, 4, 1, "zero3") for each in (own, even))
    assert ragged.time_ns > alike.time_ns


def test_a_trial_waits_for_the_longest_of_a_round() -> None:
    work = vlm()[2].work
    asked = problem(work, 4, "colocate", parse(["lm.sharding=zero3", "lm.micro_batch=1"], work.loads))
    solution, trial = solve(asked), Trial(work, asked)
    assert solution is not None
    ranks, chosen = (
        handed(asked, solution.assignment),
        {s: cs[solution.assignment.choice[s]] for s, cs in asked.sections.items()},
    )
    plan = trial._plan(solution.assignment, chosen, ranks)  # pyright: ignore[reportPrivateUsage]
    ends = [ordered(plan, batch).makespan for batch in trial.batches]
    assert trial.run(solution.assignment, ranks).time_ns >= sum(ends) // len(ends)


def test_rounds_are_dealt_alike_pieces() -> None:
    load: dict[int, int] = {0: 5}
    assert balance_rounds([9, 8, 3, 2], (0, 1), load) == [1, 0, 1, 0]
    assert load == {0: 5 + 8 + 2, 1: 9 + 3}
