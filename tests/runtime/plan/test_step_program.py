"""The text form of step programs reads back as what was printed, and refuses what is not a program."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secc.runtime.plan.program_table import InstructionNames, ProgramTable
from secc.runtime.plan.schema import Edge
from secc.runtime.plan.step_program import (
    Instruction,
    MicroBatch,
    Schedule,
    micro_batch_pairs,
    parse_instruction,
    parse_schedule,
    print_instruction,
    print_schedule,
)

names = st.from_regex(r"[a-z_][a-z0-9_.]{0,8}", fullmatch=True)
small = st.integers(0, 300)
compute = st.builds(lambda *fields: Instruction(*fields), st.sampled_from("FBW"), names, small, small, small)
transfer = st.builds(
    lambda kind, *fields: Instruction(kind, "", 0, 0, -1, *fields),
    st.sampled_from(["SEND", "RECV"]),
    names,
    st.sampled_from(["fwd", "bwd"]),
    small,
    small,
    small,
)
closing = st.one_of(
    st.builds(lambda *fields: Instruction(*fields), st.just("REDUCE"), names, small, small),
    st.just(Instruction("STEP")),
)
instructions = st.one_of(compute, transfer, closing)
micro_batches = st.lists(st.tuples(small, st.lists(small, max_size=4)), max_size=4)


def schedule_of(
    sections: dict[str, list[tuple[int, list[int]]]], programs: list[list[Instruction]]
) -> Schedule:
    micros = {
        name: tuple(
            MicroBatch(i, name, replica, tuple(samples)) for i, (replica, samples) in enumerate(entries)
        )
        for name, entries in sections.items()
    }
    return Schedule(micros, tuple(map(tuple, programs)))


@given(instructions)
def test_an_instruction_reads_back(instruction):
    assert parse_instruction(print_instruction(instruction)) == instruction


@given(
    st.dictionaries(names, micro_batches, max_size=3),
    st.lists(st.lists(instructions, max_size=5), max_size=3),
)
def test_a_schedule_reads_back(sections, programs):
    schedule = schedule_of(sections, programs)
    assert parse_schedule(print_schedule(schedule)) == schedule


@given(st.lists(st.lists(instructions, max_size=5).map(tuple), max_size=3))
def test_a_program_table_equals_the_programs_it_was_built_from(programs):
    read = ProgramTable.from_programs(programs, InstructionNames.from_programs(programs))
    made = ProgramTable(read.names, read.columns, read.program_ends)
    assert made[1:] == tuple(programs[1:]) and made == tuple(programs)  # some by themselves, then all at once


def test_text_names_micro_batches_in_the_direction_of_the_data():
    gradient = Instruction("SEND", edge="features", direction="bwd", peer=0, src_micro=3, dst_micro=1)
    assert print_instruction(gradient) == "SEND features bwd 1>3 to 0"
    assert parse_instruction("RECV features fwd 3>1 from 0").src_micro == 3
    assert print_instruction(Instruction("F", "lm", replica=2, micro=1)) == "F lm 1 replica 2"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "G lm 1",
        "F lm",
        "F lm one",
        "SEND e fwd 1>2 from 0",
        "RECV e up 1>2 from 0",
        "F lm 1 replica",
        "STEP now",
        "SEND e fwd 1 to 0",
    ],
)
def test_other_text_is_rejected(text):
    with pytest.raises(ValueError):
        parse_instruction(text)


def test_an_error_names_the_line_of_the_schedule():
    with pytest.raises(ValueError, match=r"line 2 .*Q lm 1"):
        parse_schedule("rank 0\n  Q lm 1\n")


def test_pairs_have_the_samples_of_both_micro_batches():
    edge = Edge("features", "vision", "lm", "float32", ("B",), 0, "1", True)
    schedule = schedule_of({"vision": [(0, [1, 4]), (1, [2])], "lm": [(0, [0, 1, 2]), (0, [3, 4])]}, [])
    assert micro_batch_pairs(edge, schedule) == {(0, 0): (1,), (1, 0): (2,), (0, 1): (4,)}
