"""What ranks hold between forward and backward stays within the plan's memory, whatever the samples are."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from hypothesis import given, settings

from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.replica_routes import ranks_by_replica
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import (
    SampleMeta,
    Schedule,
    compute_kinds,
    owes_backward,
    parse_schedule,
    print_schedule,
)
from secc.runtime.schedule.scheduler import schedule_batch
from secc.runtime.validation.full_check import check_schedule
from secc.simulate.simulator import simulate
from tests.runtime.schedule.plan_strategies import (
    limit_bytes,
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


def peak_bytes(plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule) -> dict[int, int]:
    """Returns {rank: the most bytes that its micro-batches keep at once}, from the programs alone."""
    costs = PredictedCosts(plan, samples)
    peaks: dict[int, int] = {}
    for rank, program in enumerate(schedule.programs):
        held = peaks[rank] = 0
        for i in program:
            section = next((s for s in plan.sections if s.name == i.section), None)
            if section is None or not owes_backward(section) or i.kind not in "FBW":
                continue
            positions = schedule.micro_batches[i.section][i.micro].samples
            sizes, is_last = costs.micro_batch_sizes(positions), i.kind == compute_kinds(section)[-1]
            saved, between = (
                evaluate_expr(text or "0", sizes) for text in (section.cost.saved, section.cost.kept_between)
            )
            between = 0 if i.micro in schedule.whole_backwards.get(i.section, ()) else between
            held += saved if i.kind == "F" else between if i.kind == "B" else 0
            peaks[rank] = max(peaks[rank], held)
            held -= saved + between if is_last else 0
    return peaks


def rank_capacity(plan: Plan) -> dict[int, int]:
    """Returns {rank: bytes that its sections may keep together}, without ranks that have no limit."""
    found: dict[int, int] = defaultdict(int)
    unlimited = set[int]()
    for s in filter(owes_backward, plan.sections):
        for rank in (rank for ranks in ranks_by_replica(s) for rank in ranks):
            found[rank] += s.room_bytes
            unlimited.update(() if s.room_bytes else (rank,))
    return {rank: size for rank, size in found.items() if rank not in unlimited}


def test_a_large_sample_is_computed_alone_where_sections_share_ranks() -> None:
    """A rank may keep 60 bytes of images and 40 of texts. The long text (80) and its image (20) fit only
    while nothing else is held, and come last."""
    vision = dataclasses.replace(make_section("vision", [0, 1], when=IMAGE, backward="20*B"), in_flight=9)
    lm = make_section("lm", [0, 1], tp=2, forward="100*S", backward="200*S")
    sections = [limit_bytes(vision, 60, "20*I"), limit_bytes(lm, 40)]
    plan = make_plan(sections, [make_edge("vision", "lm")], 2)
    samples = [make_sample(i, "images", length=10) for i in range(8)]
    usual = schedule_batch(plan, samples)
    assert max(peak_bytes(plan, samples, usual).values()) == 70  # three images and one text
    samples[2] = make_sample(2, "images", length=80)
    bounded = schedule_batch(plan, samples)
    check_schedule(plan, samples, bounded)
    assert not bounded.over_memory
    assert max(peak_bytes(plan, samples, bounded).values()) <= 100
    work = [i for i in bounded.programs[0] if i.kind in "FB"]
    last = [bounded.micro_batches[i.section][i.micro].samples for i in work if i.section == "lm"][-2:]
    assert last == [(2,), (2,)]


def test_a_sample_alone_comes_first_where_others_wait_for_it() -> None:
    """The encoder's rank has room for other images while the long text (40) is alone on rank 1. It comes
    first: behind all others, its image's backward would come last, too."""
    vision = limit_bytes(dataclasses.replace(make_section("vision", [0], when=IMAGE), in_flight=9), 60, "8*I")
    lm = limit_bytes(make_section("lm", [1], forward="S", backward="2*S"), 40)
    vision = dataclasses.replace(vision, cost=dataclasses.replace(vision.cost, backward_ns="20*I"))
    plan = make_plan([vision, lm], [make_edge("vision", "lm")], 2)
    samples = [
        make_sample(i, "images", images=5 if i == 2 else 1, length=40 if i == 2 else 7) for i in range(7)
    ]
    bounded = schedule_batch(plan, samples)
    check_schedule(plan, samples, bounded)
    assert not bounded.over_memory
    peaks = peak_bytes(plan, samples, bounded)
    assert peaks[0] <= 60 and peaks[1] == 40
    work = [i for i in bounded.programs[1] if i.kind in "FB"]
    assert [bounded.micro_batches["lm"][i.micro].samples for i in work[:2]] == [(2,), (2,)]
    others = [i for i in bounded.programs[0] if i.kind == "F"]
    last = next(n for n, i in enumerate(bounded.programs[0]) if i.kind == "B")
    assert len([i for i in bounded.programs[0][:last] if i.kind == "F"]) > 1 and len(others) == 7


