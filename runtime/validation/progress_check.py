"""Deadlock test: runs all programs symbolically and reports whether every rank reaches the end of its
program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from secc.runtime.plan.int_columns import int_tensor
from secc.runtime.plan.program_table import KIND_WEIGHT, InstructionColumns
from secc.runtime.plan.schema import Section
from secc.runtime.plan.step_program import MicroBatch, gather_rounds, runs_in_lockstep

PROGRAM_END = 1 << 62  # the position of a rank that has ended its program


class BlockingPoints(NamedTuple):
    """The instructions at which ranks may wait, as columns; positions count the instructions of all programs.

    `at`: position of the instruction. It waits until rank `awaited_rank` has passed position `until`, or, if
    `awaited_rank` is -1 - g, until all instructions of group g are reached (a collective).
    """

    at: Tensor
    awaited_rank: Tensor
    until: Tensor

    @staticmethod
    def concatenate(parts: Sequence[BlockingPoints]) -> BlockingPoints:
        """Concatenates several sets of blocking points."""
        return BlockingPoints(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    @staticmethod
    def for_groups(at: Tensor, groups: Tensor) -> BlockingPoints:
        """Returns blocking points of collectives: the instruction at each position `at` [N] waits for its
        whole group, `groups` [N]."""
        return BlockingPoints(at, -1 - groups, torch.zeros_like(at))


def collective_points(
    sections: Sequence[Section],
    micro_batches: Mapping[str, Sequence[MicroBatch]],
    rows: InstructionColumns,
    first_group: int = 0,
) -> BlockingPoints:
    """Returns the computations that several ranks run together: those of replicas with several ranks, and
    ZeRO-3 rounds.

    Groups are numbered from `first` on.
    """
    points = [BlockingPoints.for_groups(int_tensor(()), int_tensor(()))]
    rounds_of = gather_rounds(sections, micro_batches)
    for i, section in enumerate(sections):
        if section.mesh.replica_size == 1 and not runs_in_lockstep(section):
            continue
        # One group for each round and kind of computation. A round is numbered by its first micro-batch;
        # without ZeRO-3 each micro-batch is a round of its own.
        at = ((rows.section == i) & (rows.kind <= KIND_WEIGHT)).nonzero()[:, 0]
        micros = micro_batches[section.name]
        round_numbers = int_tensor(
            rounds_of[section.name, m.index][0].index if (section.name, m.index) in rounds_of else m.index
            for m in micros
        )
        points.append(
            BlockingPoints.for_groups(
                at, first_group + round_numbers[rows.micro[at]] * (KIND_WEIGHT + 1) + rows.kind[at]
            )
        )
        first_group += len(micros) * (KIND_WEIGHT + 1)
    return BlockingPoints.concatenate(points)


def all_ranks_finish(points: BlockingPoints, ends: Tensor) -> bool:
    """Returns whether all ranks reach their end; rank r runs the instructions from `ends[r - 1]` to before
    `ends[r]`.
    """
    order = torch.argsort(points.at)
    at = points.at[order]
    groups = -1 - points.awaited_rank[points.awaited_rank < 0]
    starts = torch.cat([ends.new_zeros(1), ends])
    group_sizes = torch.bincount(groups).tolist() if len(groups) else []
    columns = (at.tolist(), points.awaited_rank[order].tolist(), points.until[order].tolist())
    return _run_to_end(*columns, torch.searchsorted(at, starts).tolist(), starts.tolist()[:-1], group_sizes)


def _run_to_end(
    at: list[int],
    awaited: list[int],
    until: list[int],
    firsts: list[int],
    starts: list[int],
    missing: list[int],
) -> bool:
    """Runs all ranks as far as they get and returns whether all reach their end.

    Rank r starts at position `starts[r]` and has the blocking points from `firsts[r]` to before `firsts[r +
    1]`; `missing[g]` instructions of group g are still to be reached.
    """
    position, next_point = list(starts), firsts[:-1]  # where each rank waits
    reached = set[int]()  # points of collectives that have been counted
    waiting_for_rank: list[list[int]] = [[] for _ in starts]
    waiting_in_group: list[list[int]] = [[] for _ in missing]
    runnable = deque(range(len(starts)))
    while runnable:
        rank = runnable.popleft()
        point, end = next_point[rank], firsts[rank + 1]
        while point < end:
            if (other := awaited[point]) >= 0:
                if position[other] <= until[point]:
                    waiting_for_rank[other].append(rank)
                    break
            else:
                group = -1 - other
                if point not in reached:
                    reached.add(point)
                    missing[group] -= 1
                    if not missing[group]:
                        runnable += waiting_in_group[group]
                if missing[group]:
                    waiting_in_group[group].append(rank)
                    break
            point += 1
        # A rank that moved may have passed what others wait for, so these try again.
        next_point[rank], new_position = point, at[point] if point < end else PROGRAM_END
        if new_position != position[rank]:
            position[rank] = new_position
            runnable += waiting_for_rank[rank]
            waiting_for_rank[rank] = []
    return all(p == PROGRAM_END for p in position)
