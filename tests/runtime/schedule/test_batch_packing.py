"""Packing of samples into micro-batches and their assignment to replicas."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.schedule.load_balance import assign_least_loaded, swap_until_balanced
from secc.runtime.schedule.micro_batches import KnownPackings, MicroBatchComposer
from secc.runtime.schedule.scheduler import find_candidate, schedule_batch
from tests.runtime.schedule.plan_strategies import (
    limit_bytes,
    make_plan,
    make_sample,
    make_section,
    random_batches,
    random_plans,
)

pieces = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50)), min_size=1, max_size=20)


@given(pieces, st.integers(1, 4), st.data())
def test_swaps_stay_within_a_kind_and_never_increase_the_largest_load(some, count, data):
    kinds, weights = [k for k, _ in some], [w for _, w in some]
    ranks = tuple(range(10, 10 + count))
    load = {rank: data.draw(st.integers(0, 100)) for rank in ranks}
    before, first = dict(load), assign_least_loaded(weights, ranks, load)
    longest, owner = max(load.values()), first.copy()
    swap_until_balanced(kinds, weights, owner, ranks, load)
    assert load == {
        rank: before[rank] + sum(w for w, r in zip(weights, owner, strict=True) if ranks[r] == rank)
        for rank in ranks
    }
    assert max(load.values()) <= longest
    assert Counter(zip(kinds, owner, strict=True)) == Counter(zip(kinds, first, strict=True))


def test_one_swap_balances_two_ranks():
    owner, load = [0, 0, 1, 1], {0: 17, 1: 7}
    swap_until_balanced([0, 0, 0, 0], [9, 8, 4, 3], owner, (0, 1), load)
    assert load == {0: 12, 1: 12} and owner in ([1, 0, 0, 1], [0, 1, 1, 0])


def replica_ends(p, samples):
    """Returns the work of each replica of the language model, in ns."""
    step, costs, lm = schedule_batch(p, samples), PredictedCosts(p, samples), p.find_section("lm")
    forward, backward = costs.micro_batch_times(lm, [m.samples for m in step.micro_batches["lm"]])
    work = Counter()
    for m, f, b in zip(step.micro_batches["lm"], forward, backward, strict=True):
        work[m.replica] += f + b
    return work


def test_replicas_are_balanced_by_micro_batch_times():
    """Ragged samples without padding, and a constant per micro-batch that the times of single samples count
    too often.
    """
    r = random.Random(1)
    samples = [make_sample(i, "images", length=0, images=r.randint(10, 200)) for i in range(128)]
    for most in (2, 3, 4):
        lm = make_section("lm", range(8), micro_batch=most, forward="40 + I", backward="80 + 2*I")
        found = replica_ends(make_plan([lm], [], 8), samples)
        assert max(found.values()) <= 1.01 * sum(found.values()) / 8


def test_large_and_small_samples_share_micro_batches_if_two_large_ones_do_not_fit():
    lm = make_section("lm", [0], micro_batch=2, forward="100 + I", backward="I")
    lm = limit_bytes(lm, 100, "I")
    samples = [make_sample(i, "images", images=n) for i, n in enumerate([90, 80, 70, 60, 40, 30, 20, 10])]
    micros = schedule_batch(make_plan([lm], [], 1), samples).micro_batches["lm"]
    assert sorted(sorted(samples[p].sizes["I"] for p in m.samples) for m in micros) == [
        [10, 90],
        [20, 80],
        [30, 70],
        [40, 60],
    ]


@pytest.mark.parametrize("order", ["wavefront", "dataset"])
@pytest.mark.parametrize("sharding", ["none", "zero3"])
def test_micro_batches_of_several_samples_keep_to_their_tokens(order, sharding):
    r = random.Random(2)
    samples = [make_sample(i, "images", length=r.choice([3, 9, 20, 70])) for i in range(40)]
    budget = {"micro_batch_tokens": 64, "token_count": "B*S"}
    lm = make_section("lm", range(2), micro_batch=40, forward="100 + B*S", sharding=sharding)
    tower = make_section("tower", [2], when=("images",), micro_batch=40, forward="9*I", backward="0")
    p = make_plan([dataclasses.replace(s, **budget) for s in (tower, lm)], [], 3)
    micros = schedule_batch(p, samples, order=order).micro_batches
    for name in ("lm", "tower"):
        lengths = [[samples[p].sizes["S"] for p in m.samples] for m in micros[name] if m.samples]
        assert sorted(n for each in lengths for n in each) == sorted(s.sizes["S"] for s in samples)
        assert all(len(each) == 1 or len(each) * max(each) <= 64 for each in lengths)
        assert any(len(each) == 1 and each[0] > 64 for each in lengths)  # too long for any budget
    assert order == "dataset" or any(len(m.samples) > 3 for m in micros["lm"])  # short ones together


def test_samples_on_shared_ranks_weigh_what_they_add_to_a_micro_batch():
    """Two replicas of both sections; each micro-batch of the tower takes 100 and holds all four images of a
    replica.
    """
    tower = make_section("tower", [0, 1], when=("images",), micro_batch=4, forward="100 + I", backward="0")
    lm = make_section("lm", [0, 1], micro_batch=2, forward="S", backward="S")
    samples = [make_sample(i, *(("images",) if i < 8 else ()), length=50) for i in range(16)]
    composer = MicroBatchComposer(
        make_plan([tower, lm], [], 2), samples, SectionGraph(make_plan([tower, lm], [], 2))
    )
    assert [composer.shared_work["tower"][p] for p in (0, 8)] == [(100 + 4) // 4, 0]


@given(random_plans(), random_batches)
def test_micro_batches_take_at_least_the_shared_work_of_their_samples(p, samples):
    """So the sum of `shared_work` is a lower bound, which limits the time spent on the search."""
    composer = MicroBatchComposer(p, samples, SectionGraph(p))
    for s in p.sections:
        forward, backward = composer.costs.micro_batch_times(
            s, [m.samples for m in schedule_batch(p, samples).micro_batches[s.name]]
        )
        assert sum(forward) + sum(backward) >= sum(composer.shared_work[s.name])


@given(random_plans(), random_batches, st.data())
def test_packings_of_other_plans_change_no_order(p, samples, data):
    """Another section takes twice as long in the second plan; what depends on it is packed again."""
    changed = data.draw(st.sampled_from(p.sections))
    slower = dataclasses.replace(
        changed, cost=dataclasses.replace(changed.cost, forward_ns=f"2*({changed.cost.forward_ns})")
    )
    other = dataclasses.replace(p, sections=tuple(slower if s is changed else s for s in p.sections))
    packings = KnownPackings()
    for plan in (p, other, p):
        alone, found = find_candidate(plan, samples), find_candidate(plan, samples, packings=packings)
        assert (found.task_order, found.makespan) == (alone.task_order, alone.makespan)
        assert {name: t.micro_batches for name, t in found.tables.items()} == {
            name: t.micro_batches for name, t in alone.tables.items()
        }
