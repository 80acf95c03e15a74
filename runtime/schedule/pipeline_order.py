"""Plans the orders of a pipeline's replicas: which micro-batches each replica takes, and in which order.

With stages, balanced replicas do not end together. While a long micro-batch passes one stage after another,
the other stages run dry, and the replica loses up to several times its length. So the longest micro-batches
are not spread: each replica in turn takes a run of the longest ones left, up to a share of the work that it
aims at, and short ones fill the replicas up. Few replicas then lose much time, and get less work.

1. *Aims*. Each replica aims at an amount of work. Its lost time is guessed from its longest micro-batch
   first, then read off a simulation of the replica alone (`pipeline_replica_sim`), in as many rounds as the
   step is worth. Replicas that lose more get less work, so that all end together.
2. *Shapes*. An order rises from short to long and falls again: short ones fill and drain the pipeline fast,
   and next to the long ones there is work on all stages. Micro-batches that need nothing upstream stand at
   both ends, two of them (`pyramid_order`) or all (`sandwich_order`). Each replica takes the shape that ends
   first. Where upstream has about as much to do as the pipeline and ends last, micro-batches that owe it
   gradients go first (`upstream_first_order`), behind a few that keep stages busy until their inputs come.
3. *Upstream* takes samples in the order in which the first stages would start them if all inputs were ready.
   The first stages keep to their orders, so the simulations of the replicas and the estimate of upstream
   (`upstream_estimate`) tell when the step ends.
4. *Moves*. The time that the step is still worth goes into other strategies, and into moves of a micro-batch
   within the order that ends last or to another replica (or, where upstream ends last, of the micro-batch
   that upstream waits for). With many tries, any order may change, and upstream's order with it
   (`search_orders`).

All arithmetic is on integers with a fixed seed and counted tries, so every rank finds the same orders.
Limits: eight stages with fewer than 64 micro-batches per replica, where the longest chains leave stages idle
in any order. Pipelines that share ranks with other sections, or feed some, are not planned.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import NamedTuple

from secc.runtime.schedule.pipeline_replica_sim import PipelineReplica, ReplicaTimeline

MicroBatchOrder = list[int]
DrainEstimate = Callable[[Sequence[int]], int]  # ns of upstream's end, given when gradients reach it
OrderShape = Callable[[Sequence[int], "PipelineLoad"], MicroBatchOrder]
PYRAMID_END_COUNT = 2  # micro-batches without upstream inputs at each end of a pyramid
MOVES_PER_REPLICA = 8  # moves tried by `improve_last_order` for each replica
ORDER_SEARCH_PATIENCE = 300  # tries without a gain before giving up
MAX_SIMULATED_REPLICAS = 16  # if there are more, only this many are simulated in the first round
AIM_GUESS_ROUNDS = 2  # rounds of assignment by guessed lost time
SMALL_LOSS_DIVISOR = 50  # a replica that loses at most 1/50 of its work keeps its shape
STEEP_RISING_PERMILLE = 650  # micro-batches before the longest one in `steep_order`


@dataclass(frozen=True)
class PipelineLoad:
    """The micro-batches of a pipeline with `replica_count` replicas.

    By micro-batch: `work_ns` is its mean work on a rank, `upstream_ns` the upstream backward time after its
    own backward, `needs_upstream` whether it has inputs from other sections. `estimate_upstream(starts)`
    estimates when the inputs of each micro-batch are ready if upstream takes them by these start times, and
    returns with it the estimate of when upstream ends, given the ends of the first stage's backwards.
    `upstream_work_ns` is all that the busiest rank upstream has to do. `simulated` caches
    `simulate_all_ready`.
    """

    replica: PipelineReplica
    replica_count: int
    work_ns: Sequence[int]
    upstream_ns: Sequence[int]
    needs_upstream: Sequence[bool]
    estimate_upstream: Callable[[Sequence[int]], tuple[list[int], DrainEstimate]]
    upstream_work_ns: int = 0
    simulated: dict[tuple[int, ...], ReplicaTimeline] = field(
        init=False, repr=False, compare=False, default_factory=dict[tuple[int, ...], ReplicaTimeline]
    )

    def end_with_upstream(self, order: MicroBatchOrder, timeline: ReplicaTimeline) -> int:
        """Returns when a replica ends, including the upstream backwards that follow its own."""
        ends = map(int.__add__, timeline.backward_ends, map(self.upstream_ns.__getitem__, order))
        return max(timeline.end, max(ends, default=0))

    def simulate_all_ready(
        self, orders: Sequence[MicroBatchOrder]
    ) -> tuple[list[ReplicaTimeline], list[int]]:
        """Simulates the replicas as if all inputs were ready; returns their timelines and the start of each
        micro-batch.
        """
        starts = [0] * len(self.work_ns)
        timelines = [self._simulate_cached(order, starts) for order in orders]
        for order, timeline in zip(orders, timelines, strict=True):
            for m, start in zip(order, timeline.starts, strict=True):
                starts[m] = start
        return timelines, starts

    def _simulate_cached(self, order: MicroBatchOrder, ready: Sequence[int]) -> ReplicaTimeline:
        """Simulates a replica with all inputs ready; many plans share the order of some replica."""
        key = tuple(order)
        if key not in self.simulated:
            self.simulated[key] = self.replica.simulate(order, ready)
        return self.simulated[key]


# -- assignment


def assign_by_aims(work_ns: Sequence[int], aims: Sequence[int], share: int) -> list[list[int]]:
    """Assigns micro-batches to replicas: first a run of the longest up to `share` permille of the replica's
    aim, then others, each to the replica farthest below its aim.
    """
    order = sorted(range(len(work_ns)), key=work_ns.__getitem__, reverse=True)
    by_replica: list[list[int]] = [[] for _ in aims]
    heap: list[tuple[int, int]] = []
    next_longest = 0
    for replica, aim in enumerate(aims):
        load = 0
        while next_longest < len(order) and 1000 * (load + work_ns[order[next_longest]]) <= share * aim:
            load += work_ns[order[next_longest]]
            by_replica[replica].append(order[next_longest])
            next_longest += 1
        heap.append((load - aim, replica))
    heapify(heap)
    for m in order[next_longest:]:
        load, replica = heap[0]
        heapreplace(heap, (load + work_ns[m], replica))
        by_replica[replica].append(m)
    return by_replica


def estimate_pipeline_loss(longest: int, stages: int, aim: int) -> int:
    """Estimates the time that a replica with this longest micro-batch loses, in ns.

    Fitted to simulations of up to eight stages.
    """
    return max(0, 22 * (stages - 1) * longest // 3 - 3 * aim) // 10


# -- shapes


def pyramid_order(micro_batches: Sequence[int], load: PipelineLoad, rising: int = 500) -> MicroBatchOrder:
    """Returns the order that rises and then falls, with `rising` permille of the micro-batches before the
    longest.
    """
    order = sorted(micro_batches, key=lambda m: (load.work_ns[m], m))
    ends = [m for m in order if not load.needs_upstream[m]][: 2 * PYRAMID_END_COUNT]
    up, down, permille, at_ends = list[int](), list[int](), 0, set(ends)
    for m in order if not ends else [m for m in order if m not in at_ends]:
        permille += rising
        (up if permille >= 1000 else down).append(m)
        permille %= 1000
    return [*ends[0::2], *up, *reversed(down), *reversed(ends[1::2])]


def steep_order(micro_batches: Sequence[int], load: PipelineLoad) -> MicroBatchOrder:
    """Returns a pyramid with more micro-batches before the longest."""
    return pyramid_order(micro_batches, load, STEEP_RISING_PERMILLE)


def sandwich_order(micro_batches: Sequence[int], load: PipelineLoad) -> MicroBatchOrder:
    """Returns the order in which micro-batches with upstream inputs rise and fall in the middle; the others
    rise before and fall after them.
    """
    order = sorted(micro_batches, key=lambda m: (load.work_ns[m], m))
    independent, dependent = (
        [m for m in order if load.needs_upstream[m] == needs] for needs in (False, True)
    )
    return [*independent[0::2], *dependent[0::2], *reversed(dependent[1::2]), *reversed(independent[1::2])]


def upstream_first_order(micro_batches: Sequence[int], load: PipelineLoad, leading: int) -> MicroBatchOrder:
    """Returns the order that starts with the `leading` shortest micro-batches that need nothing upstream, and
    goes on with those that owe upstream gradients, which rise and fall; the others fall behind them.

    So gradients come back as early as they can, and upstream does not wait for them.
    """
    order = sorted(micro_batches, key=lambda m: (load.work_ns[m], m))
    first = [m for m in order if not load.needs_upstream[m] and not load.upstream_ns[m]][:leading]
    owing = [m for m in order if load.upstream_ns[m]]
    others = [m for m in order if not load.upstream_ns[m] and m not in first]
    return [*first, *owing[0::2], *reversed(owing[1::2]), *reversed(others)]


ORDER_SHAPES: tuple[OrderShape, ...] = (pyramid_order, steep_order, sandwich_order)


class OrderStrategy(NamedTuple):
    """How orders are planned.

    `longest_permille`: share of a replica's aim that its run of longest micro-batches takes. `rounds`: how
    often aims are corrected. `shapes`: shapes to try. `yields_late`: whether a late micro-batch may let the
    next ready one pass.
    """

    longest_permille: int
    rounds: int
    shapes: tuple[OrderShape, ...] = ORDER_SHAPES
    yields_late: bool = False


LIKELIEST_STRATEGY = OrderStrategy(500, 4, yields_late=True)
OTHER_STRATEGIES = (
    OrderStrategy(650, 4),
    OrderStrategy(500, 4),
    OrderStrategy(350, 4),
    OrderStrategy(800, 4),
)
# Where upstream ends last or hardly before the pipeline, and its busiest rank has at least this share of the
# step's time to do. Deep pipelines need more micro-batches to begin with, and long ones on few replicas.
UPSTREAM_STRATEGIES = tuple(
    OrderStrategy(share, 2, (partial(upstream_first_order, leading=count),))
    for share, count in ((350, 4), (500, 2), (650, 4))
)
BUSY_UPSTREAM_PERMILLE = 667
LATE_UPSTREAM_PERMILLE = 940  # of the step's end: other orders may end sooner, and upstream with them


# -- planning


@dataclass
class PipelineOrders:
    """Orders of all replicas with their timelines, simulated one by one; times in ns.

    `ends`: by replica, including upstream backwards. By micro-batch: `wanted_starts` with all inputs ready,
    `ready` (estimated inputs), `backward_ends` on the first stage. `upstream_end`: when upstream ends its
    backwards, by `estimate_drained`.
    """

    orders: list[MicroBatchOrder]
    timelines: list[ReplicaTimeline]
    ends: list[int]
    wanted_starts: list[int]
    ready: list[int]
    backward_ends: list[int]
    estimate_drained: DrainEstimate
    upstream_end: int = 0

    @property
    def end(self) -> int:
        """When all replicas and upstream have ended, in ns."""
        return max(self.upstream_end, *self.ends)

    def set_order(
        self, load: PipelineLoad, replica: int, order: MicroBatchOrder, timeline: ReplicaTimeline
    ) -> None:
        """Gives a replica this order, with its simulated timeline."""
        self.orders[replica] = order
        self.timelines[replica] = timeline
        self.ends[replica] = load.end_with_upstream(order, timeline)
        for m, end in zip(order, timeline.backward_ends, strict=True):
            self.backward_ends[m] = end

    def try_order(self, load: PipelineLoad, replica: int, order: MicroBatchOrder) -> bool:
        """Gives a replica this order if it then ends sooner, and returns whether it does."""
        timeline = load.replica.simulate_within(order, self.ready, self.ends[replica] - 1)
        is_shorter = timeline is not None and load.end_with_upstream(order, timeline) < self.ends[replica]
        if timeline is not None and is_shorter:
            self.set_order(load, replica, order, timeline)
        return is_shorter


def plan_orders(load: PipelineLoad, strategy: OrderStrategy) -> PipelineOrders:
    """Returns the best orders of a strategy's rounds; each round corrects the aims by the last one's lost
    time.
    """
    aims = _guess_aims(load, strategy.longest_permille)
    first, *other_shapes = strategy.shapes
    shapes = [first] * load.replica_count
    best: PipelineOrders | None = None
    if load.replica_count > MAX_SIMULATED_REPLICAS:
        assigned = assign_by_aims(load.work_ns, aims, strategy.longest_permille)
        aims = _equalize_ends(
            *_interpolate_ends(load, [first(micro_batches, load) for micro_batches in assigned])
        )
    for round_index in range(strategy.rounds - (load.replica_count > MAX_SIMULATED_REPLICAS)):
        assigned = assign_by_aims(load.work_ns, aims, strategy.longest_permille)
        orders = _shape_orders(
            load, assigned, shapes, other_shapes if round_index == 0 else (), strategy.yields_late
        )
        best = orders if best is None or orders.end < best.end else best
        aims = _equalize_ends(
            orders.ends, [sum(map(load.work_ns.__getitem__, micro_batches)) for micro_batches in assigned]
        )
    assert best is not None
    return best


def plans_for_upstream(load: PipelineLoad, known: PipelineOrders) -> list[PipelineOrders]:
    """Returns orders that give upstream its gradients early, where upstream is busy and ends about as late as
    the step of the `known` orders; none elsewhere. Estimates are too coarse to tell which of them is best."""
    mean_work = sum(load.work_ns) // load.replica_count
    is_busy = 1000 * load.upstream_work_ns >= BUSY_UPSTREAM_PERMILLE * mean_work
    ends_late = 1000 * known.upstream_end >= LATE_UPSTREAM_PERMILLE * known.end
    return [plan_orders(load, s) for s in UPSTREAM_STRATEGIES] if is_busy and ends_late else []


def _interpolate_ends(load: PipelineLoad, orders: Sequence[MicroBatchOrder]) -> tuple[list[int], list[int]]:
    """Returns when replicas end with all inputs ready, and their work, in ns.

    A sample of the replicas is simulated. Neighbours have similar micro-batches, so the lost time of the
    replicas between two simulated ones is interpolated.
    """
    work = [sum(map(load.work_ns.__getitem__, order)) for order in orders]
    sampled = [i * (len(orders) - 1) // (MAX_SIMULATED_REPLICAS - 1) for i in range(MAX_SIMULATED_REPLICAS)]
    all_ready = [0] * len(load.work_ns)
    losses = [load.replica.simulate(orders[i], all_ready).end - work[i] for i in sampled]
    ends = work.copy()
    for (a, loss_before), (b, loss_after) in pairwise(zip(sampled, losses, strict=True)):
        for i in range(a, b + 1):
            ends[i] = work[i] + loss_before + (loss_after - loss_before) * (i - a) // (b - a)
    return ends, work


def _guess_aims(load: PipelineLoad, share: int) -> list[int]:
    """Returns the aims of all replicas, with lost time guessed from their longest micro-batches."""
    aims = [sum(load.work_ns) // load.replica_count] * load.replica_count
    for _ in range(AIM_GUESS_ROUNDS):
        assigned = assign_by_aims(load.work_ns, aims, share)
        work = [sum(map(load.work_ns.__getitem__, micro_batches)) for micro_batches in assigned]
        longest = [max(map(load.work_ns.__getitem__, micro_batches), default=0) for micro_batches in assigned]
        loss = [
            estimate_pipeline_loss(work_of_longest, load.replica.rank_count, sum(work) // load.replica_count)
            for work_of_longest in longest
        ]
        aims = _equalize_ends(list(map(int.__add__, work, loss)), work)
    return aims


def _equalize_ends(ends: Sequence[int], work: Sequence[int]) -> list[int]:
    """Returns the work that lets all replicas end together if each loses as much time as now."""
    mean = sum(ends) // len(ends)
    return [max(0, mean - end + replica_work) for end, replica_work in zip(ends, work, strict=True)]


def _shape_orders(
    load: PipelineLoad,
    assigned: Sequence[Sequence[int]],
    shapes: list[OrderShape],
    tried: Sequence[OrderShape],
    lets_pass: bool,
) -> PipelineOrders:
    """Orders the micro-batches of each replica, simulates them, and estimates upstream.

    A replica that loses much takes the shape of `tried` that ends first; this changes `shapes`. With
    `lets_pass`, a replica that waits for upstream lets ready micro-batches pass late ones, which mostly ends
    sooner. For replicas that decide the end of the step, the order without that is tried as well.
    """
    initial = [shape(micro_batches, load) for shape, micro_batches in zip(shapes, assigned, strict=True)]
    timelines, starts = load.simulate_all_ready(initial)
    ready, drained = load.estimate_upstream(starts)
    orders = PipelineOrders(
        initial.copy(), timelines, [0] * len(initial), starts, ready, [0] * len(starts), drained
    )
    yielding = set[int]()
    for replica, (order, timeline) in enumerate(zip(initial, timelines.copy(), strict=True)):
        if any(orders.ready[m] > start for m, start in zip(order, timeline.starts, strict=True)):
            yielding_order = _yield_late(order, timeline.starts, orders.ready) if lets_pass else order
            timeline = load.replica.simulate(yielding_order, orders.ready)
            yielding |= {replica} if yielding_order != order else set()
            orders.set_order(load, replica, yielding_order, timeline)
        else:
            orders.set_order(load, replica, order, timeline)
        work = sum(map(load.work_ns.__getitem__, order))
        for shape in tried if orders.ends[replica] > work + work // SMALL_LOSS_DIVISOR else ():
            if orders.try_order(load, replica, shape(order, load)):
                shapes[replica] = shape
    while (last := max(range(len(initial)), key=orders.ends.__getitem__)) in yielding:
        yielding.remove(last)
        orders.try_order(load, last, initial[last])
    orders.upstream_end = orders.estimate_drained(orders.backward_ends)
    return orders


def _evaluate_orders(load: PipelineLoad, orders: Sequence[MicroBatchOrder]) -> PipelineOrders:
    """Simulates these orders, with upstream taking micro-batches by the starts that they imply."""
    timelines, starts = load.simulate_all_ready(orders)
    ready, drained = load.estimate_upstream(starts)
    evaluated = PipelineOrders(
        [*orders], timelines, [0] * len(orders), starts, ready, [0] * len(starts), drained
    )
    for replica, (order, timeline) in enumerate(zip(orders, timelines.copy(), strict=True)):
        has_late_inputs = any(
            evaluated.ready[m] > start for m, start in zip(order, timeline.starts, strict=True)
        )
        evaluated.set_order(
            load,
            replica,
            order,
            load.replica.simulate(order, evaluated.ready) if has_late_inputs else timeline,
        )
    evaluated.upstream_end = evaluated.estimate_drained(evaluated.backward_ends)
    return evaluated


def _yield_late(order: MicroBatchOrder, starts: Sequence[int], ready: Sequence[int]) -> MicroBatchOrder:
    """Returns the order in which a micro-batch that is late for its start lets the next ready one pass."""
    remaining, reordered = order.copy(), list[int]()
    for start in starts:
        m = next((m for m in remaining if ready[m] <= start), None)
        m = min(remaining, key=ready.__getitem__) if m is None else m
        remaining.remove(m)
        reordered.append(m)
    return reordered


# -- moves


def improve_last_order(load: PipelineLoad, best: PipelineOrders) -> PipelineOrders:
    """Tries moves that shorten the order that ends last, or upstream if that ends last; returns the best
    orders.

    The start times that upstream follows stay as they are.
    """
    rng = random.Random(0)
    for _ in range(MOVES_PER_REPLICA * load.replica_count):
        moved = _move_micro_batch(load, best, rng)
        best = moved if moved.end <= best.end else best
    return best


def _move_micro_batch(load: PipelineLoad, current: PipelineOrders, rng: random.Random) -> PipelineOrders:
    """Moves one micro-batch of the order that ends last, or the last one that upstream waits for, to a random
    place.
    """
    end_of = current.ends.__getitem__
    source = max(range(load.replica_count), key=end_of)
    if current.upstream_end >= current.end and any(load.upstream_ns):
        owed = [m for m, upstream in enumerate(load.upstream_ns) if upstream]
        m = max(owed, key=current.backward_ends.__getitem__)
        source = next(replica for replica, order in enumerate(current.orders) if m in order)
    elif current.orders[source]:
        m = rng.choice(current.orders[source])
    else:
        return current
    target = min(range(load.replica_count), key=end_of) if rng.random() < 0.5 else source
    changed = {source: current.orders[source].copy()}
    changed[source].remove(m)
    changed.setdefault(target, current.orders[target].copy())
    changed[target].insert(rng.randrange(len(changed[target]) + 1), m)
    timelines: dict[int, ReplicaTimeline] = {}
    for replica, order in changed.items():
        timeline = load.replica.simulate_within(
            order, current.ready, current.end, current.orders[replica], current.timelines[replica]
        )
        if timeline is None or load.end_with_upstream(order, timeline) > current.end:
            return current
        timelines[replica] = timeline
    moved = replace(
        current,
        orders=current.orders.copy(),
        timelines=current.timelines.copy(),
        ends=current.ends.copy(),
        backward_ends=current.backward_ends.copy(),
    )
    for replica, timeline in timelines.items():
        moved.set_order(load, replica, changed[replica], timeline)
    moved.upstream_end = moved.estimate_drained(moved.backward_ends)
    return moved


def search_orders(load: PipelineLoad, best: PipelineOrders, count: int) -> PipelineOrders:
    """Tries `count` random changes of the orders and returns the best; upstream follows the new start times
    each time.

    A change moves a micro-batch, most often one of the order that ends last, or swaps two.
    """
    rng, failed = random.Random(0), 0
    while count > 0 and failed < ORDER_SEARCH_PATIENCE and any(best.orders):
        count, failed = count - 1, failed + 1
        changed = _evaluate_orders(load, _perturb_orders(best, rng))
        if changed.end <= best.end:
            failed = failed if changed.end == best.end else 0
            best = changed
    return best


def _perturb_orders(current: PipelineOrders, rng: random.Random) -> list[MicroBatchOrder]:
    """Returns the orders with one micro-batch moved, or two swapped."""
    orders = [order.copy() for order in current.orders]
    nonempty = [r for r, order in enumerate(orders) if order]
    last_replica = max(nonempty, key=current.ends.__getitem__)
    source, target = (last_replica if rng.random() < 0.5 else rng.choice(nonempty) for _ in range(2))
    position = rng.randrange(len(orders[source]))
    if rng.random() < 0.5:
        other_position = rng.randrange(len(orders[target]))
        orders[source][position], orders[target][other_position] = (
            orders[target][other_position],
            orders[source][position],
        )
        return orders
    m = orders[source].pop(position)
    target = target if rng.random() < 0.5 else rng.randrange(len(orders))
    orders[target].insert(rng.randrange(len(orders[target]) + 1), m)
    return orders
