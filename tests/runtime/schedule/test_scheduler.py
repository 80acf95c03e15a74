"""The scheduler: assignment, urgency, search, and how close the critical section gets to never waiting."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secc.bounds.bounds import schedule_bound
from secc.runtime.plan.step_program import Instruction, SampleMeta, gather_rounds, print_schedule
from secc.runtime.schedule.list_scheduler import TaskGraph, simulate_tasks, simulate_within
from secc.runtime.schedule.scheduler import ScheduleCache, schedule_batch, schedule_with_makespan
from secc.runtime.validation.full_check import check_schedule
from tests.runtime.schedule.plan_strategies import (
    limit_bytes,
    make_edge,
    make_plan,
    make_sample,
    make_section,
    random_batches,
    random_plans,
)
from tools import schedule_mixes

TEXT, IMAGE = (), ("images",)


def vlm_plan(encoders=1, replicas=2, micro_batch=1, image="100*I", text="S", mode="train"):
    """Returns an encoder on its own ranks that feeds a language model."""
    vision = make_section(
        "vision",
        range(encoders),
        when=IMAGE,
        mode=mode,
        micro_batch=micro_batch,
        forward=image,
        backward=f"2*({image})",
    )
    lm = make_section(
        "lm",
        range(encoders, encoders + replicas),
        micro_batch=micro_batch,
        forward=text,
        backward=f"2*({text})",
    )
    return make_plan([vision, lm], [make_edge("vision", "lm", grad=mode != "forward")], encoders + replicas)


def mixed_samples(count, share, seed, images=4):
    """Returns `count` samples of ragged lengths; a `share` of them has images, which lengthen them."""
    r, samples = random.Random(seed), []
    for i in range(count):
        n = r.randint(1, images) if r.random() < share else 0
        samples.append(
            make_sample(i, *(IMAGE if n else TEXT), images=n, length=r.randint(100, 3000) + 576 * n)
        )
    return samples


def compute_instructions(program):
    return [(i.kind, i.micro) for i in program if i.kind in "FB"]


def section_patterns(step, samples, program, kind, name="lm"):
    """Returns whether each F or B in a rank's program has images, in order."""
    micros = step.micro_batches[name]
    return [
        bool(samples[micros[i.micro].samples[0]].pattern)
        for i in program
        if i.kind == kind and i.section == name
    ]


@given(random_plans(), random_batches, st.sampled_from(["wavefront", "dataset"]))
@settings(max_examples=25)
def test_the_same_input_gives_the_same_schedule(p, samples, order):
    assert print_schedule(schedule_batch(p, samples, order=order)) == print_schedule(
        schedule_batch(p, list(samples), order=order)
    )


@given(random_plans(), random_batches)
@settings(max_examples=50)
def test_micro_batches_hold_one_pattern_each(p, samples):
    for micros in schedule_batch(p, samples).micro_batches.values():
        for m in micros:
            assert len({samples[s].pattern for s in m.samples}) <= 1  # none where others gather


def test_language_model_starts_and_ends_with_text():
    samples = mixed_samples(24, 0.5, seed=1)
    step = schedule_batch(vlm_plan(image="250*I"), samples)
    for program in step.programs[1:]:
        kinds = section_patterns(step, samples, program, "F")
        assert not kinds[0] and not kinds[-1] and any(kinds)


def test_backward_follows_forward_on_the_critical_section():
    step = schedule_batch(vlm_plan(), mixed_samples(16, 0.3, seed=2))
    for program in step.programs[1:]:
        work = compute_instructions(program)
        assert work[::2] == [("F", m) for _, m in work[::2]] and work[1::2] == [
            ("B", m) for _, m in work[::2]
        ]


def test_encoders_run_all_forwards_before_their_backwards():
    step = schedule_batch(vlm_plan(), mixed_samples(16, 0.5, seed=3))
    kinds = "".join(k for k, _ in compute_instructions(step.programs[0]))
    assert kinds == "F" * kinds.count("F") + "B" * kinds.count("B")


def test_a_frozen_encoder_has_no_backward_and_gets_no_gradient():
    step = schedule_batch(vlm_plan(mode="forward"), mixed_samples(12, 0.5, seed=4))
    assert {i.kind for i in step.programs[0]} == {"F", "SEND", "REDUCE", "STEP"}
    assert not any(i.direction == "bwd" for program in step.programs for i in program)


def test_replicas_are_balanced_by_cost_and_by_pattern():
    samples = [make_sample(i, *(IMAGE if i % 4 == 0 else TEXT)) for i in range(32)]
    step = schedule_batch(vlm_plan(replicas=4), samples)
    for replica in range(4):
        held = [s for m in step.micro_batches["lm"] if m.replica == replica for s in m.samples]
        assert len(held) == 8 and sum(bool(samples[s].pattern) for s in held) == 2


