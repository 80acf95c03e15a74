"""How many of its sends a rank may leave unreceived, so that their buffers do not pile up in a rank that runs
ahead.

A rank with too many of them waits for its oldest one, and a rank that waits may hold up others, even the one
it waits for. So the programs are run against that rule before the step, in which a message counts as received
when its receiver comes to the RECV; a limit under which they do not end is doubled. All ranks find the same
limit, without a word to each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from secc.runtime.plan.program_table import KIND_RECEIVE, KIND_SEND, InstructionNames, ProgramTable
from secc.runtime.plan.schema import Section
from secc.runtime.plan.step_program import Schedule
from secc.runtime.validation.progress_check import BlockingPoints, all_ranks_finish, collective_points

DEFAULT_SEND_LIMIT = 32


def find_send_limit(
    schedule: Schedule, first: int = DEFAULT_SEND_LIMIT, sections: Sequence[Section] = ()
) -> int:
    """The smallest of `first`, its double and so on under which all programs end.

    `sections` are the plan's: replicas of several ranks, and those that gather, compute in step.
    """
    programs = schedule.programs
    if not isinstance(programs, ProgramTable):
        named = InstructionNames.from_programs(programs)
        programs = ProgramTable.from_programs(
            programs, InstructionNames(tuple(s.name for s in sections) or named.sections, named.edges)
        )
    rows, ends = programs.columns, programs.program_ends
    sends, receives = ((rows.kind == kind).nonzero()[:, 0] for kind in (KIND_SEND, KIND_RECEIVE))
    sender, receiver = rows.rank[sends], rows.peer[sends]
    most = int(torch.bincount(sender).max()) if len(sends) else 0
    if most <= first:
        return first
    received = torch.empty_like(
        sends
    )  # where each message sent is received: on a channel in the order of the sends
    matching = _sort_by_channel(programs, receives, rows.peer[receives], rows.rank[receives])
    received[_sort_by_channel(programs, sends, sender, receiver)] = receives[matching]
    sent = torch.empty_like(rows.kind)
    sent[received] = sends
    arrivals = BlockingPoints(receives, rows.peer[receives], sent[receives])
    always = [collective_points(sections, schedule.micro_batches, rows), arrivals]
    unreceived = torch.arange(len(sends)) - torch.searchsorted(
        sender, sender
    )  # sends of the same rank before
    limit = first
    while limit < most:
        full = (unreceived >= limit).nonzero()[:, 0]
        if all_ranks_finish(
            BlockingPoints.concatenate(
                [*always, BlockingPoints(sends[full], receiver[full - limit], received[full - limit])]
            ),
            ends,
        ):
            break
        limit *= 2
    return limit


def _sort_by_channel(
    programs: ProgramTable, at: torch.Tensor, sender: torch.Tensor, receiver: torch.Tensor
) -> torch.Tensor:
    """The messages at these places, channel after channel and in the order of their places."""
    rows, world = programs.columns, len(programs)
    return torch.argsort(
        ((rows.edge[at] * 2 + rows.direction[at]) * world + sender) * world + receiver, stable=True
    )
