"""Finds how many sends a rank may leave unreceived, so that their buffers do not pile up on a rank that is
far ahead.

At the limit a rank waits for its oldest send, and so may block others, even the rank that it waits for.
Before the step the programs are therefore run under that rule (a message counts as received when its receiver
reaches the RECV), and a limit that would deadlock is doubled. The computation is deterministic, so all ranks
find the same limit without communicating.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from secc.runtime.plan.program_table import KIND_RECEIVE, KIND_SEND, InstructionNames, ProgramTable
from secc.runtime.plan.schema import Section
from secc.runtime.plan.step_program import Schedule
from secc.runtime.validation.progress_check import BlockingPoints, all_ranks_finish, collective_points

DEFAULT_SEND_LIMIT = 32  # unreceived sends of a rank


def find_send_limit(
    schedule: Schedule, first: int = DEFAULT_SEND_LIMIT, sections: Sequence[Section] = ()
) -> int:
    """Returns the smallest of `first`, twice `first`, ... under which all programs end.

    `sections` are the plan's, for the computations that several ranks run together.
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
    # received[i]: position of the RECV of the i-th send; a channel delivers in the order of its sends.
    received = torch.empty_like(sends)
    matching = _sort_by_channel(programs, receives, rows.peer[receives], rows.rank[receives])
    received[_sort_by_channel(programs, sends, sender, receiver)] = receives[matching]
    sent = torch.empty_like(rows.kind)
    sent[received] = sends
    arrivals = BlockingPoints(receives, rows.peer[receives], sent[receives])
    always = [collective_points(sections, schedule.micro_batches, rows), arrivals]
    # Sends are sorted by rank, so this counts the earlier sends of the same rank.
    earlier_sends = torch.arange(len(sends)) - torch.searchsorted(sender, sender)
    limit = first
    while limit < most:
        full = (earlier_sends >= limit).nonzero()[:, 0]
        # The k-th send of a rank waits for the RECV of its (k - limit)-th send.
        window = BlockingPoints(sends[full], receiver[full - limit], received[full - limit])
        if all_ranks_finish(BlockingPoints.concatenate([*always, window]), ends):
            break
        limit *= 2
    return limit


def _sort_by_channel(
    programs: ProgramTable, at: torch.Tensor, sender: torch.Tensor, receiver: torch.Tensor
) -> torch.Tensor:
    """Returns the indices of messages sorted by channel, and within a channel by position."""
    rows, world = programs.columns, len(programs)
    return torch.argsort(
        ((rows.edge[at] * 2 + rows.direction[at]) * world + sender) * world + receiver, stable=True
    )