def test_micro_batches_have_even_sizes_up_to_the_limit():
    step = schedule_batch(
        vlm_plan(replicas=1, micro_batch=4, text="50 + B*S"),
        [make_sample(i, length=100 + i) for i in range(9)],
    )
    assert [len(m.samples) for m in step.micro_batches["lm"]] == [3, 3, 3]
    longest_together = max(step.micro_batches["lm"], key=lambda m: max(m.samples))
    assert longest_together.samples == (6, 7, 8)


def test_micro_batches_hold_samples_of_similar_length():
    """Long and short samples alternate: packed apart, nothing is padded and both replicas get one micro-batch
    of each.
    """
    samples = [make_sample(i, length=1000 if i % 2 else 10) for i in range(16)]
    p = vlm_plan(replicas=2, micro_batch=4, text="500 + B*S")
    step, makespan = schedule_with_makespan(p, samples)
    assert {len({samples[s].sizes["S"] for s in m.samples}) for m in step.micro_batches["lm"]} == {1}
    assert makespan == 3 * (500 + 4000) + 3 * (500 + 40)


def test_micro_batches_are_smaller_if_that_balances_replicas():
    samples = [make_sample(i, length=100) for i in range(6)]
    step = schedule_batch(vlm_plan(replicas=2, micro_batch=4, text="10 + B*S"), samples)
    assert sorted(len(m.samples) for m in step.micro_batches["lm"]) == [3, 3]


def test_a_search_closes_the_gaps_of_small_batches():
    """Three tasks of 2 and two of 3 on two ranks: largest first gives 7, the optimum is 6.

    The search only runs if the step is worth its time.
    """
    p = make_plan([make_section("lm", [0, 1], forward="1000*B*S", backward="0")], [], 2)
    lengths = [3, 3, 2, 2, 2]
    assert schedule_with_makespan(p, [make_sample(i, length=n) for i, n in enumerate(lengths)])[1] == 7 * 1000
    assert (
        schedule_with_makespan(p, [make_sample(i, length=n * 10**6) for i, n in enumerate(lengths)])[1]
        == 6 * 10**9
    )


def test_the_search_simulates_no_step_that_overloads_a_rank(monkeypatch):
    p = make_plan([make_section("lm", [0, 1], forward="1000*B*S", backward="0")], [], 2)
    tried: list[int] = []

    def watched(graph, latest_end, rank_work_ns):
        tried.append(
            max(
                sum(d for d, r in zip(graph.duration_ns, graph.rank_of, strict=True) if r == rank)
                for rank in (0, 1)
            )
        )
        return simulate_within(graph, latest_end, rank_work_ns)

    monkeypatch.setattr("secc.runtime.schedule.order_search.simulate_within", watched)
    schedule_with_makespan(p, [make_sample(i, length=n * 10**6) for i, n in enumerate([3, 3, 2, 2, 2])])
    assert min(tried) == 6 * 10**9 and max(tried) <= 7 * 10**9  # the first order has 7 s on a rank


@pytest.mark.parametrize(
    ("images", "load", "most"), [(0.33, 0.8, 1.031), (0.33, 1.0, 1.05), (0.75, 0.8, 1.06)]
)
def test_small_batches_end_close_to_the_lower_bound(images: float, load: float, most: float) -> None:
    ratios: list[float] = []
    for seed in range(10):
        samples = schedule_mixes.multimodal_batch(64, images, seed)
        p = schedule_mixes.vlm_plan(samples, 4, 8, load)
        ratios.append(schedule_with_makespan(p, samples)[1] / schedule_bound(p, samples).ns)
    assert sum(ratios) / 10 < most


def test_found_orders_are_valid_and_keep_samples_on_their_rank():
    vision, lm = (
        make_section("vision", [0, 1, 2], when=IMAGE, forward="10000000*I"),
        make_section("lm", [0, 1, 2], forward="90000*B*S"),
    )
    p, samples = make_plan([vision, lm], [make_edge("vision", "lm")], 3), mixed_samples(10, 0.5, seed=8)
    step = schedule_batch(p, samples)
    check_schedule(p, samples, step)
    assert not any(i.kind == "SEND" for program in step.programs for i in program)


@pytest.mark.parametrize(("mode", "load"), [("forward", 100), ("train", 100), ("forward", 30), ("train", 30)])
def test_without_text_a_ramp_keeps_the_language_model_busy(mode, load):
    """Every sample needs the encoder, so only the small size of the first ones shortens the initial wait."""
    samples = mixed_samples(128, 1.0, seed=9)
    p = vlm_plan(encoders=4, replicas=4, image=f"{load}*I", mode=mode)
    assert schedule_with_makespan(p, samples)[1] <= 1.03 * schedule_bound(p, samples).ns


