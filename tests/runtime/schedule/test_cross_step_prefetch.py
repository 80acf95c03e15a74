"""Sections that run ahead: which ones may, what steps among others hold, and that they are as fast as they
can be."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secc.bounds.bounds import schedule_bound
from secc.bounds.steady_state import steady_bound
from secc.bounds.work import Work
from secc.runtime.errors import UserError
from secc.runtime.plan.section_graph import Graph
from secc.runtime.plan.step_program import parse_schedule, print_schedule
from secc.runtime.schedule.cross_step_prefetch import sections, spliced, with_run_ahead
from secc.runtime.schedule.scheduler import schedule
from secc.runtime.validation.fast_check import accepts
from secc.runtime.validation.full_check import ScheduleError, check
from secc.simulate.simulator import simulate
from secc.simulate.steady_state import consecutive, steady
from secc.simulate.step_measures import memory_over_time
from tests.runtime.schedule.plan_strategies import (
    batches,
    costs,
    edge,
    passes_on,
    plan,
    sample,
    section,
    stages,
    with_room,
)
from tests.runtime.validation.test_schedule_checks import explained, with_program
from tests.simulate.test_simulator import cluster


def distillation(teachers=2, students=2, load=1.0, room=0, mode="forward"):
    """A teacher and a student on ranks of their own; a rank may keep the results of `room` samples."""
    ns = int(100 * load * 3 * teachers / students)
    teacher = section("teacher", range(teachers), mode=mode, forward=f"{ns}*S")
    student = section("student", range(teachers, teachers + students), forward="100*S", backward="200*S")
    return with_room(
        plan([teacher, student], [edge("teacher", "student", grad=mode != "forward")], teachers + students),
        room,
    )


def names(p):
    return [s.name for s in sections(p, Graph(p))]


def test_what_no_update_changes_may_run_ahead():
    frozen, tower = section("frozen", [0], mode="forward"), stages("tower", [[1], [2]], mode="forward")
    lm = section("lm", [3])
    chain = [
        edge("frozen", "tower_0", grad=False),
        *passes_on(tower, grad=False),
        edge("tower_1", "lm", grad=False),
    ]
    assert names(plan([lm, *tower, frozen], chain, 4)) == ["frozen", "tower_0", "tower_1"]
    assert names(plan([lm, *tower, section("frozen", [0])], chain, 4)) == []  # it trains
    assert (
        names(plan([lm, *tower, section("frozen", [3], mode="forward")], chain, 4)) == []
    )  # it shares a rank with what trains


def test_a_section_that_reads_what_trains_may_not():
    p = distillation()
    teacher, student = (dataclasses.replace(s, params=("embed.weight",)) for s in p.sections)
    model = dataclasses.replace(p.model, parameters={"embed.weight": "float32[8, 8] train"})
    assert names(dataclasses.replace(p, sections=(teacher, student), model=model)) == []
    with pytest.raises(UserError, match="no section of the plan can run ahead"):
        with_run_ahead(distillation(mode="train"), 1.0)


def test_a_step_among_others_starts_with_results_and_ends_with_the_next_steps():
    p = distillation(1, 1, room=1)
    samples = [sample(0, length=10), sample(1, length=20)]
    first, last = consecutive(p, [samples, samples])
    assert [str(i) for i in first[1].programs[0]] == [
        "F teacher 0", "SEND teacher_to_student fwd 0>0 to 1", "F teacher 1", "SEND teacher_to_student fwd 1>1 to 1",
        "REDUCE teacher", "F teacher 2", "STEP",
    ]  # fmt: skip
    assert first[1].micro_batches["teacher"][2].samples == (2,) and first[1].own == 2
    assert [str(i) for i in last[1].programs[0]] == [
        "SEND teacher_to_student fwd 0>0 to 1", "F teacher 1", "SEND teacher_to_student fwd 1>1 to 1", "REDUCE teacher", "STEP",
    ]  # fmt: skip
    assert parse_schedule(print_schedule(last[1])) == last[1]


def test_a_micro_batch_runs_ahead_whose_samples_come_later_upstream():
    """The tower's micro-batches hold one sample, the teacher's two: its turn is that of the first one."""
    tower, teacher = (
        section(name, [0], mode="forward", forward="100*S", micro_batch=n)
        for name, n in (("tower", 1), ("teacher", 2))
    )
    student = section("student", [1], forward="100*S", backward="200*S")
    chain = [edge("tower", "teacher", grad=False), edge("teacher", "student", grad=False)]
    found = schedule(
        with_room(plan([tower, teacher, student], chain, 2), 100),
        [sample(p, length=10 + p) for p in range(8)],
    )
    assert {name: len(micros) for name, micros in found.early.items()} == {"tower": 8, "teacher": 4}


def test_results_for_the_next_step_take_memory_until_they_are_sent():
    """A row on the edge has 32 bytes; the teacher has neither parameters nor a backward."""
    p = dataclasses.replace(distillation(1, 1, room=1), cluster=cluster())
    samples = [sample(0, length=10), sample(1, length=20)]
    first, last = (simulate(p, *step) for step in consecutive(p, [samples, samples]))
    start = max(c.start for c in first.compute if c.rank == 0)
    sent = min(t.end for t in last.transfers)
    assert memory_over_time(first, 0) == [(0, 0), (start, 32)]
    assert memory_over_time(last, 0) == [(0, 0), (0, 32), (sent, 0)]


@st.composite
def frozen_plans(draw):
    """One or two frozen sections or pipelines, the second behind the first or beside it, and a student of
    both."""
    first = [
        section(
            "a",
            [0, 1],
            mode="forward",
            micro_batch=draw(st.integers(1, 2)),
            forward=draw(costs),
            when=draw(whens),
        )
    ]
    ranks = draw(st.sampled_from([[[2], [3]], [[2, 3]]]))
    second = stages(
        "b", ranks, mode="forward", micro_batch=draw(st.integers(1, 2)), forward=draw(costs), when=draw(whens)
    )
    student = section(
        "lm", [4, 5], micro_batch=draw(st.integers(1, 2)), forward=draw(costs), backward=draw(costs)
    )
    edges = [
        edge("a", "lm", grad=False),
        *passes_on(second, grad=False),
        edge(second[-1].name, "lm", grad=False),
    ]
    if draw(st.booleans()):
        edges.append(edge("a", second[0].name, grad=False))
    made = plan([*first, *second, student], edges, 6, draw(st.sampled_from(["own", "global"])))
    return with_room(made, draw(st.integers(0, 5)))


whens = st.sampled_from([(), ("images",)])


@given(frozen_plans(), st.lists(batches, min_size=1, max_size=3), st.sampled_from(["wavefront", "dataset"]))
@settings(max_examples=120)
def test_every_step_among_others_is_accepted_and_takes_as_long_as_its_bound_says(p, drawn, order):
    found = list(steady(p, drawn, order))
    time = sum(simulate(p, samples, step).end for samples, step in found)
    assert time >= len(drawn) * steady_bound([Work(p, samples) for samples in drawn]).ns - len(drawn)
    for samples, step in consecutive(p, drawn, order):
        check(p, samples, step)
        assert explained(p, samples, step)


@given(frozen_plans(), batches, batches, st.data())
@settings(max_examples=120)
def test_the_quick_pass_and_the_checks_agree_on_steps_among_others(p, this, then, data):
    samples, step = next(iter(steady(p, [this, then])))
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
                step, computed=step.computed | {name: frozenset(data.draw(st.sets(st.integers(0, 4))))}
            )
        case _:
            step = dataclasses.replace(step, own=data.draw(st.sampled_from([None, len(this), len(this) + 1])))
    changed = with_program(step, rank, program)
    assert accepts(p, samples, changed) == explained(p, samples, changed)


def test_what_trains_must_not_run_ahead():
    p = distillation(1, 1, room=1)
    samples = [sample(0, length=10), sample(1, length=20)]
    _, step = next(iter(consecutive(p, [samples, samples])))
    trained = distillation(1, 1, mode="dgrad")
    alone = schedule(trained, samples)
    wrong = spliced(
        trained, alone, 2, dataclasses.replace(alone, early={"teacher": frozenset([0])}), warm=False
    )
    check(p, samples * 2, step)
    with pytest.raises(ScheduleError, match="must not run ahead"):
        check(trained, samples * 2, wrong)


def test_a_loaded_teacher_delays_no_student():
    drawn = [[sample(i, length=20 + (37 * i + 11 * k) % 100) for i in range(64)] for k in range(3)]
    ratios = []
    for room in (0, 12):
        p = distillation(2, 4, room=room)
        time = sum(simulate(p, samples, step).end for samples, step in steady(p, drawn)) / 3
        ratios.append(time / steady_bound([Work(p, samples) for samples in drawn]).ns)
    assert ratios[0] > 1.05 and ratios[1] < 1.01


def test_the_bound_of_one_batch_is_that_of_steps_with_the_same_one():
    p, samples = distillation(1, 2, load=3.0, room=2), [sample(i, length=10 + i) for i in range(6)]
    assert schedule_bound(p, samples).ns == steady_bound([Work(p, samples)] * 2).ns
