"""What the spread of samples adds to closed forms: nothing for equal samples, and waiting for the longest
otherwise."""

from __future__ import annotations

from dataclasses import replace

from secc.alloc.problem.build_problem import build_problem
from secc.alloc.problem.candidates import (
    SectionLoad,
    Workload,
    compute_rank_load,
    pipeline_bubble_ns,
    price_candidate,
)
from secc.alloc.problem.pins import parse_pins
from secc.alloc.problem.size_spread import PERMILLE, SizeSpread, measure_spread
from secc.alloc.problem.types import ReplicaShape
from secc.alloc.refine.schedule_evaluation import PlanEvaluator
from secc.alloc.solver.cpsat_model import solve_allocation
from secc.runtime.schedule.load_balance import assign_in_rounds
from secc.runtime.schedule.scheduler import find_candidate
from tests.alloc.refine.test_local_search import hand_out_ranks, vlm_problem


def language_model() -> tuple[Workload, SectionLoad]:
    work = vlm_problem()[2].work
    return work, work.loads["lm"]


def test_equal_samples_have_no_spread() -> None:
    even = SizeSpread((PERMILLE,) * 8)
    assert (even.longest_micro_batch(2), even.mean_round_maximum(4, 2, 1), even.replica_imbalance(4, 2)) == (
        PERMILLE,
        PERMILLE,
        PERMILLE,
    )
    assert SizeSpread().longest_micro_batch(1) == 0 and SizeSpread().mean_round_maximum(2, 2, 2) == PERMILLE


def test_rounds_take_as_long_as_their_longest() -> None:
    """Samples of 4, 2, 1, 1 on two replicas: rounds of (4, 2) and (1, 1)."""
    four = SizeSpread((2000, 1000, 500, 500))
    assert four.mean_round_maximum(2, 2, 1) == (2000 + 500) // 2
    assert four.longest_micro_batch(1) == 2000 and four.longest_micro_batch(2) == 1500


def test_the_mean_of_samples_is_more_than_the_mean_sample_where_time_grows_faster_than_size() -> None:
    work, own = language_model()
    assert own.spread.relative_times[0] > PERMILLE > own.spread.relative_times[-1]
    squares = measure_spread(work.graph, own.active_patterns, "S*S")
    assert all(squares.pattern_means[when] > own.spread.pattern_means[when] for when in squares.pattern_means)


def test_stages_wait_for_the_longest_micro_batch() -> None:
    work, own = language_model()
    staged = compute_rank_load(own, ReplicaShape(pp=2), work.cluster)
    even = replace(staged, spread=SizeSpread((PERMILLE,), own.spread.pattern_means))
    busy = (1000, 10, 40, 60)
    assert (
        pipeline_bubble_ns(even, 1, busy)
        == 100
        < pipeline_bubble_ns(staged, 1, busy)
        < 100 * staged.spread.relative_times[0] // PERMILLE
    )


def test_replicas_that_gather_wait_for_each_other() -> None:
    work, own = language_model()
    even = replace(own, spread=SizeSpread((PERMILLE,), own.spread.pattern_means))
    ragged, even_candidate = (price_candidate(work, each, 4, 1, "zero3") for each in (own, even))
    assert ragged.time_ns > even_candidate.time_ns


def test_scheduled_rounds_take_their_longest_micro_batch() -> None:
    work = vlm_problem()[2].work
    asked = build_problem(
        work, 4, "colocate", parse_pins(["lm.sharding=zero3", "lm.micro_batch=1"], work.loads)
    )
    solution, evaluator = solve_allocation(asked), PlanEvaluator(work, asked)
    assert solution is not None
    ranks = hand_out_ranks(asked, solution.assignment)
    chosen = {s: cs[solution.assignment.choice[s]] for s, cs in asked.sections.items()}
    plan = evaluator._build_plan(solution.assignment, chosen, ranks)  # pyright: ignore[reportPrivateUsage]
    ends = [find_candidate(plan, batch).makespan for batch in evaluator.batches]
    assert evaluator.evaluate(solution.assignment, ranks).time_ns >= sum(ends) // len(ends)


def test_similar_micro_batches_share_a_round() -> None:
    load: dict[int, int] = {0: 5}
    assert assign_in_rounds([9, 8, 3, 2], (0, 1), load, 2) == ([1, 0, 1, 0], 5 + 9 + 3)
    assert load == {0: 5 + 8 + 2, 1: 9 + 3}


def test_replicas_that_do_not_exchange_tokens_do_not_wait_for_each_other() -> None:
    """Two groups of two: the second one takes two rounds of short pieces while the first one has a long
    one."""
    load: dict[int, int] = {}
    owner, longest = assign_in_rounds([9, 8, 6, 4, 4, 3, 1], (0, 1, 2, 3), load, 2)
    assert owner == [0, 1, 2, 3, 3, 2, 1] and longest == 6 + 4
    assert load == {0: 9, 1: 8 + 1, 2: 6 + 3, 3: 4 + 4}