def test_replicas_get_even_shares_of_samples_that_need_upstream():
    samples = mixed_samples(128, 0.3, seed=10)
    step = schedule_batch(vlm_plan(encoders=2, replicas=4, mode="forward"), samples)
    shares = [0] * 4
    for m in step.micro_batches["lm"]:
        shares[m.replica] += sum(samples[s].sizes["S"] for s in m.samples if samples[s].pattern)
    assert max(shares) <= 1.1 * min(shares)


def test_ranks_without_work_still_reduce_and_step():
    step = schedule_batch(vlm_plan(replicas=3), [make_sample(0)])
    closing = [Instruction("REDUCE", "lm", 2), Instruction("STEP")]
    assert list(step.programs[3]) == closing
    assert [i.kind for i in step.programs[0]] == ["REDUCE", "STEP"]


def test_a_rank_without_sections_only_steps():
    assert schedule_batch(make_plan([make_section("lm", [1])], [], 2), [make_sample(0)]).programs[0] == (
        Instruction("STEP"),
    )


def test_sections_on_the_same_ranks_keep_each_sample_on_its_rank():
    vision, lm = make_section("vision", [0, 1], when=IMAGE), make_section("lm", [0, 1], micro_batch=2)
    step = schedule_batch(
        make_plan([vision, lm], [make_edge("vision", "lm")], 2), mixed_samples(12, 0.5, seed=5)
    )
    assert {i.kind for program in step.programs for i in program} == {"F", "B", "REDUCE", "STEP"}
    for program in step.programs:
        assert [i.section for i in program if i.kind == "REDUCE"] == ["lm", "vision"]


def test_dataset_order_keeps_the_order_of_the_samples():
    samples = mixed_samples(12, 0.5, seed=6)
    step = schedule_batch(vlm_plan(micro_batch=2), samples, order="dataset")
    for program in step.programs:
        forwards = [micro for kind, micro in compute_instructions(program) if kind == "F"]
        assert forwards == sorted(forwards)
    assert [m.samples for m in step.micro_batches["lm"]] == [(i, i + 1) for i in range(0, 12, 2)]


def test_padding_to_the_global_width_counts_in_the_cost():
    lm = make_section("lm", [0], forward="B*S", backward="0")
    samples = [make_sample(0, length=10), make_sample(1, length=30)]
    assert schedule_with_makespan(make_plan([lm], [], 1), samples)[1] == 40
    assert schedule_with_makespan(make_plan([lm], [], 1, widths="global"), samples)[1] == 60


@pytest.mark.parametrize(
    ("encoders", "replicas", "share"), [(1, 2, 0.5), (4, 8, 0.1), (4, 8, 0.33), (4, 8, 0.75)]
)
def test_the_critical_section_hardly_waits(encoders, replicas, share):
    """Encoders at 90% of the language model's load: within 2% of its work per replica, a lower bound of any
    order.
    """
    samples = mixed_samples(256, share, seed=7)
    work = sum(3 * s.sizes["S"] for s in samples) // replicas
    image = work * 9 * encoders // (30 * sum(s.sizes["I"] for s in samples))
    p = vlm_plan(encoders, replicas, image=f"{image}*I")
    assert schedule_with_makespan(p, samples)[1] <= 1.02 * work
    assert schedule_with_makespan(p, samples, order="dataset")[1] > 1.05 * work


