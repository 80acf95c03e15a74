"""Orders of pipelines that PyTorch publishes (`torch.distributed.pipelining.schedules`) are never shorter
than ours on equal costs, where our stages hold no more micro-batches than theirs."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.pipelining import schedules

from secc.runtime.schedule.scheduler import schedule_with_makespan
from secc.runtime.validation.full_check import check_schedule
from tools import schedule_mixes

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, BACKWARD = "F", "I", "W", "B"
DURATIONS = {FORWARD: 1, INPUT_GRADIENT: 1, WEIGHT_GRADIENT: 1, BACKWARD: 2}

Action = tuple[str, int, int]  # kind, stage, micro-batch
TOKENS = 100  # of each sample

PUBLISHED = [  # class, chunks on a rank, placement, whether backward is split
    ("ScheduleInterleaved1F1B", 2, "loop", False),
    ("ScheduleInterleaved1F1B", 3, "loop", False),
    ("ScheduleLoopedBFS", 2, "loop", False),
    ("ScheduleInterleavedZeroBubble", 2, "loop", True),
    ("ScheduleZBVZeroBubble", 2, "v", True),
    ("ScheduleDualPipeV", 2, "v", True),
]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (2, 10), (4, 8), (4, 16), (8, 16), (8, 32)])
@pytest.mark.parametrize(("name", "chunks", "placement", "split"), PUBLISHED)
def test_published_orders_are_not_shorter(
    name: str, chunks: int, placement: str, split: bool, ranks: int, micro_batches: int
) -> None:
    theirs, held = replay_order(published_order(name, ranks, chunks, micro_batches), ranks * chunks)
    shape = schedule_mixes.PipelineShape(ranks, 0, split, chunks, placement)
    section = schedule_mixes.linear_section("lm", range(1), "T", schedule_mixes.TOKEN_NS * chunks)
    stages = [replace(s, in_flight=held[i]) for i, s in enumerate(shape.split_section(section))]
    plan = schedule_mixes.build_plan(stages, list(pairwise(s.name for s in stages)))
    samples = [schedule_mixes.text_sample(i, TOKENS) for i in range(micro_batches)]
    schedule, makespan = schedule_with_makespan(plan, samples)
    check_schedule(plan, samples, schedule)
    assert makespan <= theirs * TOKENS * schedule_mixes.TOKEN_NS


def published_order(name: str, ranks: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    """Returns the order of each rank under a schedule class of PyTorch, such as "ScheduleZBVZeroBubble"."""
    logging.getLogger(schedules.__name__).setLevel(logging.ERROR)
    stages = [
        SimpleNamespace(
            stage_index=i,
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            is_first=i == 0,
            is_last=i == ranks * chunks - 1,
            submod=nn.Identity(),
        )
        for i in range(0, ranks * chunks, ranks)
    ]
    made: Any = getattr(schedules, name)(stages, micro_batches, loss_fn=lambda *_: None)
    return [[a for action in made.pipeline_order[rank] for a in _flatten(action)] for rank in range(ranks)]


def _flatten(action: Any) -> Iterator[Action]:
    """Yields the action itself, or the parts of a forward and a backward that overlap: one device takes as
    long for both as for one after the other."""
    if action is None:  # a bubble
        return
    if action.sub_actions:
        for part in action.sub_actions:
            yield from _flatten(part)
    else:
        yield action.computation_type.value, action.stage_index, action.microbatch_index


def replay_order(by_rank: Sequence[Sequence[Action]], stages: int) -> tuple[int, dict[int, int]]:
    """Returns what an order takes in units of a forward on a stage, without transfers, and the most
    micro-batches that each stage holds from forward to the end of its backward."""
    ends: dict[Action, int] = {}
    place, free = [0] * len(by_rank), [0] * len(by_rank)
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    while any(p < len(order) for p, order in zip(place, by_rank, strict=True)):
        moved = False
        for rank, order in enumerate(by_rank):
            while place[rank] < len(order):
                kind, stage, _ = action = order[place[rank]]
                needed = _needed(action, stages)
                ready = [
                    max(known) for options in needed if (known := [ends[a] for a in options if a in ends])
                ]
                if len(ready) < len(needed):
                    break
                start = max([free[rank], *ready])
                free[rank] = ends[action] = start + DURATIONS[kind]
                if kind == FORWARD:
                    changes[stage].append((start, 1))
                elif kind != INPUT_GRADIENT:
                    changes[stage].append((free[rank], -1))
                place[rank] += 1
                moved = True
        if not moved:
            raise ValueError("the orders wait for each other in a circle")
    held: dict[int, int] = {}
    for stage, some in changes.items():
        now = 0
        for _, change in sorted(some):
            now += change
            held[stage] = max(held.get(stage, 0), now)
    return max(free), held


def _needed(action: Action, stages: int) -> list[list[Action]]:
    """What an action waits for: one of each list."""
    kind, stage, micro_batch = action
    if kind == FORWARD:
        return [[(FORWARD, stage - 1, micro_batch)]] if stage else []
    if kind == WEIGHT_GRADIENT:
        return [[(INPUT_GRADIENT, stage, micro_batch)]]
    later = [(k, stage + 1, micro_batch) for k in (INPUT_GRADIENT, BACKWARD)]
    return [[(FORWARD, stage, micro_batch)], *([later] if stage + 1 < stages else [])]
