"""Rounds of `--comm rounds`: each message is in one round, both of its ranks enter the rounds in one
order, and no rank waits forever."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings

from secc.runtime.comm.p2p_rounds import RoundsByInstruction, plan_rounds
from secc.runtime.plan.step_program import Instruction, Schedule
from secc.runtime.schedule.scheduler import schedule_batch
from secc.runtime.validation.full_check import check_schedule
from tests.runtime.schedule.plan_strategies import random_batches, random_plans


def as_messages(step: Schedule, entries: list[RoundsByInstruction]) -> Schedule:
    """The programs with sends and receives where ranks enter exchanges, so that the check for blocking sends
    can be asked."""
    programs: list[tuple[Instruction, ...]] = []
    for program, entered in zip(step.programs, entries, strict=True):
        transfers = {
            (i.kind, i.edge, i.direction, i.src_micro, i.dst_micro, i.peer): i
            for i in program
            if i.kind in ("SEND", "RECV")
        }
        made: list[Instruction] = []
        for index, i in enumerate(program):
            for exchange in entered.get(index, ()):
                for kind, numbered in (("SEND", exchange.sends), ("RECV", exchange.receives)):
                    made += [transfers.pop((kind, m.edge, m.direction, *m.pair, m.peer)) for _, m in numbered]
            made += [i] if i.kind not in ("SEND", "RECV") else []
        assert not transfers
        programs.append(tuple(made))
    return dataclasses.replace(step, programs=tuple(programs))


@given(random_plans(), random_batches)
@settings(max_examples=60)
def test_rounds_are_entered_in_one_order_and_complete(p, samples):
    step = schedule_batch(p, samples)
    found = plan_rounds(step, p.sections)
    check_schedule(p, samples, as_messages(step, found))
    numbers = [
        [n for index in sorted(e) for x in e[index] for n, _ in (*x.sends, *x.receives)] for e in found
    ]
    assert sorted(n for some in numbers for n in some) == sorted(
        2 * list(range(sum(len(some) for some in numbers) // 2))
    )
    starts = [
        [min(n for n, _ in (*x.sends, *x.receives)) for index in sorted(e) for x in e[index]] for e in found
    ]
    assert all(some == sorted(some) for some in starts)
