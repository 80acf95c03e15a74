"""Predicted steps of plans that were not tried."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from secc.alloc.problem.types import Assignment, Candidate, Problem
from secc.alloc.refine.step_model import StepModel

SHAPES: list[tuple[int, int]] = [*product((1, 2, 4, 8), (1, 2, 4))]  # (pp, tp) of a pipeline
PIPELINE = tuple(Candidate(dp=64 // (pp * tp), micro_batch=1, time_ns=1, pp=pp, tp=tp) for pp, tp in SHAPES)
ENCODER = tuple(
    Candidate(dp=64, micro_batch=mb, time_ns=1, recompute=r) for mb in (1, 8) for r in ("none", "full")
)
PROBLEM = Problem({"encoder": ENCODER, "pipeline": PIPELINE}, (), 64, 1 << 40)
MODEL = StepModel(PROBLEM)


def make_plan(pipeline: int, encoder: int = 0, shared: bool = False) -> Assignment:
    group = {"encoder": "encoder", "pipeline": "encoder" if shared else "pipeline"}
    return Assignment({"encoder": encoder, "pipeline": pipeline}, group)


def test_plans_like_fast_ones_come_first() -> None:
    """Stages take less than closed forms say, and parts of tensors more; a plan with stages is first although
    closed forms put it last."""
    tried = [make_plan(SHAPES.index(shape)) for shape in ((1, 1), (1, 2), (1, 4), (4, 1))]
    others = [make_plan(SHAPES.index(shape)) for shape in ((8, 1), (2, 4), (2, 2))]
    found = MODEL.choose_promising(tried, [1.0, 1.3, 1.4, 0.7], others, [110, 100, 100], 3)
    assert found[0] == others[0]


def test_a_kind_that_was_not_tried_comes_before_variants_of_one_that_was() -> None:
    tried = [make_plan(i, encoder=k) for i in (0, 1) for k in (0, 1)]
    variant, other_kind = make_plan(0, encoder=2), make_plan(SHAPES.index((8, 4)), encoder=3, shared=True)
    ratios = [1.0, 1.0, 1.3, 0.8]
    found = MODEL.choose_promising(tried, ratios, [variant, other_kind], [100, 110], 2)
    assert found == [other_kind, variant]


def test_without_a_difference_closed_forms_decide() -> None:
    others = [make_plan(0, encoder=k) for k in (2, 1)]
    assert MODEL.choose_promising([make_plan(0, 3)], [1.2], others, [101, 100], 1) == [others[1]]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_each_plan_is_chosen_at_most_once_and_a_smaller_count_gives_the_first(data: st.DataObject) -> None:
    every = [
        make_plan(i, k, shared) for i in range(len(PIPELINE)) for k in range(4) for shared in (False, True)
    ]
    picked = data.draw(st.permutations(every))
    tried, others = picked[:6], picked[6:20]
    ratios = data.draw(st.lists(st.floats(0.5, 2), min_size=6, max_size=6))
    times = data.draw(st.lists(st.integers(10**6, 10**10), min_size=14, max_size=14))
    found = MODEL.choose_promising(tried, ratios, others, times, 20)
    assert sorted(map(others.index, found)) == [*range(14)]
    few = MODEL.choose_promising(tried, ratios, others, times, 3)
    assert few == found[:3] == MODEL.choose_promising(tried, ratios, others, times, 3)


def test_the_distance_of_two_plans_counts_the_choices_that_differ() -> None:
    """Words that differ count 1, numbers as many times 1/2 as one has to be doubled."""
    rows = StepModel(Problem({"encoder": ENCODER}, (), 64, 1 << 40)).features["encoder"]
    distances = abs(rows - rows[0]).sum(axis=1).tolist()
    assert [(c.micro_batch, c.recompute) for c in ENCODER][:3] == [(1, "none"), (1, "full"), (8, "none")]
    assert distances == [0, 1, 1.5, 2.5]
