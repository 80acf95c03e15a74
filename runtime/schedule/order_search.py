"""Local search over an order: small batches leave gaps that no rule fills, and a few hundred tries close most
of them.

A move gives two forwards or two backwards of one section each other's urgency, moves a block to another
replica, or lets two blocks change places. A block is a micro-batch, or those of several sections on the same
ranks that share samples: a sample stays on its rank. Most moves are about the rank that ends last, since
others seldom make the step shorter. A move is kept if the step gets no longer, and not even tried if it gives
a rank more work than the step takes. The search draws from a fixed seed and counts its tries, so every rank
finds the same. It may take a fiftieth of the step that it plans, as modelled, and a quarter of what could be
won at best.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import MicroBatchSets, gathers_parameters, replica_first_ranks
from secc.runtime.schedule.list_scheduler import simulate_with_last_rank
from secc.runtime.schedule.load_balance import Ranks
from secc.runtime.schedule.micro_batches import MicroBatchTable
from secc.runtime.schedule.task_graph import StepTasks

PLANNING_TIME_DIVISOR = 50  # of the step's modelled time, the part that may go into planning it
GAIN_DIVISOR = 4  # of what could be won at best, the part that may go into winning it
MIN_TRIES_DIVISOR = 4  # fewer tries than one for so many jobs find nothing
TRY_NS_PER_TASK = 1400  # what one try takes for each job
MAX_TRIES = 2000
MOVES_PER_TRY = 4  # looked at for each try, as those that overload a rank need none
LAST_RANK_MOVE_SHARE = 0.75  # of moves, the part that is about the rank that ends last
TASK_SEARCH_PATIENCE = 300  # tries without a gain after which there is little hope
NEAR_BOUND_DIVISOR = 200  # a step within one part in so many of its work evenly spread has nothing to gain

MakespanBound = Callable[[], int]  # tells a time in ns that no order can beat
TimedOrder = tuple[list[int], int]  # the jobs as they start, and how long they take


@dataclass(frozen=True)
class MovableBlock:
    """Jobs that must be on one replica: `ranks` has for each job its rank in each replica."""

    tasks: tuple[int, ...]
    ranks_by_replica: tuple[Ranks, ...]

    @property
    def replicas(self) -> range:
        return range(len(self.ranks_by_replica[0]))


def improve_order(
    step: StepTasks,
    graph: SectionGraph,
    tables: Mapping[str, MicroBatchTable],
    early: MicroBatchSets,
    found: TimedOrder,
    count: int,
) -> tuple[dict[str, MicroBatchTable], TimedOrder]:
    """A step at least as short as `found`, after `count` tries: its tables, with replicas as they are now,
    and its order. Changes the step's jobs.

    `early` micro-batches stay where they are: they are computed in another step.
    """
    if _is_symmetric(step):
        return dict(tables), found
    search = _OrderSearch(step, _find_blocks(step, graph, tables, early), found)
    for _ in range(MOVES_PER_TRY * count):
        search.try_move()
        if search.simulated_count == count or search.failed_count > TASK_SEARCH_PATIENCE:
            break
    return _apply_moves(step, tables), search.best


def _is_symmetric(step: StepTasks) -> bool:
    """Whether all micro-batches are alike to every section, so that no order of them is better than
    another."""
    numbers, duration = step.ranges.values(), step.graph.duration_ns
    kinds = [
        duration[start : start + n.count]
        for n in numbers
        for start in {n.forward_start, n.backward_start, n.weight_start} - {-1}
    ]
    return len({n.count for n in numbers}) == 1 and all(len(set(some)) == 1 for some in kinds)


def worthwhile_tries(jobs: int, makespan: int, least: MakespanBound) -> int:
    """How many tries a step of this length is worth, none where they are too few."""
    return min(MAX_TRIES, affordable_runs(jobs, makespan, least, jobs // MIN_TRIES_DIVISOR))


def affordable_runs(jobs: int, makespan: int, least: MakespanBound, few: int) -> int:
    """How many runs of so many jobs a step of this length is worth: they may take a share of it, and less
    than what can be won. None where these are less than `few`."""
    count = makespan // PLANNING_TIME_DIVISOR // (TRY_NS_PER_TASK * jobs) if jobs else 0
    if count < few or makespan - (bound := least()) <= makespan // NEAR_BOUND_DIVISOR:
        return 0
    count = min(count, (makespan - bound) // GAIN_DIVISOR // (TRY_NS_PER_TASK * jobs))
    return count if count >= few else 0


def _find_blocks(
    step: StepTasks, graph: SectionGraph, tables: Mapping[str, MicroBatchTable], early: MicroBatchSets
) -> list[list[MovableBlock]]:
    """The blocks that can move, by the sections that they belong to; none where replicas must have equally
    many micro-batches."""
    teams = [
        [s.name for s in team]
        for team in graph.co_scheduled_sections()
        if team[0].mesh.dp > 1 and not any(map(gathers_parameters, team))
    ]
    return [_group_by_samples(step, tables, early, names) for names in teams]


def _group_by_samples(
    step: StepTasks, tables: Mapping[str, MicroBatchTable], early: MicroBatchSets, names: Sequence[str]
) -> list[MovableBlock]:
    """Micro-batches that share samples, over all of these sections, are one block."""
    parent: dict[int, int] = {}

    def root(p: int) -> int:
        while parent.setdefault(p, p) != p:
            p = parent[p]
        return p

    held = {
        name: [m for m in tables[name].micro_batches if m.index not in early.get(name, ())] for name in names
    }
    for m in (m for some in held.values() for m in some):
        for p in m.samples[1:]:
            parent[root(p)] = root(m.samples[0])
    jobs: dict[int, list[tuple[int, Ranks]]] = defaultdict(list)
    for name in names:
        ranks = replica_first_ranks(step.ranges[name].section)
        for m in held[name]:
            jobs[root(m.samples[0])] += [(job, ranks) for job in step.ranges[name].micro_batch_tasks(m.index)]
    return [MovableBlock(tuple(job for job, _ in b), tuple(ranks for _, ranks in b)) for b in jobs.values()]


def _apply_moves(step: StepTasks, tables: Mapping[str, MicroBatchTable]) -> dict[str, MicroBatchTable]:
    """The tables with each micro-batch on the replica of its jobs' rank."""
    found: dict[str, MicroBatchTable] = {}
    for name, table in tables.items():
        n = step.ranges[name]
        replica = {rank: r for r, rank in enumerate(replica_first_ranks(n.section))}
        micros = (
            m._replace(replica=replica[step.graph.rank_of[n.forward_start + m.index]])
            for m in table.micro_batches
        )
        found[name] = replace(table, micro_batches=tuple(micros))
    return found


