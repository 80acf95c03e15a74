"""A step whose critical pipeline has ranks of its own, in virtual time: each of its replicas alone, and
beside them the other sections.

Replicas of a pipeline that keep to their queues have nothing to do with each other but through upstream, and
mostly that is all done forward before the first backward comes back. So the passages that the planner
(`queues`) has found with a guess of upstream's times hold if upstream, run by `timeline` with the ends of the
first stage's backwards as times that it waits for, has all there when it starts. The replicas for which it
does not are run again with the times found, and upstream after them. That is the whole step at a fraction of
what running all jobs together takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from secc.runtime.plan.int_columns import integers
from secc.runtime.plan.schema import Edge, Section
from secc.runtime.plan.step_program import returns_gradient
from secc.runtime.schedule.list_scheduler import timed
from secc.runtime.schedule.micro_batches import Composer, Table
from secc.runtime.schedule.pipeline_order import Load, Queues
from secc.runtime.schedule.pipeline_replica_sim import Passage
from secc.runtime.schedule.task_graph import Messages, Numbers, Step, make

ROUNDS = 4  # runs of upstream before the step is left to `timeline`

Piece = tuple[Tensor, Tensor, Tensor]  # jobs, when they start, how long they take


@dataclass
class Apart:
    """The parts of a step: a pipeline's `stages`, whose replicas take the queues of `plan` as they stand, and
    the other sections."""

    composer: Composer
    tables: Mapping[str, Table]
    messages: Messages
    numbers: Mapping[str, Numbers]
    stages: Sequence[Section]
    load: Load
    plan: Queues
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = frozenset(s.name for s in self.stages)

    def order(self) -> tuple[list[int], int] | None:
        """All jobs in the order in which they start, and when the last one ends.

        None where the parts depend on each other in other ways, stages are not split alike, or their times do
        not settle.
        """
        first, split = self.stages[0].name, bool(self.load.lane.weight)
        if any(e.dst != first for e in self._into()) or any(
            (self.numbers[s.name].weight >= 0) != split for s in self.stages
        ):
            return None
        beside, arrivals = self._beside()
        passages, wanted = self.plan.passages.copy(), [m for queue in self.plan.queues for m in queue]
        guess = [self.plan.ready[m] for m in wanted]
        for _ in range(ROUNDS):
            backs = [back for passage in passages for back in passage.backs]
            for micro, job in arrivals.items():
                beside.jobs.duration[job] = backs[micro]
            order, starts = timed(beside.jobs)
            there = self._there(beside, order, starts)
            late = [
                r
                for r, some in enumerate(self._slices())
                if _waits_else(passages[r].starts, guess[some], there[some])
            ]
            if not late:
                return self._merged(beside, order, starts, passages)
            ready = [0] * len(wanted)
            for place, m in enumerate(wanted):
                ready[m] = there[place]
            for r in late:
                passages[r] = self.load.lane.run(self.plan.queues[r], ready)
            guess = there
        return None

    def _into(self) -> Iterator[Edge]:
        """The edges from other sections into the pipeline."""
        return (e for e in self.composer.plan.edges if e.dst in self.names and e.src not in self.names)

    def _slices(self) -> Iterator[slice]:
        """Where the micro-batches of each replica stand."""
        start = 0
        for queue in self.plan.queues:
            yield slice(start, start := start + len(queue))

    def _beside(self) -> tuple[Step, dict[int, int]]:
        """The other sections' jobs, and for each of the first stage's micro-batches the job that stands for
        the end of its backward."""
        plan = self.composer.plan
        step, sections = (
            make(plan, self.composer.graph, self.tables, self.messages, (), self.names),
            {s.name: s for s in plan.sections},
        )
        awaiting: dict[int, list[int]] = {}
        for edge in self._into():
            if returns_gradient(edge, sections):
                for a, b in self.messages[edge.name]:
                    awaiting.setdefault(b, []).append(step.numbers[edge.src].backward + a)
        return step, {micro: step.jobs.arrive(0, jobs) for micro, jobs in awaiting.items()}

    def _there(self, beside: Step, order: Sequence[int], starts: Sequence[int]) -> list[int]:
        """When the first stage's micro-batches have what they need."""
        ends = [0] * len(order)
        for job, start in zip(order, starts, strict=True):
            ends[job] = start + beside.jobs.duration[job]
        found = [0] * len(self.load.size)
        for edge in self._into():
            forward = beside.numbers[edge.src].forward
            for a, b in self.messages[edge.name]:
                found[b] = max(found[b], ends[forward + a])
        return found

    def _merged(
        self, beside: Step, order: Sequence[int], starts: Sequence[int], passages: Sequence[Passage]
    ) -> tuple[list[int], int]:
        """One order of all jobs. What takes no time goes before what starts at the same time, and where both
        take none, what may wait for the other comes second."""
        pieces = [
            *self._pieces(beside, order, starts, False),
            *self._stage_pieces(passages),
            *self._pieces(beside, order, starts, True),
        ]
        jobs, begun, lasts = map(torch.cat, zip(*pieces, strict=True))
        at = torch.argsort(2 * begun + (lasts > 0), stable=True)
        return jobs[at].tolist(), int((begun + lasts).max()) if len(at) else 0

    def _pieces(
        self, beside: Step, order: Sequence[int], starts: Sequence[int], backward: bool
    ) -> Iterator[Piece]:
        """The jobs of the other sections in their order, with their numbers among all: forwards, or what
        comes behind these."""
        number = [-1] * len(beside.jobs.rank)
        for name, n in beside.numbers.items():
            for k, (some, own) in enumerate(zip(n.parts, self.numbers[name].parts, strict=True)):
                if (k > 0) == backward:
                    number[some.start : some.stop] = own
        chosen = [
            (number[job], start, beside.jobs.duration[job])
            for job, start in zip(order, starts, strict=True)
            if number[job] >= 0
        ]
        if chosen:
            jobs, begun, lasts = map(integers, zip(*chosen, strict=True))
            yield jobs, begun, lasts

    def _stage_pieces(self, passages: Sequence[Passage]) -> list[Piece]:
        """The stages' forwards, the first stage's first, then their backwards, the last stage's first, then
        the second parts of these.

        The last stage runs a micro-batch's backward right after its forward.
        """
        lane, wanted = self.load.lane, integers(chain.from_iterable(self.plan.queues))
        stages = [(s, self.numbers[stage.name]) for s, stage in enumerate(self.stages)]

        def piece(start: int, times: Sequence[Sequence[int]], part: int, s: int) -> Piece:
            lasts = integers(times[s])[wanted]
            ends = integers(chain.from_iterable(passage.ends[part][s] for passage in passages))
            return torch.arange(start, start + len(wanted)), ends - lasts, lasts

        forwards = [piece(n.forward, lane.forward, 0, s) for s, n in stages]
        backwards = [piece(n.backward, lane.backward, 1, s) for s, n in reversed(stages)]
        (jobs, begun, lasts), (_, _, then) = (
            forwards.pop(),
            backwards.pop(0),
        )  # the last stage's jobs are both
        forwards.append((jobs, begun, lasts + then))
        return [
            *forwards,
            *backwards,
            *(piece(n.weight, lane.weight, 2, s) for s, n in stages if lane.weight),
        ]


def _waits_else(starts: Sequence[int], guess: Sequence[int], there: Sequence[int]) -> bool:
    """Whether a queue that was run with a guess of when things are there would wait longer, or less long."""
    return any(t > start or t < g == start for start, g, t in zip(starts, guess, there, strict=True))
