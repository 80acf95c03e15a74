"""Cross-step prefetch: which sections may prefetch, spliced schedules, their memory, checks and bounds."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secc.bounds.bounds import schedule_bound
from secc.bounds.steady_state import mean_step_bound
from secc.bounds.work import BatchWork
from secc.runtime.errors import UserError
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import parse_schedule, print_schedule
from secc.runtime.schedule.cross_step_prefetch import (
    find_prefetchable_sections,
    splice_prefetch,
    with_prefetch_memory,
)
from secc.runtime.schedule.scheduler import schedule_batch
from secc.runtime.validation.fast_check import is_valid_schedule
from secc.runtime.validation.full_check import ScheduleError, check_schedule
from secc.simulate.simulator import simulate
from secc.simulate.steady_state import consecutive_steps, steady_state_steps
from secc.simulate.step_measures import memory_over_time
from tests.runtime.schedule.plan_strategies import (
    cost_texts,
    make_edge,
    make_plan,
    make_sample,
    make_section,
    make_stages,
    random_batches,
    stage_edges,
    with_expert_parts,
    with_prefetch_memory_for,
)
from tests.runtime.validation.test_schedule_checks import is_explained, replace_program
from tests.simulate.test_simulator import cluster


def distillation_plan(teachers=2, students=2, load=1.0, room=0, mode="forward"):
    """Returns a teacher and a student on ranks of their own, with prefetch memory for `room` samples."""
    ns = int(100 * load * 3 * teachers / students)
    teacher = make_section("teacher", range(teachers), mode=mode, forward=f"{ns}*S")
    student = make_section("student", range(teachers, teachers + students), forward="100*S", backward="200*S")
    return with_prefetch_memory_for(
        make_plan(
            [teacher, student], [make_edge("teacher", "student", grad=mode != "forward")], teachers + students
        ),
        room,
    )


def prefetchable_names(p):
    return [s.name for s in find_prefetchable_sections(p, SectionGraph(p))]


def test_frozen_sections_with_frozen_inputs_may_prefetch():
    frozen, tower = (
        make_section("frozen", [0], mode="forward"),
        make_stages("tower", [[1], [2]], mode="forward"),
    )
    lm = make_section("lm", [3])
    chain = [
        make_edge("frozen", "tower_0", grad=False),
        *stage_edges(tower, grad=False),
        make_edge("tower_1", "lm", grad=False),
    ]
    assert prefetchable_names(make_plan([lm, *tower, frozen], chain, 4)) == ["frozen", "tower_0", "tower_1"]
    assert (
        prefetchable_names(make_plan([lm, *tower, make_section("frozen", [0])], chain, 4)) == []
    )  # it trains
    assert (
        prefetchable_names(make_plan([lm, *tower, make_section("frozen", [3], mode="forward")], chain, 4))
        == []
    )  # it shares a rank with what trains


def test_a_section_with_trained_inputs_may_not_prefetch():
    p = distillation_plan()
    teacher, student = (dataclasses.replace(s, params=("embed.weight",)) for s in p.sections)
    model = dataclasses.replace(p.model, parameters={"embed.weight": "float32[8, 8] train"})
    assert prefetchable_names(dataclasses.replace(p, sections=(teacher, student), model=model)) == []
    with pytest.raises(UserError, match="no section of the plan can run ahead"):
        with_prefetch_memory(distillation_plan(mode="train"), 1.0)


def test_a_spliced_step_starts_with_prefetched_results_and_prefetches_for_the_next_step():
    p = distillation_plan(1, 1, room=1)
    samples = [make_sample(0, length=10), make_sample(1, length=20)]
    first, last = consecutive_steps(p, [samples, samples])
    assert [str(i) for i in first[1].programs[0]] == [
        "F teacher 0",
        "SEND teacher_to_student fwd 0>0 to 1",
        "F teacher 1",
        "SEND teacher_to_student fwd 1>1 to 1",
        "REDUCE teacher",
        "F teacher 2",
        "STEP",
    ]
    assert first[1].micro_batches["teacher"][2].samples == (2,) and first[1].own_samples == 2
    assert [str(i) for i in last[1].programs[0]] == [
        "SEND teacher_to_student fwd 0>0 to 1",
        "F teacher 1",
        "SEND teacher_to_student fwd 1>1 to 1",
        "REDUCE teacher",
        "STEP",
    ]
    assert parse_schedule(print_schedule(last[1])) == last[1]


def test_a_micro_batch_is_prefetched_although_its_inputs_have_later_start_times():
    """The tower's micro-batches hold one sample, the teacher's two, with the start time of the first one."""
    tower, teacher = (
        make_section(name, [0], mode="forward", forward="100*S", micro_batch=n)
        for name, n in (("tower", 1), ("teacher", 2))
    )
    student = make_section("student", [1], forward="100*S", backward="200*S")
    chain = [make_edge("tower", "teacher", grad=False), make_edge("teacher", "student", grad=False)]
    found = schedule_batch(
        with_prefetch_memory_for(make_plan([tower, teacher, student], chain, 2), 100),
        [make_sample(p, length=10 + p) for p in range(8)],
    )
    assert {name: len(micros) for name, micros in found.prefetchable.items()} == {"tower": 8, "teacher": 4}


def test_prefetched_results_take_memory_until_they_are_sent():
    """A row on the edge has 32 bytes; the teacher has neither parameters nor a backward."""
    p = dataclasses.replace(distillation_plan(1, 1, room=1), cluster=cluster())
    samples = [make_sample(0, length=10), make_sample(1, length=20)]
    first, last = (simulate(p, *step) for step in consecutive_steps(p, [samples, samples]))
    start = max(c.start for c in first.compute if c.rank == 0)
    sent = min(t.end for t in last.transfers)
    assert memory_over_time(first, 0) == [(0, 0), (start, 32)]
    assert memory_over_time(last, 0) == [(0, 0), (0, 32), (sent, 0)]


@st.composite
def random_frozen_plans(draw):
    """Draws one or two frozen sections or pipelines, in a chain or side by side, also on the same ranks and
    with another tp or with replicas that exchange tokens, and a student of both."""
    first = [
        make_section(
            "a",
            [0, 1],
            tp=draw(st.sampled_from([1, 1, 2])),
            mode="forward",
            micro_batch=draw(st.integers(1, 2)),
            forward=draw(cost_texts),
            when=draw(whens),
        )
    ]
    tp = draw(st.sampled_from([1, 2]))
    ranks = draw(st.sampled_from([[[2], [3]], [[0], [1]], [[1], [0]]] if tp == 1 else [[[2, 3]], [[0, 1]]]))
    second = make_stages(
        "b",
        ranks if tp > 1 else draw(st.sampled_from([ranks, [[2, 3]], [[0, 1]]])),
        tp=tp,
        mode="forward",
        micro_batch=draw(st.integers(1, 2)),
        forward=draw(cost_texts),
        when=draw(whens),
    )
    first, second = with_expert_parts(draw, first), with_expert_parts(draw, second)
    student = make_section(
        "lm", [4, 5], micro_batch=draw(st.integers(1, 2)), forward=draw(cost_texts), backward=draw(cost_texts)
    )
    edges = [
        make_edge("a", "lm", grad=False),
        *stage_edges(second, grad=False),
        make_edge(second[-1].name, "lm", grad=False),
    ]
    if draw(st.booleans()):
        edges.append(make_edge("a", second[0].name, grad=False))
    made = make_plan([*first, *second, student], edges, 6, draw(st.sampled_from(["own", "global"])))
    return with_prefetch_memory_for(made, draw(st.integers(0, 5)))


whens = st.sampled_from([(), ("images",)])


@given(
    random_frozen_plans(),
    st.lists(random_batches, min_size=1, max_size=3),
    st.sampled_from(["wavefront", "dataset"]),
)
@settings(max_examples=120)
def test_every_spliced_step_is_valid_and_not_shorter_than_its_bound(p, drawn, order):
    found = list(steady_state_steps(p, drawn, order))
    time = sum(simulate(p, samples, step).end for samples, step in found)
    assert time >= len(drawn) * mean_step_bound([BatchWork(p, samples) for samples in drawn]).ns - len(drawn)
    for samples, step in consecutive_steps(p, drawn, order):
        check_schedule(p, samples, step)
        assert is_explained(p, samples, step)


@given(random_frozen_plans(), random_batches, random_batches, st.data())
@settings(max_examples=120)
def test_fast_and_full_check_agree_on_spliced_steps(p, this, then, data):
    samples, step = next(iter(steady_state_steps(p, [this, then])))
    rank = data.draw(st.integers(0, p.world_size - 1))
    program = list(step.programs[rank])
    at, to = (data.draw(st.integers(0, len(program) - 1)) for _ in range(2))
    match data.draw(st.sampled_from(["lose", "move", "swap", "computed", "own"])):
        case "lose":
            del program[at]
        case "move":
            program.insert(to, program.pop(at))
        case "swap":
            program[at], program[to] = program[to], program[at]
        case "computed":
            name = data.draw(st.sampled_from([s.name for s in p.sections]))
            step = dataclasses.replace(
                step, prefetched=step.prefetched | {name: frozenset(data.draw(st.sets(st.integers(0, 4))))}
            )
        case _:
            step = dataclasses.replace(
                step, own_samples=data.draw(st.sampled_from([None, len(this), len(this) + 1]))
            )
    changed = replace_program(step, rank, program)
    assert is_valid_schedule(p, samples, changed) == is_explained(p, samples, changed)


def test_a_prefetched_trained_section_is_rejected():
    p = distillation_plan(1, 1, room=1)
    samples = [make_sample(0, length=10), make_sample(1, length=20)]
    _, step = next(iter(consecutive_steps(p, [samples, samples])))
    trained = distillation_plan(1, 1, mode="dgrad")
    alone = schedule_batch(trained, samples)
    wrong = splice_prefetch(
        trained, alone, 2, dataclasses.replace(alone, prefetchable={"teacher": frozenset([0])}), warm=False
    )
    check_schedule(p, samples * 2, step)
    with pytest.raises(ScheduleError, match="must not run ahead"):
        check_schedule(trained, samples * 2, wrong)


def test_a_loaded_teacher_delays_no_student():
    drawn = [[make_sample(i, length=20 + (37 * i + 11 * k) % 100) for i in range(64)] for k in range(3)]
    ratios = []
    for room in (0, 12):
        p = distillation_plan(2, 4, room=room)
        time = sum(simulate(p, samples, step).end for samples, step in steady_state_steps(p, drawn)) / 3
        ratios.append(time / mean_step_bound([BatchWork(p, samples) for samples in drawn]).ns)
    assert ratios[0] > 1.05 and ratios[1] < 1.01


def test_a_teacher_does_not_wait_for_images_of_ranks_with_long_samples():
    """Rank 0 or 1 ends its own step with a long text, and others want its images of the next step."""
    tower = make_section("tower", range(4), mode="forward", forward="500*I", when=("images",))
    teacher = make_section("teacher", range(4), mode="forward", forward="100*S", tp=2)
    student = make_section("student", range(4, 8), forward="20*S", backward="40*S")
    edges = [make_edge("tower", "teacher", grad=False), make_edge("teacher", "student", grad=False)]
    p = with_prefetch_memory_for(make_plan([tower, teacher, student], edges, 8), 2)
    samples = [
        make_sample(i, *(("images",) if i % 3 else ()), length=150 if i == 4 else 20 + 7 * i % 30)
        for i in range(8)
    ]
    ((both, step),) = steady_state_steps(p, [samples])
    assert simulate(p, both, step).end < 1.05 * mean_step_bound([BatchWork(p, samples)]).ns


def test_a_frozen_pipeline_fills_once_in_a_run():
    """Each stage has computed more of the next step than the one behind it, so none waits in a step."""
    teacher = make_stages("teacher", [[0], [1], [2], [3]], mode="forward", forward="100*S")
    student = make_section("student", range(4, 8), forward="100*S", backward="200*S")
    edges = [*stage_edges(teacher, grad=False), make_edge("teacher_3", "student", grad=False)]
    samples = [make_sample(i, length=20 + 37 * i % 80) for i in range(48)]
    p = make_plan([*teacher, student], edges, 8)
    hidden = 100 * 8 * 4  # bytes of the longest result
    p = dataclasses.replace(p, run_ahead_gib=20 * hidden / 2**30)
    ((both, step),) = steady_state_steps(p, [samples])
    ahead = [step.prefetched[s.name] for s in teacher]
    assert all(more > fewer for more, fewer in pairwise(ahead)) and len(ahead[-1]) >= len(ahead[0]) // 2 > 0
    assert simulate(p, both, step).end < 1.03 * mean_step_bound([BatchWork(p, samples)]).ns


def test_replicas_that_exchange_tokens_prefetch_whole_rounds():
    """Two pairs of replicas; the third round of one pair lacks a sample and is not prefetched."""
    teacher = make_section("teacher", range(4), mode="forward", forward="100*S")
    teacher = dataclasses.replace(teacher, mesh=dataclasses.replace(teacher.mesh, ep=2))
    student = make_section("student", range(4, 8), forward="20*S", backward="40*S")
    p = make_plan([teacher, student], [make_edge("teacher", "student", grad=False)], 8)
    samples = [make_sample(i, length=20 + i) for i in range(11)]
    for room, rounds in (0, [0, 0]), (2, [2, 2]), (100, [2, 3]):
        step = schedule_batch(with_prefetch_memory_for(p, room), samples)
        ahead = [step.micro_batches["teacher"][m] for m in step.prefetchable.get("teacher", ())]
        counts = [sum(m.replica == replica for m in ahead) for replica in range(4)]
        assert sorted(counts[::2]) == sorted(counts[1::2]) == rounds and counts[::2] == counts[1::2]
        assert all(m.samples for m in ahead)


def test_the_bound_of_one_batch_is_the_bound_of_steps_with_equal_batches():
    p, samples = distillation_plan(1, 2, load=3.0, room=2), [make_sample(i, length=10 + i) for i in range(6)]
    assert schedule_bound(p, samples).ns == mean_step_bound([BatchWork(p, samples)] * 2).ns
