"""What the spread of samples adds to closed forms: nothing for equal samples, and waiting for the longest
otherwise."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secc.alloc.problem.build_problem import build_problem
from secc.alloc.problem.candidates import price_candidate
from secc.alloc.problem.micro_batch_times import pipeline_bubble_ns
from secc.alloc.problem.parameter_update import exposed_sums_ns
from secc.alloc.problem.pins import parse_pins
from secc.alloc.problem.section_load import SectionLoad, compute_rank_load
from secc.alloc.problem.size_spread import PERMILLE, SizeSpread, measure_spread
from secc.alloc.problem.types import ReplicaShape
from secc.alloc.problem.workload import Workload
from secc.alloc.refine.schedule_evaluation import PlanEvaluator
from secc.alloc.solver.cpsat_model import solve_allocation
from secc.cost.model.tp_pp_scaling import (
    NO_ENDS,
    PARAMETER_COUNTS,
    PLACE_ERROR,
    StageShares,
    layers_at_even_cuts,
    stage_shares,
)
from secc.runtime.parameters.bucket_limits import BUCKET_BYTES
from secc.runtime.plan.expr_eval import evaluate_expr
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
        pipeline_bubble_ns(even, 1, busy, "none")
        == 100
        < pipeline_bubble_ns(staged, 1, busy, "none")
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


def test_stages_without_backward_wait_for_the_longest_micro_batch_alone() -> None:
    """Proportionate flow shop: three stages of jobs 4, 1, 1 take 6 + 2 * 4 in any order."""
    work, own = language_model()
    staged = replace(
        compute_rank_load(own, ReplicaShape(pp=3), work.cluster),
        mode="forward",
        spread=SizeSpread((2000, 500, 500)),
    )
    assert pipeline_bubble_ns(staged, 1, (6, 3, 2, 0), "none") == 2 * 4


def test_sums_of_gradients_hide_behind_the_last_backward_but_for_a_bucket() -> None:
    four = 4 * BUCKET_BYTES
    assert exposed_sums_ns(1000, four, 400) == 1000 - 300  # the first bucket is ready after a quarter
    assert exposed_sums_ns(1000, four, 4000) == 250  # the last one when the backward has ended
    assert exposed_sums_ns(1000, BUCKET_BYTES, 4000) == exposed_sums_ns(1000, 1, 4000) == 1000


def test_heads_make_the_last_stage_longer_and_give_its_layers_to_others() -> None:
    part, parts = Fraction(1, 16), (Fraction(1, 16),) * 16
    assert stage_shares(48, 16) == StageShares(part, parts, part, parts, parts, parts)
    heavy = stage_shares(48, 16, (Fraction(0), Fraction(1, 4)))
    assert (heavy.layers, heavy.times[-1], heavy.longest) == (Fraction(4, 48), Fraction(1, 4), Fraction(1, 4))
    some = stage_shares(8, 2, (Fraction(0), Fraction(1, 5)))  # a layer takes a tenth; 5 layers, or 3
    assert (some.layers, some.times) == (Fraction(5, 8), (Fraction(1, 2), Fraction(1, 2)))
    assert heavy.sum_over(250) == 1000
    assert stage_shares(8, 1, (Fraction(0), Fraction(1, 5))).longest == 1


def test_layers_at_cuts_are_those_in_which_even_stages_would_begin() -> None:
    assert layers_at_even_cuts(48, 16, NO_ENDS) == []
    assert layers_at_even_cuts(3, 2, NO_ENDS) == [1]
    assert layers_at_even_cuts(10, 4, NO_ENDS) == [2, 4, 5, 7]  # cuts after 2.5, 5 and 7.5 layers
    # 11 layers' time in three stages; the last cut would be in the head, a third of a layer behind the last.
    assert layers_at_even_cuts(7, 3, (Fraction(0), Fraction(4, 11))) == [3]


@given(st.integers(2, 60), st.integers(2, 8), st.integers(0, 300), st.integers(0, 300))
def test_layers_at_cuts_hold_the_ends_of_even_stages(layers: int, stages: int, first: int, last: int) -> None:
    ends = Fraction(first, 1000), Fraction(last, 1000)
    one = (1 - sum(ends)) / layers
    found = layers_at_even_cuts(layers, stages, ends)
    cuts = [Fraction(i, stages) for i in range(1, stages)]
    near = one * PLACE_ERROR
    assert all(
        any(ends[0] + i * one - near <= cut <= ends[0] + (i + 1) * one + near for cut in cuts) for i in found
    )
    if stages * stage_shares(layers, stages, ends).longest <= Fraction(51, 50):
        assert not found


def test_only_as_many_stages_have_a_layer_more_as_there_are_layers_over() -> None:
    """82 layers' time in 8 stages: seven of 10 layers and one of 10 with the head were 72 layers, so two more
    are left."""
    ends = Fraction(0), Fraction(24, 824)
    shares = stage_shares(80, 8, ends)
    in_layers = [time * 824 / 10 for time in shares.times]
    assert in_layers == [10, 10, 10, 10, 10, 11, 11, Fraction(104, 10)] and sum(shares.times) == 1
    assert shares.forward_of_stage("S", 0) == "(S)*10//11" and shares.backward_of_stage("S", 5) == "S"
    assert shares.sum_over(110) == 824


def test_a_head_that_computes_gradients_in_its_forward_makes_the_last_forward_longer() -> None:
    """The forward takes 12, with 4 in the head, and the backward 24, all of it in the layers."""
    none = Fraction(0)
    shares = stage_shares(8, 2, (none, Fraction(4, 36)), pass_ends=((none, Fraction(1, 3)), (none, none)))
    assert shares.held == (Fraction(1, 2), Fraction(1, 2)) and shares.longest == Fraction(20, 36)
    assert shares.forwards == (Fraction(1, 3), Fraction(2, 3))
    assert shares.backwards == (Fraction(1, 2), Fraction(1, 2))
    at = {"F": int(1_080_000 * shares.longest), "B": int(2_160_000 * shares.longest)}
    assert [evaluate_expr(shares.forward_of_stage("F", i), at) for i in (0, 1)] == [360_000, 720_000]
    assert [evaluate_expr(shares.backward_of_stage("B", i), at) for i in (0, 1)] == [1_080_000, 1_080_000]


def test_embeddings_are_in_the_first_stage() -> None:
    shares = stage_shares(10, 3, (Fraction(1, 6), Fraction(0)))  # a layer takes a twelfth
    assert [time * 12 for time in shares.times] == [4, 4, 4]


def test_ranks_with_several_stages_take_the_time_of_all_of_them() -> None:
    """A head of four layers' time: in a loop the last rank has it, in a V the first."""
    ends = Fraction(0), Fraction(1, 3)
    loop, v = (stage_shares(8, 2, ends, 2, placement) for placement in ("loop", "v"))
    assert [12 * time for time in loop.times] == [12 * time for time in v.times] == [2, 3, 3, 4]
    assert (12 * loop.longest, 12 * v.longest, 8 * loop.layers, 8 * v.layers) == (7, 6, 5, 6)


