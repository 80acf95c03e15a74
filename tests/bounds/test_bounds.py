"""No schedule is shorter than the bounds, and the proven optimum lies between bound and wavefront order."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secc.alloc.exact.optimal_schedule import solve_schedule
from secc.bounds.additive import split_additive
from secc.bounds.bounds import plan_bound, schedule_bound
from secc.bounds.work import BatchWork
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.schema import Cost, ModelRef
from secc.runtime.schedule.scheduler import schedule_with_makespan
from secc.simulate.simulator import simulate
from tests.runtime.schedule.plan_strategies import (
    SYMBOLS,
    make_edge,
    make_plan,
    make_sample,
    make_section,
    make_stages,
    random_batches,
    random_plans,
    stage_edges,
)

IMAGE = ("images",)
CLUSTER = {
    "name": "1x4xcpu",
    "nodes": 1,
    "per_node": 4,
    "inside": {"latency_ns": 10, "bytes_per_s": 10**9},
    "between": {"latency_ns": 100, "bytes_per_s": 10**9},
    "device": {
        "kind": "cpu",
        "backend": "cpu",
        "gflops": [["f32", 20]],
        "memory": 1,
        "memory_bytes_per_s": 10**9,
        "efficiency_percent": 50,
        "op_ns": 1,
        "reserved": 0,
        "label": "default",
    },
}


def vlm_plan(encoders=1, replicas=1, image="10*I", text="B*S", mode="train"):
    vision = make_section(
        "vision", range(encoders), when=IMAGE, mode=mode, forward=image, backward=f"2*({image})"
    )
    lm = make_section("lm", range(encoders, encoders + replicas), forward=text, backward=f"2*({text})")
    return make_plan([vision, lm], [make_edge("vision", "lm", grad=mode == "train")], encoders + replicas)


@given(random_plans(), random_batches, st.sampled_from(["wavefront", "dataset"]))
@settings(max_examples=200)
def test_no_schedule_of_any_plan_is_shorter_than_the_bound(p, samples, order):
    step, time = schedule_with_makespan(p, samples, order=order)
    assert schedule_bound(p, samples).ns <= min(time, simulate(p, samples, step).end)


@given(random_plans(), random_batches)
@settings(max_examples=50)
def test_the_plan_bound_is_below_the_schedule_bound(p, samples):
    """A plan that leaves ranks idle cannot beat one that shares all work evenly."""
    assert plan_bound(p, samples) <= schedule_bound(p, samples).ns


@st.composite
def plans_with_other_allocation(draw):
    """Draws a plan, and one with the same layouts on as many ranks: other numbers of replicas and other
    ranks."""
    p = draw(random_plans())
    sections = []
    for s in p.sections:
        size = s.mesh.replica_size
        dp = s.mesh.dp if s.pipeline or s.mesh.ep > 1 else draw(st.integers(1, p.world_size // size))
        ranks = tuple(draw(st.permutations(range(p.world_size)))[: dp * size])
        moved = dataclasses.replace(s.mesh, dp=dp, ranks=s.mesh.ranks if s.mesh.ep > 1 else ranks)
        sections.append(dataclasses.replace(s, mesh=moved))
    return p, dataclasses.replace(p, sections=tuple(sections))


@given(plans_with_other_allocation(), random_batches)
@settings(max_examples=200)
def test_no_plan_with_the_same_layouts_is_shorter_than_even_work_and_the_longest_way(plans, samples):
    p, other = plans
    work = BatchWork(p, samples)
    total = sum(sum(work.least_work(s.name)) * s.mesh.replica_size for s in work.sections)
    step, time = schedule_with_makespan(other, samples)
    even = -(-total // p.world_size)
    assert max(even, work.longest_way_ns()) <= min(time, simulate(other, samples, step).end)


def test_the_longest_way_of_a_sample_bounds_all_plans_with_the_same_layouts():
    """One sample of 30 is most of the work of eight ranks. What a frozen section does may be done ahead, and
    messages may stay on a rank."""
    samples = [make_sample(0, *IMAGE, images=3, length=30), make_sample(1, length=2)]
    p = dataclasses.replace(vlm_plan(encoders=4, replicas=4), cluster=CLUSTER)
    assert plan_bound(p, samples) == 3 * 30 + 3 * 30
    frozen = dataclasses.replace(vlm_plan(encoders=4, replicas=4, mode="forward"), cluster=CLUSTER)
    assert plan_bound(frozen, samples) == 3 * 30


single = random_plans().map(
    lambda p: dataclasses.replace(
        p, sections=tuple(dataclasses.replace(s, micro_batch=1, cp_per="section") for s in p.sections)
    )
)
small = random_batches.map(lambda samples: samples[:5])


@given(single, small)
@settings(max_examples=40)
def test_the_optimum_lies_between_the_bound_and_the_schedule(p, samples):
    work, order = BatchWork(p, samples), schedule_with_makespan(p, samples)[1]
    exact = solve_schedule(work, limit=1.0, hint_ns=order)
    assert exact is not None
    assert schedule_bound(p, samples).ns <= exact.step_ns <= order
    assert schedule_bound(p, samples).ns <= exact.bound_ns or not exact.is_optimal


def test_an_exact_schedule_keeps_all_ranks_of_a_replica_busy():
    """Two sections on rank 1, one of which needs rank 0 as well."""
    p = make_plan(
        [
            make_section("narrow", [1], forward="7*B", backward="0"),
            make_section("wide", [0, 1], tp=2, forward="5*B", backward="0"),
        ],
        [],
        2,
    )
    exact = solve_schedule(BatchWork(p, [make_sample(0)]))
    assert exact is not None and exact.step_ns == exact.bound_ns == 12


@st.composite
def random_staged_plans(draw):
    """Draws a pipeline with equal stages or not, perhaps with an encoder, any in-flight limits, split
    backwards or not.
    """
    parts, replicas, encoder = draw(st.integers(2, 4)), draw(st.integers(1, 2)), draw(st.booleans())
    lm = make_stages(
        "lm",
        [[d * parts + i for d in range(replicas)] for i in range(parts)],
        in_flight=[draw(st.integers(0, 4))] * parts,
    )
    even, split = draw(st.booleans()), draw(st.sampled_from([0, 300, 500]))
    times = [draw(st.tuples(st.integers(1, 5), st.integers(1, 9))) for _ in lm]
    costs = [Cost(f"{f}*S", f"{b}*S") for f, b in ([times[0]] * parts if even else times)]
    lm = [dataclasses.replace(s, cost=cost, weight_permille=split) for s, cost in zip(lm, costs, strict=True)]
    if not encoder:
        return make_plan(lm, stage_edges(lm), parts * replicas)
    vision = make_section("vision", [parts * replicas], when=IMAGE, forward="10*I", backward="20*I")
    return make_plan([vision, *lm], [make_edge("vision", "lm_0"), *stage_edges(lm)], parts * replicas + 1)


lengths = st.lists(
    st.tuples(st.booleans(), st.integers(1, 3), st.sampled_from([1, 2, 5, 10, 30, 100])),
    min_size=1,
    max_size=6,
)


@given(random_staged_plans(), lengths)
@settings(max_examples=20)
def test_no_schedule_of_a_pipeline_is_shorter_than_the_bound(p, rows):
    """Also the solver's schedules that are not proven optimal."""
    samples = [
        make_sample(i, *(IMAGE if image else ()), images=n, length=length)
        for i, (image, n, length) in enumerate(rows)
    ]
    order, bound = schedule_with_makespan(p, samples)[1], schedule_bound(p, samples).ns
    exact = solve_schedule(BatchWork(p, samples), limit=0.3, hint_ns=order)
    assert bound <= order if exact is None else bound <= exact.step_ns <= order


