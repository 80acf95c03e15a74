"""The fast and the full check of schedules: they accept what the scheduler makes and explain what is wrong
otherwise.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from secc.runtime.plan.step_program import Schedule, parse_instruction, parse_schedule
from secc.runtime.schedule.scheduler import schedule_batch
from secc.runtime.validation.fast_check import is_valid_schedule
from secc.runtime.validation.full_check import ScheduleChecker, ScheduleError, check_schedule
from tests.runtime.schedule.plan_strategies import (
    make_edge,
    make_plan,
    make_sample,
    make_section,
    random_batches,
    random_plans,
)

VLM_PLAN = make_plan(
    [make_section("vision", [0], when=("images",)), make_section("lm", [1])], [make_edge("vision", "lm")], 2
)
IMAGE_SAMPLES = [make_sample(0, "images"), make_sample(1, "images")]
VLM_SCHEDULE = parse_schedule(
    """
section vision
  micro 0 replica 0 samples 0
  micro 1 replica 0 samples 1
section lm
  micro 0 replica 0 samples 0
  micro 1 replica 0 samples 1
rank 0
  F vision 0
  SEND vision_to_lm fwd 0>0 to 1
  F vision 1
  SEND vision_to_lm fwd 1>1 to 1
  RECV vision_to_lm bwd 0>0 from 1
  B vision 0
  RECV vision_to_lm bwd 1>1 from 1
  B vision 1
  REDUCE vision
  STEP
rank 1
  RECV vision_to_lm fwd 0>0 from 0
  F lm 0
  B lm 0
  SEND vision_to_lm bwd 0>0 to 0
  RECV vision_to_lm fwd 1>1 from 0
  F lm 1
  B lm 1
  SEND vision_to_lm bwd 1>1 to 0
  REDUCE lm
  STEP