def test_what_lies_outside_of_layers_is_found() -> None:
    """The head of this model has as much work as the embedding has not."""
    work, own = language_model()
    assert 0 <= sum(own.end_shares) < 1
    whole = replace(own, end_shares=(Fraction(0), Fraction(1, 2)), cost=replace(own.cost, layers=4))
    even = compute_rank_load(
        replace(whole, end_shares=(Fraction(0), Fraction(0))), ReplicaShape(pp=4), work.cluster
    )
    uneven = compute_rank_load(whole, ReplicaShape(pp=4), work.cluster)
    at = {name: 8 for name in ("B", "S", "I")}
    ratio = evaluate_expr(uneven.cost.work, at) / evaluate_expr(even.cost.work, at)
    assert ratio == pytest.approx(2, rel=0.01)  # half of the work instead of a quarter


def test_first_and_last_stages_hold_what_lies_outside_of_layers() -> None:
    """All stages together have each parameter once, and the ends have their embedding and head; tied ones
    are on both. Chunks in a V have both ends on the first rank."""
    work, own = language_model()
    counts = [dict.fromkeys(PARAMETER_COUNTS, 0) | {"params": n} for n in (100_000, 300_000, 400_000)]
    whole = replace(own, cost=replace(own.cost, layers=8), outside=tuple(counts))
    layer = (own.cost.params - 400_000) / 8

    def stage_params(shape: ReplicaShape, *stages: int) -> list[int]:
        return [compute_rank_load(whole, shape, work.cluster, stage=i).cost.params for i in stages]

    assert stage_params(ReplicaShape(pp=2), 0, 1) == [4 * layer + 100_000, 4 * layer + 300_000]
    assert stage_params(ReplicaShape(pp=2, tp=2), 0, 1) == [2 * layer + 50_000, 2 * layer + 150_000]
    v = ReplicaShape(pp=2, chunks=2, placement="v")
    assert stage_params(v, 0, 3, 1, 2) == 2 * [4 * layer + 400_000] + 2 * [4 * layer]