def test_a_long_sample_leaves_the_last_stages_of_its_replica_idle():
    """Four stages, one sample of 100 and eight of 10: the last stage waits for the long one only."""
    lm = make_stages("lm", [[0], [1], [2], [3]], forward="S", backward="2*S")
    samples = [make_sample(i, length=100 if i == 0 else 10) for i in range(9)]
    bound = schedule_bound(make_plan(lm, stage_edges(lm), 4), samples)
    assert bound.reason == "the longest samples on the ranks of lm"
    assert bound.ns > 4 * 300


def test_an_in_flight_limit_of_one_serialises_a_pipeline():
    lm = make_stages("lm", [[0], [1], [2]], in_flight=(1, 1, 1), forward="S", backward="2*S")
    bound = schedule_bound(make_plan(lm, stage_edges(lm), 3), [make_sample(i) for i in range(4)])
    assert (bound.ns, bound.reason) == (4 * 3 * 30, "the in-flight limit of lm_0")


TIMES = [
    "B*S",
    "7 + B*S",
    "5*I + 3*B*S - 3*B",
    "(B*S*S + 4*I)//3",
    "max(B*S, 3*I + 2)",
    "40*S",
    "2*(max(I, 3)) + S*B",
]
IN_PARTS = ["20*((7*I)//2)*21//80", "(max(B*I + 9, 3*I + 7) - (7))*8//17"]

