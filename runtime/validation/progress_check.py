"""Whether ranks that wait for each other pass all their instructions."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from secc.runtime.plan.int_columns import int_tensor
from secc.runtime.plan.program_table import KIND_WEIGHT, InstructionColumns
from secc.runtime.plan.schema import Section
from secc.runtime.plan.step_program import MicroBatch, gather_rounds, gathers_parameters

PROGRAM_END = 1 << 62


class BlockingPoints(NamedTuple):
    """The instructions at which ranks wait, by their places among all; for each the rank that must have
    passed the instruction `until` before, or, where `awaited` is -1 - g, nothing but that all of group g have
    come."""

    at: Tensor
    awaited_rank: Tensor
    until: Tensor

    @staticmethod
    def concatenate(some: Sequence[BlockingPoints]) -> BlockingPoints:
        """All of these."""
        return BlockingPoints(*(torch.cat(columns) for columns in zip(*some, strict=True)))

    @staticmethod
    def for_groups(at: Tensor, groups: Tensor) -> BlockingPoints:
        """Ranks that wait until their groups are there."""
        return BlockingPoints(at, -1 - groups, torch.zeros_like(at))


def collective_points(
    sections: Sequence[Section],
    micro_batches: Mapping[str, Sequence[MicroBatch]],
    rows: InstructionColumns,
    first: int = 0,
) -> BlockingPoints:
    """What several ranks compute together: replicas of several ranks, and those that gather. Groups are
    numbered from `first` on."""
    found = [BlockingPoints.for_groups(int_tensor(()), int_tensor(()))]
    rounds_of = gather_rounds(sections, micro_batches)
    for i, s in enumerate(sections):
        if s.mesh.tp == 1 and not gathers_parameters(s):
            continue
        at = ((rows.section == i) & (rows.kind <= KIND_WEIGHT)).nonzero()[:, 0]
        micros = micro_batches[s.name]
        starts = int_tensor(
            rounds_of[s.name, m.index][0].index if (s.name, m.index) in rounds_of else m.index for m in micros
        )
        found.append(
            BlockingPoints.for_groups(at, first + starts[rows.micro[at]] * (KIND_WEIGHT + 1) + rows.kind[at])
        )
        first += len(micros) * (KIND_WEIGHT + 1)
    return BlockingPoints.concatenate(found)


def all_ranks_finish(waits: BlockingPoints, ends: Tensor) -> bool:
    """Whether all ranks pass all that they wait for, rank r's instructions being those before `ends[r]`."""
    order = torch.argsort(waits.at)
    at = waits.at[order]
    groups = -1 - waits.awaited_rank[waits.awaited_rank < 0]
    starts = torch.cat([ends.new_zeros(1), ends])
    left = torch.bincount(groups).tolist() if len(groups) else []
    columns = (at.tolist(), waits.awaited_rank[order].tolist(), waits.until[order].tolist())
    return _run_to_end(*columns, torch.searchsorted(at, starts).tolist(), starts.tolist()[:-1], left)


def _run_to_end(
    at: list[int], awaited: list[int], until: list[int], firsts: list[int], starts: list[int], left: list[int]
) -> bool:
    """Rank r waits at instructions `at[firsts[r]:firsts[r + 1]]`; `left[g]` ranks must come to group g. `now`
    is where each waits."""
    now, following = list(starts), firsts[:-1]
    here, waiting, meeting = set[int](), [list[int]() for _ in starts], [list[int]() for _ in left]
    runnable = deque(range(len(starts)))
    while runnable:
        rank = runnable.popleft()
        i, end = following[rank], firsts[rank + 1]
        while i < end:
            if (other := awaited[i]) >= 0:
                if now[other] <= until[i]:
                    waiting[other].append(rank)
                    break
            else:
                group = -1 - other
                if i not in here:
                    here.add(i)
                    left[group] -= 1
                    if not left[group]:
                        runnable += meeting[group]
                if left[group]:
                    meeting[group].append(rank)
                    break
            i += 1
        following[rank], place = i, at[i] if i < end else PROGRAM_END
        if place != now[rank]:
            now[rank] = place
            runnable += waiting[rank]
            waiting[rank] = []
    return all(place == PROGRAM_END for place in now)