class _OrderSearch:
    """The state of a search; `best` is the order of the step as it is now, in which rank `last` ends last."""

    def __init__(self, step: StepTasks, blocks: list[list[MovableBlock]], found: TimedOrder) -> None:
        self.graph, self.best = step.graph, found
        self.random = random.Random(0)
        self.simulated_count = self.failed_count = 0  # steps tried, and those since the step last got shorter
        self.rank_work_ns = [0] * step.graph.rank_count  # ns
        for rank, duration in zip(step.graph.rank_of, step.graph.duration_ns, strict=True):
            self.rank_work_ns[rank] += duration
        self.last_rank = self.rank_work_ns.index(max(self.rank_work_ns))
        self.blocks = [group for group in blocks if group]
        starts = {
            (start, n.count)
            for n in step.ranges.values()
            for start in (n.forward_start, n.backward_start)
            if start >= 0
        }
        self.exchangeable_ranges = [
            range(start, start + count) for start, count in sorted(starts) if count > 1
        ]

    def try_move(self) -> None:
        """Try one move, mostly of what is done by the rank that ends last."""
        kind, last = (
            self.random.random(),
            self.last_rank if self.random.random() < LAST_RANK_MOVE_SHARE else -1,
        )
        if self.exchangeable_ranges and (kind < 0.5 or not self.blocks):
            alike = self.random.choice(self.exchangeable_ranges)
            own = [job for job in alike if self.graph.rank_of[job] == last] or alike
            self.try_priority_swap(self.random.choice(own), self.random.choice(alike))
        elif self.blocks:
            group = self.random.choice(self.blocks)
            own = [block for block in group if self.graph.rank_of[block.tasks[0]] == last] or group
            a, b = self.random.choice(own), self.random.choice(group)
            if kind < 0.75:
                self.try_placement([(a, self.random.choice(a.replicas))])
            elif a is not b:
                self.try_placement([(a, self.current_replica(b)), (b, self.current_replica(a))])

    def try_priority_swap(self, a: int, b: int) -> None:
        priority = self.graph.priority
        priority[a], priority[b] = priority[b], priority[a]
        if a != b and not self.keep_if_shorter():
            priority[a], priority[b] = priority[b], priority[a]

    def try_placement(self, placed: list[tuple[MovableBlock, int]]) -> None:
        """Put each block on a replica, unless a rank then has more to do than the step takes."""
        before = [(block, self.current_replica(block)) for block, _ in placed]
        if before == placed:
            return
        self.move_blocks(placed)
        if max(self.rank_work_ns) > self.best[1] or not self.keep_if_shorter():
            self.move_blocks(before)

    def move_blocks(self, placed: list[tuple[MovableBlock, int]]) -> None:
        rank, duration = self.graph.rank_of, self.graph.duration_ns
        for block, replica in placed:
            for job, ranks in zip(block.tasks, block.ranks_by_replica, strict=True):
                self.rank_work_ns[rank[job]] -= duration[job]
                self.rank_work_ns[ranks[replica]] += duration[job]
                rank[job] = ranks[replica]

    def current_replica(self, block: MovableBlock) -> int:
        return block.ranks_by_replica[0].index(self.graph.rank_of[block.tasks[0]])

    def keep_if_shorter(self) -> bool:
        order, time, last = simulate_with_last_rank(self.graph)
        self.simulated_count += 1
        self.failed_count = 0 if time < self.best[1] else self.failed_count + 1
        if time <= self.best[1]:
            self.best, self.last_rank = (order, time), last
            return True
        return False