IN_PIECES = [
    "2*(((70*I)//2)//max(1, 3*I)*((3*I + 3)//4))//3 + 5",
    "(50*I*I + 9*I*S)//max(1, 2*I + B)*((2*I + B + 7)//8)",
]
OTHER_PIECES = [
    "(90*I + 40*B)//max(1, 2*I)*((2*I + 1)//2)",
    "(90*B*S)//max(1, B*S)*((B*S + 1)//2)",
    "(90*I)//max(1, I)*((2*I + 1)//2)",
]


@given(st.sampled_from(TIMES + IN_PARTS + IN_PIECES + OTHER_PIECES), random_batches)
def test_a_micro_batch_takes_at_least_the_sum_of_its_samples_weights(text, samples):
    sizes = [s.sizes for s in samples]
    together = {
        "B": sum(s["B"] for s in sizes),
        "I": sum(s["I"] for s in sizes),
        "S": max((s["S"] for s in sizes), default=0),
    }
    for branch in split_additive(text, SYMBOLS):
        weights = sum(
            evaluate_expr(branch.additive_text, s)
            + Fraction(evaluate_expr(branch.rest_text, s), len(samples))
            for s in sizes
        )
        assert weights <= evaluate_expr(text, together)


@pytest.mark.parametrize("text", IN_PARTS + IN_PIECES)
def test_additive_parts_are_found_in_products_and_differences(text):
    assert any("I" in branch.additive_text for branch in split_additive(text, SYMBOLS))


@pytest.mark.parametrize("text", OTHER_PIECES)
def test_whole_pieces_of_what_is_there_without_them_are_no_additive_part(text):
    assert all(branch.additive_text == "0" for branch in split_additive(text, SYMBOLS))


def test_work_spread_over_replicas_bounds_a_step():
    bound = schedule_bound(vlm_plan(replicas=4), [make_sample(i, length=10) for i in range(8)])
    assert bound.ns == 60
    assert "lm" in bound.reason


def test_a_sample_more_than_replicas_costs_a_whole_sample():
    assert schedule_bound(vlm_plan(replicas=4), [make_sample(i, length=10) for i in range(9)]).ns == 90


def test_the_encoder_must_fill_before_and_drain_after():
    """Two images on one encoder, one replica: a round trip of one image, then the encoder's backward of
    both.
    """
    samples = [make_sample(0, *IMAGE, images=2, length=10), make_sample(1, *IMAGE, images=2, length=10)]
    assert schedule_bound(vlm_plan(), samples).ns == 20 + 30 + 2 * 40
    assert schedule_bound(vlm_plan(mode="forward"), samples).ns == 20 + 60
    text_too = [*samples, make_sample(2, length=100)]
    assert schedule_bound(vlm_plan(), text_too).ns == 300 + 60


def test_one_long_sample_is_a_chain():
    bound = schedule_bound(vlm_plan(encoders=3, replicas=3), [make_sample(0, *IMAGE, images=5, length=50)])
    assert bound.ns == 50 + 150 + 100
    assert bound.reason == "the longest way of one sample"


def test_sections_on_the_same_ranks_share_their_time():
    vision, lm = make_section("vision", [0, 1], when=IMAGE, forward="10*I"), make_section("lm", [0, 1])
    samples = [make_sample(i, *IMAGE) for i in range(4)]
    assert schedule_bound(make_plan([vision, lm], [make_edge("vision", "lm")], 2), samples).ns == 2 * (
        10 + 200 + 300
    )


def test_micro_batches_of_several_samples_amortise_what_is_constant():
    p = make_plan([make_section("lm", [0], micro_batch=4, forward="100 + B*S", backward="0")], [], 1)
    samples = [make_sample(i, length=10) for i in range(8)]
    assert schedule_bound(p, samples).ns == 2 * 100 + 80
    assert schedule_with_makespan(p, samples)[1] == 280


