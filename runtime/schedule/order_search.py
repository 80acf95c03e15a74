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

from secc.runtime.plan.section_graph import Graph
from secc.runtime.plan.step_program import Micros, gathers, replica_ranks
from secc.runtime.schedule.list_scheduler import critical
from secc.runtime.schedule.load_balance import Ranks
from secc.runtime.schedule.micro_batches import Table
from secc.runtime.schedule.task_graph import Step

SHARE = 50  # of the step's modelled time, the part that may go into planning it
GAIN = 4  # of what could be won at best, the part that may go into winning it
FEW = 4  # fewer tries than one for so many jobs find nothing
TRY_NS = 1400  # what one try takes for each job
MOST_TRIES = 2000
MOVES = 4  # looked at for each try, as those that overload a rank need none
FOCUS = 0.75  # of moves, the part that is about the rank that ends last
PATIENCE = 300  # tries without a gain after which there is little hope
NEAR = 200  # a step within one part in so many of its work evenly spread has nothing to gain

Least = Callable[[], int]  # tells a time in ns that no order can beat
Order = tuple[list[int], int]  # the jobs as they start, and how long they take


@dataclass(frozen=True)
class Block:
    """Jobs that must be on one replica: `ranks` has for each job its rank in each replica."""

    jobs: tuple[int, ...]
    ranks: tuple[Ranks, ...]

    @property
    def replicas(self) -> range:
        return range(len(self.ranks[0]))


def improve(
    step: Step, graph: Graph, tables: Mapping[str, Table], early: Micros, found: Order, count: int
) -> tuple[dict[str, Table], Order]:
    """A step at least as short as `found`, after `count` tries: its tables, with replicas as they are now,
    and its order. Changes the step's jobs.

    `early` micro-batches stay where they are: they are computed in another step.
    """
    if _symmetric(step):
        return dict(tables), found
    search = _Search(step, _blocks(step, graph, tables, early), found)
    for _ in range(MOVES * count):
        search.move()
        if search.runs == count or search.failed > PATIENCE:
            break
    return _moved(step, tables), search.best


def _symmetric(step: Step) -> bool:
    """Whether all micro-batches are alike to every section, so that no order of them is better than
    another."""
    numbers, duration = step.numbers.values(), step.jobs.duration
    kinds = [
        duration[start : start + n.count]
        for n in numbers
        for start in {n.forward, n.backward, n.weight} - {-1}
    ]
    return len({n.count for n in numbers}) == 1 and all(len(set(some)) == 1 for some in kinds)


def tries(jobs: int, makespan: int, least: Least) -> int:
    """How many tries a step of this length is worth, none where they are too few."""
    return min(MOST_TRIES, affordable(jobs, makespan, least, jobs // FEW))


def affordable(jobs: int, makespan: int, least: Least, few: int) -> int:
    """How many runs of so many jobs a step of this length is worth: they may take a share of it, and less
    than what can be won. None where these are less than `few`."""
    count = makespan // SHARE // (TRY_NS * jobs) if jobs else 0
    if count < few or makespan - (bound := least()) <= makespan // NEAR:
        return 0
    count = min(count, (makespan - bound) // GAIN // (TRY_NS * jobs))
    return count if count >= few else 0


def _blocks(step: Step, graph: Graph, tables: Mapping[str, Table], early: Micros) -> list[list[Block]]:
    """The blocks that can move, by the sections that they belong to; none where replicas must have equally
    many micro-batches."""
    teams = [
        [s.name for s in team]
        for team in graph.teams()
        if team[0].mesh.dp > 1 and not any(map(gathers, team))
    ]
    return [_group(step, tables, early, names) for names in teams]


def _group(step: Step, tables: Mapping[str, Table], early: Micros, names: Sequence[str]) -> list[Block]:
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
        ranks = replica_ranks(step.numbers[name].section)
        for m in held[name]:
            jobs[root(m.samples[0])] += [(job, ranks) for job in step.numbers[name].jobs(m.index)]
    return [Block(tuple(job for job, _ in b), tuple(ranks for _, ranks in b)) for b in jobs.values()]


def _moved(step: Step, tables: Mapping[str, Table]) -> dict[str, Table]:
    """The tables with each micro-batch on the replica of its jobs' rank."""
    found: dict[str, Table] = {}
    for name, table in tables.items():
        n = step.numbers[name]
        replica = {rank: r for r, rank in enumerate(replica_ranks(n.section))}
        micros = (
            m._replace(replica=replica[step.jobs.rank[n.forward + m.index]]) for m in table.micro_batches
        )
        found[name] = replace(table, micro_batches=tuple(micros))
    return found


class _Search:
    """The state of a search; `best` is the order of the step as it is now, in which rank `last` ends last."""

    def __init__(self, step: Step, blocks: list[list[Block]], found: Order) -> None:
        self.jobs, self.best = step.jobs, found
        self.random = random.Random(0)
        self.runs = self.failed = 0  # steps tried, and those since the step last got shorter
        self.work = [0] * step.jobs.ranks  # ns
        for rank, duration in zip(step.jobs.rank, step.jobs.duration, strict=True):
            self.work[rank] += duration
        self.last = self.work.index(max(self.work))
        self.blocks = [group for group in blocks if group]
        starts = {
            (start, n.count) for n in step.numbers.values() for start in (n.forward, n.backward) if start >= 0
        }
        self.alike = [range(start, start + count) for start, count in sorted(starts) if count > 1]

    def move(self) -> None:
        """Try one move, mostly of what is done by the rank that ends last."""
        kind, last = self.random.random(), self.last if self.random.random() < FOCUS else -1
        if self.alike and (kind < 0.5 or not self.blocks):
            alike = self.random.choice(self.alike)
            own = [job for job in alike if self.jobs.rank[job] == last] or alike
            self.swap_urgency(self.random.choice(own), self.random.choice(alike))
        elif self.blocks:
            group = self.random.choice(self.blocks)
            own = [block for block in group if self.jobs.rank[block.jobs[0]] == last] or group
            a, b = self.random.choice(own), self.random.choice(group)
            if kind < 0.75:
                self.place([(a, self.random.choice(a.replicas))])
            elif a is not b:
                self.place([(a, self.replica(b)), (b, self.replica(a))])

    def swap_urgency(self, a: int, b: int) -> None:
        priority = self.jobs.priority
        priority[a], priority[b] = priority[b], priority[a]
        if a != b and not self.kept():
            priority[a], priority[b] = priority[b], priority[a]

    def place(self, placed: list[tuple[Block, int]]) -> None:
        """Put each block on a replica, unless a rank then has more to do than the step takes."""
        before = [(block, self.replica(block)) for block, _ in placed]
        if before == placed:
            return
        self.put(placed)
        if max(self.work) > self.best[1] or not self.kept():
            self.put(before)

    def put(self, placed: list[tuple[Block, int]]) -> None:
        rank, duration = self.jobs.rank, self.jobs.duration
        for block, replica in placed:
            for job, ranks in zip(block.jobs, block.ranks, strict=True):
                self.work[rank[job]] -= duration[job]
                self.work[ranks[replica]] += duration[job]
                rank[job] = ranks[replica]

    def replica(self, block: Block) -> int:
        return block.ranks[0].index(self.jobs.rank[block.jobs[0]])

    def kept(self) -> bool:
        order, time, last = critical(self.jobs)
        self.runs += 1
        self.failed = 0 if time < self.best[1] else self.failed + 1
        if time <= self.best[1]:
            self.best, self.last = (order, time), last
            return True
        return False
