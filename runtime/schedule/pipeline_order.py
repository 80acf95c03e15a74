"""The queues of a pipeline's replicas: which micro-batches each replica takes, and in which order.

With stages, balanced replicas do not end together. While a long micro-batch passes one stage after another
the others run dry, and the replica loses up to several times its length. So the longest are not spread: each
replica in turn takes a run of the longest ones left, up to a *share* of the work it is to have, and short
ones fill the replicas up. Few replicas then lose much, and get less work.

1. *Aims*. Each replica aims at an amount of work. What it loses is guessed from its longest micro-batch
  first, then read off a
   simulation of it alone (`lane`), with as many rounds as the step is worth; who loses more gets less, so
   that all end together.
2. *Shapes*. A queue rises from short to long and falls again: short ones fill the pipeline soon and drain it
  soon, and around the long
   ones there is something to do on all stages. What needs nothing upstream stands at both ends, two of it
   (`pyramid`) or all (`sandwich`). Each replica takes the shape that ends first.
3. *Upstream* takes samples in the order in which the first stages would start them if they were there. The
  first stages keep to their
   queues, so that replicas alone and upstream's times (`upstream`) tell when the step ends.
4. *Moves*. What the step is still worth goes into other manners of planning, and into changes of the queue
  that ends last: another place
   for one of its micro-batches, or another replica; or of that which upstream waits for, where upstream ends
   last. Where it is worth many tries, they change any queue, and upstream's order with it (`search`).

All of it is integers, a fixed seed and counted tries, so every rank finds the same. Where it loses: eight
stages with fewer than 64 micro-batches a replica, where the longest chains leave stages idle whatever comes
before and behind; stages that share ranks with other sections are not ordered by this, nor pipelines that
feed other ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import NamedTuple

from secc.runtime.schedule.pipeline_replica_sim import PipelineReplica, ReplicaTimeline

MicroBatchOrder = list[int]
OrderShape = Callable[[Sequence[int], "PipelineLoad"], MicroBatchOrder]
PYRAMID_END_COUNT = 2  # micro-batches that need nothing upstream at each end of a pyramid
MOVES_PER_REPLICA = 8  # tries for each replica
ORDER_SEARCH_PATIENCE = 300  # tries without a gain after which there is little hope
MAX_SIMULATED_REPLICAS = 16  # replicas; of more, this many are simulated in the first round
AIM_GUESS_ROUNDS = 2  # rounds of dealing by what replicas are guessed to lose
SMALL_LOSS_DIVISOR = 50  # a replica that loses one part in so many of its work, or less, keeps its shape
STEEP_RISING_PERMILLE = 650  # permille of the micro-batches that rise before a long one


@dataclass(frozen=True)
class PipelineLoad:
    """The micro-batches of a pipeline with so many replicas, and its stages.

    `size`: work on a stage, the mean of all; `owes`: what upstream has to do after a backward, both in ns.
    `needs`: whether upstream has to make something for it; `ready` guesses when that is there, if upstream
    takes them in the order of the times that it is given, and `drained` when upstream has ended, of when the
    first stage ends each backward.
    """

    replica: PipelineReplica
    replica_count: int
    work_ns: Sequence[int]
    upstream_ns: Sequence[int]
    needs_upstream: Sequence[bool]
    estimate_ready: Callable[[Sequence[int]], list[int]]
    estimate_drained: Callable[[Sequence[int]], int]
    simulated: dict[tuple[int, ...], ReplicaTimeline] = field(
        init=False, repr=False, compare=False, default_factory=dict[tuple[int, ...], ReplicaTimeline]
    )

    def end_with_upstream(self, queue: MicroBatchOrder, passage: ReplicaTimeline) -> int:
        """When the queue's replica, and what upstream then owes, have ended."""
        return max(
            [
                passage.end,
                *(back + self.upstream_ns[m] for back, m in zip(passage.backward_ends, queue, strict=True)),
            ]
        )

    def simulate_all_ready(
        self, queues: Sequence[MicroBatchOrder]
    ) -> tuple[list[ReplicaTimeline], list[int]]:
        """The queues' passages if upstream had everything, and when the first stages then start each
        micro-batch."""
        wanted = [0] * len(self.work_ns)
        passages = [self._simulate_cached(queue, wanted) for queue in queues]
        for queue, passage in zip(queues, passages, strict=True):
            for m, start in zip(queue, passage.starts, strict=True):
                wanted[m] = start
        return passages, wanted

    def _simulate_cached(self, queue: MicroBatchOrder, ready: Sequence[int]) -> ReplicaTimeline:
        """The queue's passage if upstream had everything: many plans have the same one for some replica."""
        key = tuple(queue)
        if key not in self.simulated:
            self.simulated[key] = self.replica.simulate(queue, ready)
        return self.simulated[key]