""".lstrip()
)


def move_instruction(step: Schedule, rank: int, text: str, to: int) -> Schedule:
    """Returns the schedule with one instruction of a rank at another place."""
    program = [i for i in step.programs[rank] if str(i) != text]
    assert len(program) == len(step.programs[rank]) - 1
    program.insert(to, parse_instruction(text))
    return replace_program(step, rank, program)


def replace_program(step: Schedule, rank: int, program) -> Schedule:
    programs = list(step.programs)
    programs[rank] = tuple(program)
    return dataclasses.replace(step, programs=tuple(programs))


@given(random_plans(), random_batches, st.sampled_from(["wavefront", "dataset"]))
@settings(max_examples=150)
def test_every_schedule_of_the_scheduler_is_valid(p, samples, order):
    check_schedule(p, samples, schedule_batch(p, samples, order=order))


@given(random_plans(), random_batches, st.data())
@settings(max_examples=60)
def test_a_lost_instruction_is_caught(p, samples, data):
    step = schedule_batch(p, samples)
    rank = data.draw(st.integers(0, p.world_size - 1))
    lost = data.draw(st.integers(0, len(step.programs[rank]) - 1))
    with pytest.raises(ScheduleError):
        check_schedule(
            p,
            samples,
            replace_program(step, rank, step.programs[rank][:lost] + step.programs[rank][lost + 1 :]),
        )


@given(random_plans(), random_batches, st.data())
@settings(max_examples=150)
def test_fast_and_full_check_agree(p, samples, data):
    """On schedules with an instruction changed, moved, doubled or replaced by another."""
    step = schedule_batch(p, samples)
    rank = data.draw(st.integers(0, p.world_size - 1))
    program = list(step.programs[rank])
    at, to = (data.draw(st.integers(0, len(program) - 1)) for _ in range(2))
    field = data.draw(st.sampled_from(["replica", "stage", "micro", "peer", "src_micro", "dst_micro"]))
    match data.draw(st.sampled_from(["field", "kind", "move", "double", "swap"])):
        case "field":
            program[at] = program[at]._replace(**{field: data.draw(st.integers(-1, 2))})
        case "kind":
            program[at] = program[at]._replace(
                kind=data.draw(st.sampled_from(["F", "B", "W", "SEND", "RECV", "REDUCE", "STEP"]))
            )
        case "move":
            program.insert(to, program.pop(at))
        case "double":
            program.insert(to, program[at])
        case "swap":
            program[at], program[to] = program[to], program[at]
    changed = replace_program(step, rank, program)
    assert is_valid_schedule(p, samples, changed) == is_explained(p, samples, changed)


def is_explained(p, samples, step) -> bool:
    """Returns whether the full check finds no error."""
    checker = ScheduleChecker(p, samples, step)
    try:
        parts = (
            checker.check_micro_batches,
            checker.check_prefetch,
            checker.check_instructions,
            checker.check_order,
            checker.check_channels,
        )
        for part in (*parts, lambda: checker.check_deadlock(False)):
            part()
    except ScheduleError:
        return False
    return True


@given(random_plans(), random_batches, st.data())
@settings(max_examples=60)
def test_a_lost_sample_is_caught(p, samples, data):
    step = schedule_batch(p, samples)
    micros = [m for ms in step.micro_batches.values() for m in ms if m.samples]
    assume(micros)
    chosen = data.draw(st.sampled_from(micros))
    fewer = chosen._replace(samples=chosen.samples[1:])
    changed = {
        name: tuple(fewer if m is chosen else m for m in ms) for name, ms in step.micro_batches.items()
    }
    with pytest.raises(ScheduleError, match=chosen.section):
        check_schedule(p, samples, Schedule(changed, step.programs))


def test_the_example_is_valid():
    check_schedule(VLM_PLAN, IMAGE_SAMPLES, VLM_SCHEDULE)


def test_swapped_messages_of_a_channel_are_caught():
    swapped = move_instruction(VLM_SCHEDULE, 1, "RECV vision_to_lm fwd 1>1 from 0", to=0)
    with pytest.raises(ScheduleError, match="delivers in order"):
        check_schedule(VLM_PLAN, IMAGE_SAMPLES, swapped)


def test_an_instruction_before_its_input_is_caught():
    with pytest.raises(ScheduleError, match="rank 1 has `B lm 1` before `F lm 1`"):
        check_schedule(VLM_PLAN, IMAGE_SAMPLES, move_instruction(VLM_SCHEDULE, 1, "B lm 1", to=5))
    with pytest.raises(ScheduleError, match="rank 0 has `B vision 1` before `RECV"):
        check_schedule(VLM_PLAN, IMAGE_SAMPLES, move_instruction(VLM_SCHEDULE, 0, "B vision 1", to=5))


def test_a_message_to_the_wrong_rank_or_twice_is_caught():
    doubled = replace_program(VLM_SCHEDULE, 0, [*VLM_SCHEDULE.programs[0][:2], *VLM_SCHEDULE.programs[0][1:]])
    with pytest.raises(ScheduleError, match="twice"):
        check_schedule(VLM_PLAN, IMAGE_SAMPLES, doubled)
    astray = replace_program(
        VLM_SCHEDULE, 0, [i._replace(peer=0) if i.kind == "SEND" else i for i in VLM_SCHEDULE.programs[0]]
    )
    with pytest.raises(ScheduleError, match="which no micro-batch needs"):
        check_schedule(VLM_PLAN, IMAGE_SAMPLES, astray)


def test_a_deadlock_is_shown_with_its_cells_marked():
    circle = move_instruction(VLM_SCHEDULE, 0, "RECV vision_to_lm bwd 0>0 from 1", to=1)
    with pytest.raises(ScheduleError) as caught:
        check_schedule(VLM_PLAN, IMAGE_SAMPLES, circle)
    text = str(caught.value)
    assert (
        "deadlock: rank 0 at `RECV vision_to_lm bwd 0>0 from 1` "
        "waits for `SEND vision_to_lm bwd 0>0 to 0` on rank 1; "
        "rank 1 at `RECV vision_to_lm fwd 0>0 from 0` "
        "waits for `SEND vision_to_lm fwd 0>0 to 1` on rank 0"
    ) in text
    grid = [line.split() for line in text.splitlines()[1:]]
    assert grid[0] == ["rank", "0", "rank", "1"]
    assert grid[1] == ["0", "F", "vision", "0", ">", "0", "RECV", "vision_to_lm", "fwd", "0>0", "from", "0"]
    assert grid[2] == [">", "1", "RECV", "vision_to_lm", "bwd", "0>0", "from", "1", "1", "F", "lm", "0"]


def test_reductions_in_different_orders_are_caught():
    p = make_plan([make_section("a", [0, 1]), make_section("b", [0, 1])], [], 2)
    step = schedule_batch(p, [])
    with pytest.raises(ScheduleError, match=r"deadlock: .*REDUCE a"):
        check_schedule(
            p, [], replace_program(step, 1, [step.programs[1][1], step.programs[1][0], step.programs[1][2]])
        )


def test_strict_sends_wait_for_their_receives():
    """The encoder's second forward is sent while the language model offers a gradient: a deadlock unless
    sends are posted.
    """
    with pytest.raises(ScheduleError, match="deadlock"):
        check_schedule(VLM_PLAN, IMAGE_SAMPLES, VLM_SCHEDULE, strict=True)
    alternating = move_instruction(VLM_SCHEDULE, 0, "RECV vision_to_lm bwd 0>0 from 1", to=2)
    check_schedule(VLM_PLAN, IMAGE_SAMPLES, alternating, strict=True)


ZERO3_PLAN = make_plan([make_section("lm", [0, 1], sharding="zero3")], [], 2)


def test_zero3_replicas_run_in_rounds():
    """Three samples on two replicas: the second replica joins the last round with an empty micro-batch."""
    step = schedule_batch(ZERO3_PLAN, [make_sample(i, length=30 - i) for i in range(3)])
    counts = [[len(m.samples) for m in step.micro_batches["lm"] if m.replica == r] for r in (0, 1)]
    assert sorted(counts) == [[1, 0], [1, 1]]
    check_schedule(ZERO3_PLAN, [make_sample(i, length=30 - i) for i in range(3)], step)
    fewer = Schedule({"lm": tuple(m for m in step.micro_batches["lm"] if m.samples)}, step.programs)
    with pytest.raises(ScheduleError, match="must have equally many to gather parameters"):
        check_schedule(ZERO3_PLAN, [make_sample(i, length=30 - i) for i in range(3)], fewer)


def test_replicas_that_exchange_tokens_have_equally_many_micro_batches():
    """Four replicas in two groups: of five samples, one group has a round of a single sample."""
    section = make_section("lm", [0, 1, 2, 3])
    section = dataclasses.replace(section, mesh=dataclasses.replace(section.mesh, ep=2))
    p, samples = make_plan([section], [], 4), [make_sample(i, length=30 - i) for i in range(5)]
    step = schedule_batch(p, samples)
    counts = [[len(m.samples) for m in step.micro_batches["lm"] if m.replica == r] for r in range(4)]
    assert sorted(counts) == [[1], [1], [1, 0], [1, 1]]
    check_schedule(p, samples, step)
    fewer = Schedule({"lm": tuple(m for m in step.micro_batches["lm"] if m.samples)}, step.programs)
    with pytest.raises(ScheduleError, match="each 2 in a row must have equally many"):
        check_schedule(p, samples, fewer)


def test_zero3_replicas_in_different_orders_are_caught():
    samples = [make_sample(i) for i in range(4)]
    step = schedule_batch(ZERO3_PLAN, samples)
    first, second, third, fourth, *rest = step.programs[1]
    assert str(second).startswith("B") and str(third).startswith("F")
    with pytest.raises(ScheduleError) as caught:
        check_schedule(ZERO3_PLAN, samples, replace_program(step, 1, [first, third, second, fourth, *rest]))
    text = str(caught.value)
    assert (
        "deadlock: rank 0 at `B lm 0` waits for `B lm 2 replica 1` on rank 1; "
        "rank 1 at `F lm 3 replica 1` waits for"
    ) in text
    assert [line.count(">") for line in text.splitlines()[1:]] == [0, 0, 2, 0, 0, 0, 0]