@pytest.mark.parametrize(("encoder", "language"), [(1, 2), (1, 4), (2, 4), (2, 1), (4, 1)])
def test_sections_on_the_same_ranks_with_other_tp_do_not_block_each_other(encoder, language):
    vision = make_section(
        "vision",
        range(8),
        tp=encoder,
        when=IMAGE,
        forward=f"{200 * encoder}*I",
        backward=f"{400 * encoder}*I",
    )
    lm = make_section("lm", range(8), tp=language, forward="S", backward="2*S")
    p, samples = (
        make_plan([vision, lm], [make_edge("vision", "lm")], 8),
        mixed_samples(32 * 8 // language, 0.33, seed=5),
    )
    assert schedule_with_makespan(p, samples)[1] <= 1.08 * schedule_bound(p, samples).ns


@pytest.mark.parametrize(("encoder", "language"), [(1, 2), (1, 4), (2, 4)])
def test_replicas_inside_wider_ones_that_lack_memory_do_not_wait_for_other_replicas(
    encoder: int, language: int
) -> None:
    """An encoder holds two samples or a few more, and a micro-batch of the language model has four."""
    vision = limit_bytes(
        make_section(
            "vision",
            range(16),
            tp=encoder,
            when=IMAGE,
            forward="1000000*I",
            backward="2*1000000*I",
            micro_batch=2,
        ),
        8,
        saved="I",
    )
    vision = dataclasses.replace(vision, in_flight=64)
    lm = make_section(
        "lm", range(16), tp=language, micro_batch=4, forward="10000*B*S", backward="2*10000*B*S"
    )
    p = make_plan([vision, lm], [make_edge("vision", "lm")], 16)
    samples = mixed_samples(16 * 16 // language, 0.6, seed=3)
    assert schedule_with_makespan(p, samples)[1] <= 1.04 * schedule_bound(p, samples).ns


def test_samples_leave_a_wider_replica_where_that_balances_ranks() -> None:
    """About half of 32 samples have images. If these stay on the pair of ranks that has their text, the step
    takes 1.018 of its bound."""
    vision = make_section("vision", range(8), when=IMAGE, forward="4000000*I", backward="8000000*I")
    lm = make_section("lm", range(8), tp=2, forward="10000*S", backward="20000*S")
    p = make_plan([vision, lm], [make_edge("vision", "lm")], 8)
    samples = mixed_samples(32, 0.5, seed=2)
    step, makespan = schedule_with_makespan(p, samples)
    places = {
        (name, position): m.replica // (2 if name == "vision" else 1)
        for name, micro_batches in step.micro_batches.items()
        for m in micro_batches
        for position in m.samples
    }
    moved = [p for name, p in places if name == "vision" and places["vision", p] != places["lm", p]]
    assert moved and makespan <= 1.01 * schedule_bound(p, samples).ns


def test_a_rank_exceeds_its_limit_as_soon_as_nothing_it_depends_on_runs() -> None:
    """On ranks 0 and 1 the last task needs both others, and one of them may be in flight. Rank 2 has nothing
    to do with them."""
    graph = TaskGraph(4, [0, 0, 1, 2], [10, 10, 10, 1000], [0, 1, 2, 3], [[2], [2], [], []], [0, 0, 2, 0])
    graph.limit_in_flight(1, range(2), range(2, 3))
    assert simulate_tasks(graph).starts == [0, 0, 10, 20]
    assert simulate_tasks(graph).order == [0, 3, 1, 2]


def test_plans_that_cannot_be_scheduled_are_rejected():
    a, b = make_section("a", [0]), make_section("b", [0])
    with pytest.raises(ValueError, match="a, b form a cycle"):
        schedule_batch(make_plan([a, b], [make_edge("a", "b"), make_edge("b", "a")], 1), [make_sample(0)])
    with pytest.raises(ValueError, match="unknown order"):
        schedule_batch(make_plan([a], [], 1), [], order="random")
    with pytest.raises(ValueError, match="'T' in T"):
        schedule_batch(
            make_plan([make_section("a", [0], forward="T")], [], 1), [SampleMeta(0, frozenset(), {"B": 1})]
        )


def test_equal_batches_share_one_schedule():
    order, samples = ScheduleCache(vlm_plan(), "wavefront"), mixed_samples(8, 0.5, seed=0)
    equal = [SampleMeta(s.id + 100, s.pattern, dict(s.sizes)) for s in samples]
    first = order(samples)
    assert order(equal) is first
    longer = SampleMeta(100, samples[0].pattern, {**samples[0].sizes, "S": 10_000})
    assert order([longer, *equal[1:]]) is not first
    other = SampleMeta(100, samples[0].pattern ^ set(IMAGE), samples[0].sizes)
    assert order([other, *equal[1:]]) is not first


@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_of_a_round_are_alike(size):
    """Replicas in lockstep wait for the longest micro-batch of each round, so long samples share rounds,
    whatever their order in the dataset."""
    section = make_section("lm", range(4), forward="S", backward="2*S", micro_batch=size)
    section = dataclasses.replace(section, mesh=dataclasses.replace(section.mesh, ep=4))
    p = make_plan([section], [], 4)
    samples = [make_sample(i, length=10 if i % 5 else 100) for i in range(8 * 5 * size)]
    rounds = set(gather_rounds(p.sections, schedule_batch(p, samples).micro_batches).values())
    long_rounds = [{samples[p].sizes["S"] for m in members for p in m.samples} for members in rounds]
    assert sorted(map(sorted, long_rounds)) == [[10]] * 8 + [[100]] * 2


def test_a_simulation_ends_once_the_step_is_sure_to_be_too_long():
    """A rank with 4 ns of work starts after 3 ns: the step takes 7 ns."""
    graph = TaskGraph(
        2,
        rank_of=[0, 1, 1],
        duration_ns=[3, 2, 2],
        priority=[0, 1, 2],
        successors=[[1, 2], [], []],
        predecessor_count=[0, 1, 1],
    )
    assert simulate_within(graph, 7, [3, 4]) == simulate_tasks(graph)
    assert simulate_within(graph, 6, [3, 4]) is None
