"""Pipelines: stages process the same micro-batches in one order, keep to in-flight limits and are seldom
idle.
"""

from __future__ import annotations

import dataclasses
import json
from itertools import accumulate

import pytest
from hypothesis import given, settings

from secc.bounds.bounds import schedule_bound
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import Cost, Input, Symbol, plan_to_json
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.schedule.list_scheduler import TaskGraph, simulate_tasks, simulate_within
from secc.runtime.schedule.order_search import _OrderSearch
from secc.runtime.schedule.scheduler import schedule_batch, schedule_with_makespan
from secc.runtime.validation.full_check import check_schedule
from secc.simulate.simulator import simulate
from secc.simulate.step_measures import in_flight_over_time
from tests.runtime.schedule.plan_strategies import (
    KEYS,
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
from tests.runtime.schedule.test_scheduler import IMAGE, mixed_samples


def pipeline_plan(parts, replicas=1, room=(), encoder=False):
    """Returns a language model in `parts` stages, optionally fed by an encoder on its own rank.

    Ranks are ordered (dp, pp).
    """
    ranks = [[d * parts + i for d in range(replicas)] for i in range(parts)]
    lm, world = make_stages("lm", ranks, in_flight=room, forward="S", backward="2*S"), parts * replicas
    if not encoder:
        return make_plan(lm, stage_edges(lm), world)
    vision = make_section("vision", [world], when=IMAGE, forward="100*I", backward="200*I")
    return make_plan([vision, *lm], [make_edge("vision", "lm_0"), *stage_edges(lm)], world + 1)


def section_work(program, section):
    return [(i.kind, i.micro) for i in program if i.kind in "FB" and i.section == section]


def test_equal_micro_batches_run_as_1f1b():
    p = pipeline_plan(3, room=(3, 2, 1))
    step = schedule_batch(p, [make_sample(i, length=100) for i in range(5)])
    kinds = [
        "".join(k for k, _ in section_work(program, f"lm_{i}")) for i, program in enumerate(step.programs)
    ]
    assert kinds == ["FFFBFBFBBB", "FFBFBFBFBB", "FBFBFBFBFB"]


def test_no_search_if_all_micro_batches_are_equal(monkeypatch):
    lm = make_stages("lm", [[0], [1]], in_flight=(2, 1), forward="1000000*B", backward="2000000*B")
    p = make_plan(lm, stage_edges(lm), 2)
    expected = schedule_with_makespan(p, [make_sample(i) for i in range(8)])
    # The search would call it for each try.
    monkeypatch.setattr("secc.runtime.schedule.order_search.simulate_within", None)
    assert schedule_with_makespan(p, [make_sample(i) for i in range(8)]) == expected
    with pytest.raises(TypeError):
        schedule_with_makespan(
            dataclasses.replace(
                p,
                sections=make_stages(
                    "lm", [[0], [1]], in_flight=(2, 1), forward="100000*S", backward="200000*S"
                ),
            ),
            [make_sample(i, length=1 + i) for i in range(8)],
        )


def test_priorities_of_later_stages_are_not_tried(monkeypatch):
    """A later stage takes micro-batches as the first one starts them, so a swap there changes nothing: the
    search finds the same step with fewer simulations."""
    lm = [
        make_stages("lm", [[0, 2], [1, 3]], in_flight=(3, 2), forward="100000*S", backward=f"{backward}*S")
        for backward in (200000, 300000)
    ]
    batches = [[make_sample(i, length=1 + i * i % 23) for i in range(n)] for n in (7, 12, 16)]

    def find_steps() -> tuple[list[object], int]:
        tried = list[int]()

        def counted(graph, latest_end, rank_work_ns):
            tried.append(len(graph.rank_of))
            return simulate_within(graph, latest_end, rank_work_ns)

        monkeypatch.setattr("secc.runtime.schedule.order_search.simulate_within", counted)
        found = [schedule_with_makespan(make_plan(s, stage_edges(s), 4), b) for s in lm for b in batches]
        return found, len(tried)

    steps, tries = find_steps()
    init = _OrderSearch.__init__

    def without_followers(self, *given):
        init(self, *given)
        self.followers = set()

    monkeypatch.setattr(_OrderSearch, "__init__", without_followers)
    same_steps, more_tries = find_steps()
    assert steps == same_steps and tries < more_tries


def test_stages_without_messages_between_them_keep_one_order():
    """The last stage may work alone for samples of another tower, like a shared projector, with other
    urgencies.
    """
    first, last = make_stages(
        "image", [[1], [2]], in_flight=(1, 1), when=KEYS, forward="10*I", backward="20*I"
    )
    last = dataclasses.replace(last, cost=Cost("100 - S", "10*I"))
    towers = [make_section("video", [0], when=["audio"], micro_batch=2, backward="100*B"), first, last]
    edges = [
        make_edge("video", "image_1"),
        make_edge("image_0", "lm"),
        make_edge("image_1", "lm", name="late"),
    ]
    p = make_plan([*towers, make_section("lm", [3], micro_batch=2)], edges, 4)
    samples = [
        make_sample(0, "audio", length=22),
        make_sample(1, *KEYS, length=26),
        make_sample(2, *KEYS, length=24),
    ]
    step = schedule_batch(p, samples)
    check_schedule(p, samples, step)
    orders = [
        [m for kind, m in section_work(step.programs[1 + i], f"image_{i}") if kind == "F"] for i in (0, 1)
    ]
    assert orders[0] == orders[1]


@pytest.mark.parametrize("room", [(3, 2, 1), (6, 6, 6), (1, 1, 1), (0, 0, 0)])
def test_stages_take_ragged_micro_batches_in_one_order(room):
    p, samples = pipeline_plan(3, replicas=2, room=room, encoder=True), mixed_samples(24, 0.4, seed=4)
    step = schedule_batch(p, samples)
    check_schedule(p, samples, step)
    for replica in range(2):
        orders = {
            tuple(m for k, m in section_work(step.programs[3 * replica + i], f"lm_{i}") if k == "F")
            for i in range(3)
        }
        assert len(orders) == 1
    assert len({tuple(m[2:] for m in step.micro_batches[f"lm_{i}"]) for i in range(3)}) == 1


@pytest.mark.parametrize("room", [(3, 2, 1), (6, 6, 6), (1, 1, 1)])
def test_a_stage_keeps_to_its_in_flight_limit(room):
    p, samples = pipeline_plan(3, room=room), [make_sample(i, length=50 + 37 * i % 200) for i in range(16)]
    done = simulate(p, samples, schedule_batch(p, samples))
    assert [max(n for _, n in in_flight_over_time(done, rank)) <= room[rank] for rank in range(3)] == [
        True
    ] * 3


@pytest.mark.parametrize("room", [1, 2, 5])
def test_an_encoder_keeps_to_its_in_flight_limit(room):
    vision = dataclasses.replace(
        make_section("vision", [0], when=IMAGE, forward="100*I", backward="200*I"), in_flight=room
    )
    p = make_plan(
        [vision, make_section("lm", [1, 2], forward="S", backward="2*S")], [make_edge("vision", "lm")], 3
    )
    samples = mixed_samples(24, 0.6, seed=4)
    done = simulate(p, samples, schedule_batch(p, samples))
    assert max(n for _, n in in_flight_over_time(done, 0)) == room


def peak_saved_bytes(step, rank, saved):
    """Returns the peak of the bytes that micro-batches save on a rank."""
    sizes = {
        m.index: sum(saved(step.samples[p]) for p in m.samples) for m in step.schedule.micro_batches["vision"]
    }
    ends = [
        (c.start, sizes[c.micro]) if c.kind == "F" else (c.end, -sizes[c.micro])
        for c in step.compute
        if c.rank == rank
    ]
    return max(accumulate(change for _, change in sorted(ends)))


@pytest.mark.parametrize("room", [40, 70])
def test_an_encoder_keeps_to_its_byte_limit(room):
    """Some samples have eight images, most have one."""
    encoder = dataclasses.replace(
        make_section("vision", [0], when=IMAGE, forward="100*I", backward="200*I"), in_flight=6
    )
    samples = [make_sample(i, *IMAGE, images=8 if i % 5 == 0 else 1) for i in range(30)]

    def most(vision):
        p = make_plan(
            [vision, make_section("lm", [1, 2], forward="S", backward="2*S")], [make_edge("vision", "lm")], 3
        )
        return peak_saved_bytes(
            simulate(p, samples, schedule_batch(p, samples)), 0, lambda s: 5 * s.sizes["I"]
        )

    assert most(limit_bytes(encoder, 0, "5*I")) > room
    assert most(limit_bytes(encoder, room, "5*I")) <= room


def test_a_sample_above_the_byte_limit_runs_alone():
    encoder = limit_bytes(
        dataclasses.replace(
            make_section("vision", [0], when=IMAGE, forward="100*I", backward="200*I"), in_flight=4
        ),
        20,
        "5*I",
    )
    p = make_plan(
        [encoder, make_section("lm", [1], forward="S", backward="2*S")], [make_edge("vision", "lm")], 2
    )
    samples = [make_sample(i, *IMAGE, images=8 if i == 3 else 1) for i in range(8)]
    assert (
        peak_saved_bytes(simulate(p, samples, schedule_batch(p, samples)), 0, lambda s: 5 * s.sizes["I"])
        == 40
    )


@pytest.mark.parametrize("critical", [False, True])
def test_micro_batches_of_several_samples_fit_the_byte_limit(critical):
    """Also if the section is cut by another section's start times."""
    lm = limit_bytes(
        make_section("lm", [0, 1], micro_batch=4, forward="1000 + B*S", backward="1000 + 2*B*S"), 100, "B*S"
    )
    other = make_section("head", [2], forward="1" if critical else "9000*B*S", backward="1")
    p = make_plan([lm, other], [make_edge("lm", "head")], 3)
    samples = [make_sample(i, length=60 if i % 4 == 0 else 12) for i in range(24)]
    sizes = [
        [samples[p].sizes["S"] for p in m.samples] for m in schedule_batch(p, samples).micro_batches["lm"]
    ]
    assert sorted(s for lengths in sizes for s in lengths) == sorted(s.sizes["S"] for s in samples)
    assert (
        all(len(lengths) == 1 or len(lengths) * max(lengths) <= 100 for lengths in sizes)
        and max(map(len, sizes)) > 1
    )


def test_a_section_on_the_ranks_of_a_pipeline_does_not_run_forwards_first():
    """Only sections that feed other ranks do; stages list the same ranks in another order."""
    lm = make_stages("lm", [[0, 2], [1, 3]])
    vision = [make_section("vision", ranks, when=IMAGE) for ranks in (range(4), range(4, 8))]
    graphs = [
        SectionGraph(make_plan([v, *lm], [make_edge("vision", "lm_0"), *stage_edges(lm)], 8)) for v in vision
    ]
    assert [g.runs_forwards_first(v) for g, v in zip(graphs, vision, strict=True)] == [False, True]


def test_the_in_flight_limit_yields_to_a_consumer_that_needs_more_at_once():
    lm = make_stages("lm", [[0], [1]], in_flight=(1, 1), forward="S", backward="2*S")
    judge = make_section("judge", [2], micro_batch=4, forward="S", backward="2*S")
    p = make_plan([*lm, judge], [*stage_edges(lm), make_edge("lm_1", "judge")], 3)
    samples = [make_sample(i, length=100) for i in range(8)]
    check_schedule(p, samples, schedule_batch(p, samples))


def test_the_in_flight_limit_is_not_filled_with_parts_of_several_micro_batches():
    """Each replica holds two images, and the language model wants them in pairs by text length, not by image
    size.
    """
    vision = dataclasses.replace(
        make_section("vision", [0, 1], when=IMAGE, forward="10*I", backward="20*I"), in_flight=2
    )
    lm = make_section("lm", [0, 1], micro_batch=2, forward="1000 + B*S", backward="2*B*S")
    p = make_plan([vision, lm], [make_edge("vision", "lm")], 2)
    samples = [make_sample(i, *IMAGE, images=1 + i % 4, length=100 * (1 + i // 4)) for i in range(16)]
    work = sum(30 * s.sizes["I"] + 500 + 3 * s.sizes["S"] for s in samples)
    assert schedule_with_makespan(p, samples)[1] <= 1.01 * work / 2


def test_weight_gradients_fill_idle_time():
    whole, samples = pipeline_plan(4, room=(8, 8, 8, 8)), [make_sample(i, length=100) for i in range(8)]
    split = dataclasses.replace(
        whole, sections=tuple(dataclasses.replace(s, weight_permille=500) for s in whole.sections)
    )
    step = schedule_batch(split, samples)
    kinds = ["".join(i.kind for i in program if i.kind in "FBW") for program in step.programs]
    assert all(k.count("W") == k.count("B") == k.count("F") == 8 for k in kinds)
    assert kinds[0].endswith("BWW") and not kinds[3].startswith("FBW")
    assert (
        simulate(split, samples, step).end
        < 0.9 * simulate(whole, samples, schedule_batch(whole, samples)).end
    )
    assert simulate(split, samples, step).end < 1.1 * schedule_bound(split, samples).ns


@pytest.mark.parametrize("parts", [(0, 500, 500), (500, 0, 500), (500, 500, 0)])
def test_only_some_stages_may_have_split_backwards(parts):
    whole, samples = pipeline_plan(3, room=(6, 6, 6)), [make_sample(i, length=100 + 7 * i) for i in range(8)]
    p = dataclasses.replace(
        whole,
        sections=tuple(
            dataclasses.replace(s, weight_permille=n) for s, n in zip(whole.sections, parts, strict=True)
        ),
    )
    step = schedule_batch(p, samples)
    check_schedule(p, samples, step)
    assert [sum(i.kind == "W" for i in program) for program in step.programs] == [8 * (n > 0) for n in parts]


@given(random_plans(), random_batches)
@settings(max_examples=60)
def test_stages_have_the_same_micro_batches(p, samples):
    step = schedule_batch(p, samples)
    check_schedule(p, samples, step)
    for parts in p.pipelines.values():
        assert len({tuple((m.replica, m.samples) for m in step.micro_batches[s.name]) for s in parts}) == 1


def test_more_in_flight_helps_ragged_micro_batches_and_all_are_near_the_bound():
    samples = mixed_samples(32, 0.0, seed=5)
    times = {
        room: schedule_with_makespan(p, samples)[1] / schedule_bound(p, samples).ns
        for room, p in _plans_by_limit().items()
    }
    assert times[8] <= times[4] <= 1.35
    assert times[8] < 1.2


def _plans_by_limit():
    return {n: pipeline_plan(4, room=(n, max(n - 1, 1), max(n - 2, 1), 1)) for n in (4, 8)}


@given(random_plans())
@settings(max_examples=30)
def test_plan_json_shows_user_sections_with_their_stages(p):
    data = json.loads(plan_to_json(p))
    assert list(data["sections"]) == list(p.pipelines)
    for name, parts in p.pipelines.items():
        mesh = data["sections"][name]["mesh"]
        assert (mesh["pp"], len(mesh["ranks"])) == (len(parts), sum(len(s.mesh.ranks) for s in parts))


def test_plan_json_is_read_back(tmp_path):
    images = Input("images", "float32", ("I",), optional=True)
    p = pipeline_plan(3, replicas=2, encoder=True)
    p = dataclasses.replace(
        p,
        global_batch=8,
        inputs=(images,),
        symbols=(Symbol("I", "rows", "images", 0), Symbol("S", "width", "ids", 1)),
        sections=tuple(
            dataclasses.replace(s, module=f"sections/part_{i}.py") for i, s in enumerate(p.sections)
        ),
        edges=tuple(dataclasses.replace(e, when=p.find_section(e.src).when) for e in p.edges),
    )
    (tmp_path / "plan.json").write_text(plan_to_json(p))
    assert load_plan(tmp_path) == p
    assert json.loads(plan_to_json(p))["sections"]["lm"]["mesh"] == {
        "ranks": [0, 1, 2, 3, 4, 5],
        "dp": 2,
        "pp": 3,
        "tp": 1,
        "cp": 1,
        "ep": 1,
    }


def test_followers_run_in_the_order_of_the_leading_line():
    graph = TaskGraph(
        2,
        rank_of=[0, 0, 1, 1],
        duration_ns=[1, 1, 5, 5],
        successors=[[2], [3], [], []],
        predecessor_count=[0, 0, 1, 1],
        priority=[1, 0, 2, 3],
    )
    graph.follow_order(range(0, 2), range(2, 4))
    assert simulate_tasks(graph).order == [1, 0, 3, 2]