def test_a_sample_that_cannot_fit_is_named() -> None:
    lm = limit_bytes(make_section("lm", [0, 1]), 40)
    samples = [make_sample(i, length=41 if i == 3 else 10) for i in range(6)]
    (excess,) = schedule_batch(make_plan([lm], [], 2), samples).over_memory
    assert (excess.sections, excess.samples, excess.held_bytes, excess.capacity_bytes) == (
        ("lm",),
        (3,),
        41,
        40,
    )


def test_a_forced_start_does_not_exceed_memory() -> None:
    """The consumer wants three samples at once, for which its producer has no room: one of them is computed
    alone."""
    vision = limit_bytes(dataclasses.replace(make_section("vision", [0]), in_flight=9), 20, "10*B")
    lm = dataclasses.replace(make_section("lm", [1], micro_batch=3), room_bytes=0)
    plan = make_plan([vision, lm], [make_edge("vision", "lm")], 2)
    samples = [make_sample(i) for i in range(3)]
    bounded = schedule_batch(plan, samples)
    check_schedule(plan, samples, bounded)
    assert not bounded.over_memory
    assert peak_bytes(plan, samples, bounded)[0] <= 20
    assert sorted(len(m.samples) for m in bounded.micro_batches["lm"]) == [1, 2]


def test_stages_hold_a_large_sample_alone() -> None:
    stages = [
        limit_bytes(s, 60)
        for s in make_stages("lm", [[0], [1]], in_flight=(2, 1), forward="S", backward="2*S")
    ]
    plan = make_plan(stages, stage_edges(stages), 2)
    samples = [make_sample(i, length=55 if i == 0 else 20) for i in range(5)]
    bounded = schedule_batch(plan, samples)
    check_schedule(plan, samples, bounded)
    assert not bounded.over_memory
    assert max(peak_bytes(plan, samples, bounded).values()) == 55


def test_a_backward_without_room_between_its_parts_runs_whole() -> None:
    """Of 60 bytes, a sample of 50 keeps 50 from its forward on, and 75 between the parts of a split
    backward."""
    stages = [
        dataclasses.replace(limit_bytes(s, 60, "S", "S//2"), weight_permille=400)
        for s in make_stages("lm", [[0], [1]], in_flight=(2, 1), forward="S", backward="2*S")
    ]
    plan = make_plan(stages, stage_edges(stages), 2)
    samples = [make_sample(i, length=50 if i == 0 else 20) for i in range(5)]
    bounded = schedule_batch(plan, samples)
    check_schedule(plan, samples, bounded)
    assert not bounded.over_memory
    for name, whole in bounded.whole_backwards.items():
        assert [m.samples for m in bounded.micro_batches[name] if m.index in whole] == [(0,)]
    assert bounded.whole_backwards.keys() == {"lm_0", "lm_1"}
    assert max(peak_bytes(plan, samples, bounded).values()) == 50
    assert parse_schedule(print_schedule(bounded)).whole_backwards == bounded.whole_backwards
    taken: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
    for event in simulate(plan, samples, bounded).compute:
        taken[event.section, event.micro][event.kind] = event.end - event.start
    for m in bounded.micro_batches["lm_0"]:
        expected = (99, 1) if m.samples == (0,) else (24, 16)
        assert (taken["lm_0", m.index]["B"], taken["lm_0", m.index]["W"]) == expected


@given(random_plans(), random_batches)
@settings(max_examples=150, deadline=None)
def test_only_single_samples_exceed_memory(plan: Plan, samples: list[SampleMeta]) -> None:
    schedule = schedule_batch(plan, samples)
    check_schedule(plan, samples, schedule)
    peaks = peak_bytes(plan, samples, schedule)
    named = {e.rank for e in schedule.over_memory}
    for rank, capacity in rank_capacity(plan).items():
        if not any(s.may_deal for s in plan.sections):
            assert peaks[rank] <= capacity or named
    for excess in schedule.over_memory:
        assert len(excess.samples) == 1
        assert excess.held_bytes > excess.capacity_bytes