def test_messages_reductions_and_the_optimizer_count():
    p = dataclasses.replace(vlm_plan(replicas=2), cluster=CLUSTER)
    images = [make_sample(0, *IMAGE, images=1, length=10)]
    wait = 10 + 32  # a row of eight float32
    assert schedule_bound(p, images).ns == 10 + wait + 30 + wait + 20
    lm = dataclasses.replace(p.sections[1], params=("w",))
    trained = dataclasses.replace(
        p, sections=(p.sections[0], lm), model=ModelRef("", "", {"w": "float32[10, 10] train"})
    )
    assert schedule_bound(trained, [make_sample(0, length=10)]).ns == 30 + 2 * (10 + 200) + 7 * 400


def test_slices_of_a_message_travel_at_once():
    """Each of two ranks of the encoder sends half of a row to a rank of the language model, and gets half of
    the gradient."""
    two = make_section("vision", [0, 1], when=IMAGE, tp=2, forward="10*I", backward="20*I")
    lm = make_section("lm", [2, 3], tp=2, forward="B*S", backward="2*B*S")
    p = dataclasses.replace(make_plan([two, lm], [make_edge("vision", "lm")], 4), cluster=CLUSTER)
    images = [make_sample(0, *IMAGE, images=1, length=10)]
    wait = 10 + 16  # half a row of eight float32
    assert schedule_bound(p, images).ns == 10 + wait + 30 + wait + 20
    assert schedule_bound(p, images).ns <= simulate(p, images, schedule_with_makespan(p, images)[0]).end


def test_the_plan_bound_shares_all_work_evenly():
    samples = [make_sample(0, *IMAGE, images=1, length=10), *(make_sample(i, length=20) for i in range(1, 5))]
    p = vlm_plan(encoders=1, replicas=2)
    assert plan_bound(p, samples) == 2 * 60  # of (30 + 9 * 30) // 3 at the least; four texts on three ranks
    vision, lm = p.sections
    whole = dataclasses.replace(lm, mesh=dataclasses.replace(lm.mesh, dp=1, tp=2))
    assert plan_bound(dataclasses.replace(p, sections=(vision, whole)), samples) == 9 * 30  # one replica


def test_the_exact_schedule_finds_what_a_greedy_order_misses():
    """Three tasks of 2 and two of 3 on two ranks: largest first gives 7, the optimum is 6."""
    samples = [make_sample(i, length=n) for i, n in enumerate([3, 3, 2, 2, 2])]
    p = make_plan([make_section("lm", [0, 1], forward="B*S", backward="0")], [], 2)
    exact = solve_schedule(BatchWork(p, samples))
    assert exact is not None and exact.is_optimal and exact.step_ns == 6
    assert {rank for rank, _, _ in exact.placements.values()} == {0, 1}


def test_the_exact_schedule_of_a_pipeline_fills_idle_time_and_keeps_to_in_flight_limits():
    """Two stages, two samples, all parts 10: 60 of work after a forward on the last stage; with a limit of
    one, two rounds.
    """
    lm = make_stages("lm", [[0], [1]], forward="S", backward="2*S")
    split = [dataclasses.replace(s, weight_permille=500) for s in lm]
    tight = [dataclasses.replace(s, in_flight=1) for s in split]
    found = [
        solve_schedule(BatchWork(make_plan(some, stage_edges(some), 2), [make_sample(0), make_sample(1)]))
        for some in (lm, split, tight)
    ]
    assert [exact.step_ns for exact in found if exact is not None] == [90, 70, 100]


def test_an_exact_schedule_of_larger_micro_batches_is_rejected():
    with pytest.raises(ValueError, match="one sample"):
        solve_schedule(
            BatchWork(make_plan([make_section("lm", [0], micro_batch=2)], [], 1), [make_sample(0)])
        )


def test_a_replica_of_several_ranks_occupies_them_all():
    """Neither section's own ranks show it: the second works on one of two ranks, the first on both for its
    whole duration.
    """
    alone, wide = make_section("alone", [0, 1], backward="100*B"), make_section("wide", [0, 1], tp=2)
    assert schedule_bound(make_plan([alone, wide], [], 2), [make_sample(0)]).ns == 300 + 100