# -- dealing


def assign_by_aims(size: Sequence[int], aims: Sequence[int], share: int) -> list[list[int]]:
    """The micro-batches of each replica: a run of the longest up to `share` permille of its aim, then what
    fills it up."""
    order = sorted(range(len(size)), key=size.__getitem__, reverse=True)
    dealt: list[list[int]] = [[] for _ in aims]
    heap: list[tuple[int, int]] = []
    first = 0
    for replica, aim in enumerate(aims):
        load = 0
        while first < len(order) and 1000 * (load + size[order[first]]) <= share * aim:
            load += size[order[first]]
            dealt[replica].append(order[first])
            first += 1
        heap.append((load - aim, replica))
    heapify(heap)
    for m in order[first:]:
        load, replica = heap[0]
        heapreplace(heap, (load + size[m], replica))
        dealt[replica].append(m)
    return dealt


def estimate_pipeline_loss(longest: int, stages: int, aim: int) -> int:
    """What a replica with this longest micro-batch loses: fitted to simulations of up to eight stages."""
    return max(0, 22 * (stages - 1) * longest // 3 - 3 * aim) // 10


# -- shapes


def pyramid_order(dealt: Sequence[int], load: PipelineLoad, rising: int = 500) -> MicroBatchOrder:
    """Rising, then falling, with `rising` permille of the micro-batches before the longest."""
    order = sorted(dealt, key=lambda m: (load.work_ns[m], m))
    ends = [m for m in order if not load.needs_upstream[m]][: 2 * PYRAMID_END_COUNT]
    up, down, turn, apart = list[int](), list[int](), 0, set(ends)
    for m in order if not ends else [m for m in order if m not in apart]:
        turn += rising
        (up if turn >= 1000 else down).append(m)
        turn %= 1000
    return [*ends[0::2], *up, *reversed(down), *reversed(ends[1::2])]


def steep_order(dealt: Sequence[int], load: PipelineLoad) -> MicroBatchOrder:
    """A pyramid with more before its longest."""
    return pyramid_order(dealt, load, STEEP_RISING_PERMILLE)


def sandwich_order(dealt: Sequence[int], load: PipelineLoad) -> MicroBatchOrder:
    """What needs upstream rises and falls in the middle, what does not rises before it and falls behind."""
    order = sorted(dealt, key=lambda m: (load.work_ns[m], m))
    free, needy = ([m for m in order if load.needs_upstream[m] == wanted] for wanted in (False, True))
    return [*free[0::2], *needy[0::2], *reversed(needy[1::2]), *reversed(free[1::2])]


ORDER_SHAPES: tuple[OrderShape, ...] = (pyramid_order, steep_order, sandwich_order)


class OrderStrategy(NamedTuple):
    """How queues are planned: the permille of a replica's aim that a run of the longest takes, in how many
    rounds, of which shapes, and whether what is late may give its turn to what is there."""

    longest_permille: int
    rounds: int
    shapes: tuple[OrderShape, ...] = ORDER_SHAPES
    yields_late: bool = False


LIKELIEST_STRATEGY = OrderStrategy(650, 2, (pyramid_order,), yields_late=True)
OTHER_STRATEGIES = (
    OrderStrategy(650, 4, (pyramid_order,)),
    OrderStrategy(650, 4),
    OrderStrategy(500, 4),
    OrderStrategy(800, 4),
)


# -- planning


@dataclass
class PipelineOrders:
    """Queues, their passages by the simulation of each replica alone, when they end, when micro-batches are
    wanted, when upstream has them, when the first stage ends the backward of each, and when upstream then
    ends."""

    orders: list[MicroBatchOrder]
    timelines: list[ReplicaTimeline]
    ends: list[int]
    wanted_starts: list[int]
    ready: list[int]
    backward_ends: list[int]
    upstream_end: int = 0

    @property
    def end(self) -> int:
        """When all have ended."""
        return max(self.upstream_end, *self.ends)

    def set_order(
        self, load: PipelineLoad, replica: int, queue: MicroBatchOrder, passage: ReplicaTimeline
    ) -> None:
        """Give a replica this queue, whose passage is known."""
        self.orders[replica] = queue
        self.timelines[replica] = passage
        self.ends[replica] = load.end_with_upstream(queue, passage)
        for m, back in zip(queue, passage.backward_ends, strict=True):
            self.backward_ends[m] = back

    def try_order(self, load: PipelineLoad, replica: int, queue: MicroBatchOrder) -> bool:
        """Give a replica this queue if it then ends sooner."""
        passage = load.replica.simulate(queue, self.ready)
        if better := load.end_with_upstream(queue, passage) < self.ends[replica]:
            self.set_order(load, replica, queue, passage)
        return better


def plan_orders(load: PipelineLoad, manner: OrderStrategy) -> PipelineOrders:
    """The best of the manner's rounds, each of which aims at what the one before it lost."""
    aims = _guess_aims(load, manner.longest_permille)
    first, *others = manner.shapes
    shapes = [first] * load.replica_count
    best: PipelineOrders | None = None
    if load.replica_count > MAX_SIMULATED_REPLICAS:
        dealt = assign_by_aims(load.work_ns, aims, manner.longest_permille)
        aims = _equalize_ends(*_interpolate_ends(load, [first(some, load) for some in dealt]))
    for r in range(manner.rounds - (load.replica_count > MAX_SIMULATED_REPLICAS)):
        dealt = assign_by_aims(load.work_ns, aims, manner.longest_permille)
        found = _shape_orders(load, dealt, shapes, others if r == 0 else (), manner.yields_late)
        best = found if best is None or found.end < best.end else best
        aims = _equalize_ends(found.ends, [sum(map(load.work_ns.__getitem__, some)) for some in dealt])
    assert best is not None
    return best


def _interpolate_ends(load: PipelineLoad, queues: Sequence[MicroBatchOrder]) -> tuple[list[int], list[int]]:
    """When replicas end, and their work, if upstream had everything: some are simulated. Neighbours were
    dealt alike, so those between two of these lose what lies between."""
    work = [sum(map(load.work_ns.__getitem__, queue)) for queue in queues]
    places = [i * (len(queues) - 1) // (MAX_SIMULATED_REPLICAS - 1) for i in range(MAX_SIMULATED_REPLICAS)]
    there = [0] * len(load.work_ns)
    losses = [load.replica.simulate(queues[i], there).end - work[i] for i in places]
    ends = work.copy()
    for (a, before), (b, then) in pairwise(zip(places, losses, strict=True)):
        for i in range(a, b + 1):
            ends[i] = work[i] + before + (then - before) * (i - a) // (b - a)
    return ends, work


def _guess_aims(load: PipelineLoad, share: int) -> list[int]:
    aims = [sum(load.work_ns) // load.replica_count] * load.replica_count
    for _ in range(AIM_GUESS_ROUNDS):
        dealt = assign_by_aims(load.work_ns, aims, share)
        work = [sum(map(load.work_ns.__getitem__, some)) for some in dealt]
        longest = [max(map(load.work_ns.__getitem__, some), default=0) for some in dealt]
        loss = [
            estimate_pipeline_loss(most, len(load.replica.forward_ns), sum(work) // load.replica_count)
            for most in longest
        ]
        aims = _equalize_ends(list(map(int.__add__, work, loss)), work)
    return aims


def _equalize_ends(ends: Sequence[int], work: Sequence[int]) -> list[int]:
    """What replicas that lose as much as now should do, to end together."""
    mean = sum(ends) // len(ends)
    return [max(0, mean - end + own) for end, own in zip(ends, work, strict=True)]


def _shape_orders(
    load: PipelineLoad,
    dealt: Sequence[Sequence[int]],
    shapes: list[OrderShape],
    tried: Sequence[OrderShape],
    yields: bool,
) -> PipelineOrders:
    """Queues of what was dealt. Each replica that loses much takes the shape of `tried` that ends first,
    which changes `shapes`.

    One that waits for upstream may take the queue in which turns are given away (`yields`), which mostly ends
    sooner: the one in which they are not is looked at where it decides when the step ends.
    """
    queues = [shape(some, load) for shape, some in zip(shapes, dealt, strict=True)]
    passages, wanted = load.simulate_all_ready(queues)
    found = PipelineOrders(
        queues.copy(), passages, [0] * len(queues), wanted, load.estimate_ready(wanted), [0] * len(wanted)
    )
    yielding = set[int]()
    for replica, (queue, passage) in enumerate(zip(queues, passages.copy(), strict=True)):
        if any(found.ready[m] > start for m, start in zip(queue, passage.starts, strict=True)):
            other = _yield_late(queue, passage.starts, found.ready) if yields else queue
            passage = load.replica.simulate(other, found.ready)
            yielding |= {replica} if other != queue else set()
            found.set_order(load, replica, other, passage)
        else:
            found.set_order(load, replica, queue, passage)
        work = sum(map(load.work_ns.__getitem__, queue))
        for shape in tried if found.ends[replica] > work + work // SMALL_LOSS_DIVISOR else ():
            if found.try_order(load, replica, shape(queue, load)):
                shapes[replica] = shape
    while (last := max(range(len(queues)), key=found.ends.__getitem__)) in yielding:
        yielding.remove(last)
        found.try_order(load, last, queues[last])
    found.upstream_end = load.estimate_drained(found.backward_ends)
    return found


def _evaluate_orders(load: PipelineLoad, queues: Sequence[MicroBatchOrder]) -> PipelineOrders:
    """These queues, if upstream takes micro-batches as they are wanted in them."""
    passages, wanted = load.simulate_all_ready(queues)
    found = PipelineOrders(
        [*queues], passages, [0] * len(queues), wanted, load.estimate_ready(wanted), [0] * len(wanted)
    )
    for replica, (queue, passage) in enumerate(zip(queues, passages.copy(), strict=True)):
        late = any(found.ready[m] > start for m, start in zip(queue, passage.starts, strict=True))
        found.set_order(load, replica, queue, load.replica.simulate(queue, found.ready) if late else passage)
    found.upstream_end = load.estimate_drained(found.backward_ends)
    return found


def _yield_late(queue: MicroBatchOrder, starts: Sequence[int], ready: Sequence[int]) -> MicroBatchOrder:
    """The queue in which what is not there when its turn comes gives that to the next one that is."""
    left, found = queue.copy(), list[int]()
    for start in starts:
        m = next((m for m in left if ready[m] <= start), None)
        m = min(left, key=ready.__getitem__) if m is None else m
        left.remove(m)
        found.append(m)
    return found


# -- moves


def improve_last_order(load: PipelineLoad, plan: PipelineOrders) -> PipelineOrders:
    """The plan after some tries to make the queue shorter that ends last, or upstream if that does;
    upstream's order stays as it is."""
    draw = random.Random(0)
    for _ in range(MOVES_PER_REPLICA * load.replica_count):
        found = _move_micro_batch(load, plan, draw)
        plan = found if found.end <= plan.end else plan
    return plan


def _move_micro_batch(load: PipelineLoad, plan: PipelineOrders, draw: random.Random) -> PipelineOrders:
    """The plan with another place for one micro-batch of the queue that ends last, or for the last one that
    upstream waits for."""
    ends, owing = plan.ends.__getitem__, [m for m, ns in enumerate(load.upstream_ns) if ns]
    source = max(range(load.replica_count), key=ends)
    if plan.upstream_end >= plan.end and owing:
        m = max(owing, key=plan.backward_ends.__getitem__)
        source = next(replica for replica, queue in enumerate(plan.orders) if m in queue)
    elif plan.orders[source]:
        m = draw.choice(plan.orders[source])
    else:
        return plan
    target = min(range(load.replica_count), key=ends) if draw.random() < 0.5 else source
    changed = {source: [other for other in plan.orders[source] if other != m]}
    changed.setdefault(target, plan.orders[target].copy())
    changed[target].insert(draw.randrange(len(changed[target]) + 1), m)
    copies = {name: getattr(plan, name).copy() for name in ("orders", "timelines", "ends", "backward_ends")}
    found = replace(plan, **copies)
    for replica, queue in changed.items():
        found.set_order(load, replica, queue, load.replica.simulate(queue, plan.ready))
        if found.ends[replica] > plan.end:
            return plan
    found.upstream_end = load.estimate_drained(found.backward_ends)
    return found


def search_orders(load: PipelineLoad, plan: PipelineOrders, count: int) -> PipelineOrders:
    """The plan after so many tries to make the step shorter, in each of which upstream takes micro-batches in
    the order that then suits.

    A try puts a micro-batch elsewhere, most often one of the queue that ends last, or lets two change places.
    """
    draw, failed = random.Random(0), 0
    while count > 0 and failed < ORDER_SEARCH_PATIENCE and any(plan.orders):
        count, failed = count - 1, failed + 1
        found = _evaluate_orders(load, _perturb_orders(plan, draw))
        if found.end <= plan.end:
            failed = failed if found.end == plan.end else 0
            plan = found
    return plan


def _perturb_orders(plan: PipelineOrders, draw: random.Random) -> list[MicroBatchOrder]:
    """The queues with one micro-batch in another place, or two in each other's."""
    found = [queue.copy() for queue in plan.orders]
    some = [r for r, queue in enumerate(found) if queue]
    last = max(some, key=plan.ends.__getitem__)
    source, target = (last if draw.random() < 0.5 else draw.choice(some) for _ in range(2))
    a = draw.randrange(len(found[source]))
    if draw.random() < 0.5:
        b = draw.randrange(len(found[target]))
        found[source][a], found[target][b] = found[target][b], found[source][a]
        return found
    m = found[source].pop(a)
    target = target if draw.random() < 0.5 else draw.randrange(len(found))
    found[target].insert(draw.randrange(len(found[target]) + 1), m)
    return found
