"""Local search over an order: small batches leave gaps that no rule fills, and a few hundred tries close most
of them.

A move swaps the priorities of two forwards or two backwards of one section, moves a block to another replica,
or swaps the replicas of two blocks. A block is a micro-batch, or the micro-batches of co-located sections
that share samples, since a sample stays on its rank. Most moves concern the rank that ends last, because
others seldom shorten the step; its blocks are swapped with shorter ones. A move is kept if the step gets no
longer, and not simulated if a rank would get more work than the step takes. The search has a fixed seed and
counts its tries, so every rank finds the same order. It may take 1/50 of the predicted step time and a
quarter of what could be gained at best.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import MicroBatchSets, replica_first_ranks, runs_in_lockstep
from secc.runtime.schedule.list_scheduler import simulate_within
from secc.runtime.schedule.load_balance import Ranks
from secc.runtime.schedule.micro_batches import MicroBatchTable
from secc.runtime.schedule.task_graph import StepTasks

PLANNING_TIME_DIVISOR = 50  # planning may take 1/50 of the predicted step time
GAIN_DIVISOR = 4  # ... and 1/4 of what could be gained at best
MIN_TRIES_DIVISOR = 4  # fewer tries than one for every 4 tasks find nothing
TRY_NS_PER_TASK = 1400  # time of a try for each task
MAX_TRIES = 2000
MOVES_PER_TRY = 4  # moves drawn for each try; moves that overload a rank need no simulation
DRAWS_PER_SWAP = 8  # partners drawn for a swap, until one promises a gain
LAST_RANK_MOVE_SHARE = 0.75  # share of moves that concern the rank that ends last
TASK_SEARCH_PATIENCE = 300  # tries without a gain before giving up
NEAR_BOUND_DIVISOR = 200  # a step within 1/200 of its lower bound has nothing to gain

MakespanBound = Callable[[], int]  # returns ns that no order can beat
TimedOrder = tuple[list[int], int]  # tasks by start time, and the makespan in ns


@dataclass(frozen=True)
class MovableBlock:
    """Tasks that must stay on one replica; `ranks_by_replica` has, for each task, its rank in each
    replica.
    """

    tasks: tuple[int, ...]
    ranks_by_replica: tuple[Ranks, ...]

    @property
    def replicas(self) -> range:
        return range(len(self.ranks_by_replica[0]))


def improve_order(
    step: StepTasks,
    graph: SectionGraph,
    tables: Mapping[str, MicroBatchTable],
    prefetchable: MicroBatchSets,
    start: TimedOrder,
    count: int,
) -> tuple[dict[str, MicroBatchTable], TimedOrder]:
    """Searches for a step no longer than `start`, with `count` tries.

    Returns its tables, with micro-batches on their new replicas, and its order. Changes the tasks of `step`.
    The micro-batches in `prefetchable` stay on their replicas, because they are prefetched in another step.
    """
    if _is_symmetric(step):
        return dict(tables), start
    search = _OrderSearch(step, _find_blocks(step, graph, tables, prefetchable), start)
    for _ in range(MOVES_PER_TRY * count):
        search.try_move()
        if search.simulated_count == count or search.failed_count > TASK_SEARCH_PATIENCE:
            break
    return _apply_moves(step, tables), search.best


def _is_symmetric(step: StepTasks) -> bool:
    """Returns whether all micro-batches take equal time in each section, so that no order is better than
    another.
    """
    task_ranges, duration = step.ranges.values(), step.graph.duration_ns
    durations = [
        duration[start : start + section_tasks.count]
        for section_tasks in task_ranges
        for start in {section_tasks.forward_start, section_tasks.backward_start, section_tasks.weight_start}
        - {-1}
    ]
    return len({section_tasks.count for section_tasks in task_ranges}) == 1 and all(
        len(set(times)) == 1 for times in durations
    )


def worthwhile_tries(tasks: int, makespan: int, lower_bound: MakespanBound) -> int:
    """Returns how many tries a step of this many `tasks` and this makespan is worth; 0 if they are
    too few.
    """
    return min(MAX_TRIES, affordable_runs(tasks, makespan, lower_bound, tasks // MIN_TRIES_DIVISOR))


def most_searched_tasks(tasks: int, makespan: int) -> int:
    """Returns how many tasks the search for a better order of `tasks` tasks simulates at most."""
    return min(MAX_TRIES * tasks, makespan // PLANNING_TIME_DIVISOR // TRY_NS_PER_TASK)


def affordable_runs(tasks: int, makespan: int, lower_bound: MakespanBound, minimum: int) -> int:
    """Returns how many simulations of this many `tasks` a step is worth; 0 if fewer than `minimum`.

    They may take a share of the predicted step time and of the gap to the lower bound.
    """
    count = makespan // PLANNING_TIME_DIVISOR // (TRY_NS_PER_TASK * tasks) if tasks else 0
    if count < minimum or makespan - (bound := lower_bound()) <= makespan // NEAR_BOUND_DIVISOR:
        return 0
    count = min(count, (makespan - bound) // GAIN_DIVISOR // (TRY_NS_PER_TASK * tasks))
    return count if count >= minimum else 0


def _find_blocks(
    step: StepTasks, graph: SectionGraph, tables: Mapping[str, MicroBatchTable], prefetchable: MicroBatchSets
) -> list[list[MovableBlock]]:
    """Returns the movable blocks by group of co-scheduled sections; none under ZeRO-3, which needs equal
    counts.
    """
    groups = [
        [s.name for s in sections]
        for sections in graph.co_scheduled_sections()
        if sections[0].mesh.dp > 1 and not any(map(runs_in_lockstep, sections))
    ]
    return [_group_by_samples(step, tables, prefetchable, names) for names in groups]


def _group_by_samples(
    step: StepTasks, tables: Mapping[str, MicroBatchTable], prefetchable: MicroBatchSets, names: Sequence[str]
) -> list[MovableBlock]:
    """Joins the micro-batches of these sections that share samples into blocks (union-find over samples)."""
    parent: dict[int, int] = {}

    def root(p: int) -> int:
        while parent.setdefault(p, p) != p:
            p = parent[p]
        return p

    movable = {
        name: [m for m in tables[name].micro_batches if m.index not in prefetchable.get(name, ())]
        for name in names
    }
    for m in (m for micros in movable.values() for m in micros):
        for p in m.samples[1:]:
            parent[root(p)] = root(m.samples[0])
    tasks: dict[int, list[tuple[int, Ranks]]] = defaultdict(list)
    for name in names:
        ranks = replica_first_ranks(step.ranges[name].section)
        for m in movable[name]:
            tasks[root(m.samples[0])] += [
                (task, ranks) for task in step.ranges[name].micro_batch_tasks(m.index)
            ]
    return [
        MovableBlock(tuple(task for task, _ in block), tuple(ranks for _, ranks in block))
        for block in tasks.values()
    ]


def _apply_moves(step: StepTasks, tables: Mapping[str, MicroBatchTable]) -> dict[str, MicroBatchTable]:
    """Returns the tables with each micro-batch on the replica that runs its forward."""
    moved: dict[str, MicroBatchTable] = {}
    for name, table in tables.items():
        task_ranges = step.ranges[name]
        replica = {rank: index for index, rank in enumerate(replica_first_ranks(task_ranges.section))}
        micros = (
            m._replace(replica=replica[step.graph.rank_of[task_ranges.forward_start + m.index]])
            for m in table.micro_batches
        )
        moved[name] = replace(table, micro_batches=tuple(micros))
    return moved


class _OrderSearch:
    """The state of a search. `best` is the current order of the step, and `last_rank` ends last in it.

    `simulated_count` counts tries, `failed_count` those since the step last got shorter.
    """

    def __init__(self, step: StepTasks, blocks: list[list[MovableBlock]], initial: TimedOrder) -> None:
        self.graph, self.best = step.graph, initial
        # Tasks with a priority that comes from the task that they follow: theirs before that is not read.
        self.followers = set(step.graph.followers)
        self.is_simulated = False  # whether `best` is what the tasks give by list scheduling
        self.random = random.Random(0)
        self.simulated_count = self.failed_count = 0
        self.rank_work_ns = [0] * step.graph.rank_count  # ns
        for rank, duration in zip(step.graph.rank_of, step.graph.duration_ns, strict=True):
            self.rank_work_ns[rank] += duration
        self.last_rank = self.rank_work_ns.index(max(self.rank_work_ns))
        self.blocks = [group for group in blocks if group]
        starts = {
            (start, task_ranges.count)
            for task_ranges in step.ranges.values()
            for start in (task_ranges.forward_start, task_ranges.backward_start)
            if start >= 0
        }
        self.exchangeable_ranges = [
            range(start, start + count) for start, count in sorted(starts) if count > 1
        ]

    def try_move(self) -> None:
        """Tries one random move, mostly one that concerns the rank that ends last."""
        kind = self.random.random()
        last = self.last_rank if self.random.random() < LAST_RANK_MOVE_SHARE else -1  # -1: any rank
        if self.exchangeable_ranges and (kind < 0.5 or not self.blocks):
            tasks = self.random.choice(self.exchangeable_ranges)
            candidates = [task for task in tasks if self.graph.rank_of[task] == last] or tasks
            self.try_priority_swap(self.random.choice(candidates), self.random.choice(tasks))
        elif self.blocks:
            group = self.random.choice(self.blocks)
            candidates = [block for block in group if self.graph.rank_of[block.tasks[0]] == last] or group
            a = self.random.choice(candidates)
            if kind < 0.625:
                self.try_placement([(a, self.random.choice(a.replicas))])
            elif (b := self.draw_partner(a, group, last >= 0)) is not None:
                self.try_placement([(a, self.current_replica(b)), (b, self.current_replica(a))])

    def draw_partner(
        self, a: MovableBlock, group: Sequence[MovableBlock], lightens: bool
    ) -> MovableBlock | None:
        """Draws a block of another replica to swap with `a`; with `lightens` one that takes work from the
        rank of `a` and overloads no other. None if a few draws find none."""
        for _ in range(DRAWS_PER_SWAP):
            b = self.random.choice(group)
            if self.current_replica(a) == self.current_replica(b):
                continue
            less = self.block_work_ns(a) - self.block_work_ns(b)
            other = self.graph.rank_of[b.tasks[0]]
            if not lightens or (less > 0 and self.rank_work_ns[other] + less < self.best[1]):
                return b
        return None

    def block_work_ns(self, block: MovableBlock) -> int:
        """The ns that the block's tasks take together."""
        return sum(self.graph.duration_ns[task] for task in block.tasks)

    def try_priority_swap(self, a: int, b: int) -> None:
        """Swaps two tasks' priorities and keeps that if the step gets no longer."""
        priority = self.graph.priority
        if a in self.followers and b in self.followers and a != b and self.is_simulated:
            self.count_try(False)  # it would give the same step again
            return
        priority[a], priority[b] = priority[b], priority[a]
        if a != b and not self.keep_if_shorter():
            priority[a], priority[b] = priority[b], priority[a]

    def try_placement(self, placed: list[tuple[MovableBlock, int]]) -> None:
        """Moves blocks to replicas and keeps that unless a rank is overloaded or the step gets longer."""
        before = [(block, self.current_replica(block)) for block, _ in placed]
        if before == placed:
            return
        self.move_blocks(placed)
        if max(self.rank_work_ns) > self.best[1] or not self.keep_if_shorter():
            self.move_blocks(before)

    def move_blocks(self, placed: list[tuple[MovableBlock, int]]) -> None:
        """Moves each block's tasks to the ranks of a replica."""
        rank_of, duration = self.graph.rank_of, self.graph.duration_ns
        for block, replica in placed:
            for task, ranks in zip(block.tasks, block.ranks_by_replica, strict=True):
                self.rank_work_ns[rank_of[task]] -= duration[task]
                self.rank_work_ns[ranks[replica]] += duration[task]
                rank_of[task] = ranks[replica]

    def current_replica(self, block: MovableBlock) -> int:
        return block.ranks_by_replica[0].index(self.graph.rank_of[block.tasks[0]])

    def keep_if_shorter(self) -> bool:
        simulated = simulate_within(self.graph, self.best[1], self.rank_work_ns)
        self.count_try(simulated is not None and simulated.makespan < self.best[1])
        if simulated is None or simulated.makespan > self.best[1]:
            return False
        self.best, self.last_rank = (simulated.order, simulated.makespan), simulated.last_rank
        self.is_simulated = True
        return True

    def count_try(self, is_shorter: bool) -> None:
        self.simulated_count += 1
        self.failed_count = 0 if is_shorter else self.failed_count + 1
