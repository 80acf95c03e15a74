"""From the IR and a cluster to the solver's problem: each section's candidates and what edges cost.

Layouts, sizes and ways to run that no other one beats are candidates
(`secc.alloc.problem.candidate_pruning`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, prod

from secc import process_map
from secc.alloc.problem import candidate_pruning
from secc.alloc.problem.candidates import Load, Workload, fitting, replica_of, stays, ways_to_run
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.stackable_layers import declared_layers
from secc.alloc.problem.types import ALL, Candidate, Edge, Pool, Problem
from secc.cost.model import roofline
from secc.cost.model.patterns_and_transfers import Crossing, micro_batch
from secc.errors import UserError
from secc.ir.analysis.tp_layouts import cuttable
from secc.runtime.plan.expr_eval import evaluate
from secc.runtime.validation.send_window import SENDS

MANY_RANKS = (
    64  # from which on a section's candidates are so many that copies of the process make them sooner
)


def problem(work: Workload, ranks: int, strategy: str, pins: Pins, free: bool = True) -> Problem:
    """The solver's problem for `ranks` devices. Raises UserError for pins that leave a section without a
    candidate.

    Unless `free`, only pinned sections have replicas of several ranks.
    """
    if work.kinds and strategy in {"auto", "apart"} and ranks == work.cluster.ranks:
        return _of_kinds(work, strategy, pins, free)
    capacity, alike = work.cluster.device.usable, strategy == "uniform"
    sections: dict[str, tuple[Candidate, ...]] = {}
    for name, every in _fitting(work, work.loads, ranks, pins, free, alike).items():
        found = (replace(c, kind=ALL) for c in every) if work.kinds else every
        sections[name] = candidate_pruning.unbeaten(found, capacity, alike)
    return Problem(
        sections, edges(work, sections), ranks, capacity, strategy, pins.together, work.cluster.per_node
    )


def _of_kinds(work: Workload, strategy: str, pins: Pins, free: bool) -> Problem:
    """The problem of a cluster of several kinds of devices: each section on one of them, or on all ranks with
    the worst figures."""
    pools = tuple(Pool(part.cluster.ranks, part.cluster.device.usable) for part in work.kinds)
    sections = {name: tuple(_of_any_kind(work, name, pins, free)) for name in work.loads}
    capacity = max(pool.capacity for pool in pools)
    ranks = work.cluster.ranks
    return Problem(
        sections,
        edges(work, sections),
        ranks,
        capacity,
        strategy,
        pins.together,
        work.cluster.per_node,
        pools=pools,
    )


def _of_any_kind(work: Workload, name: str, pins: Pins, free: bool) -> list[Candidate]:
    """A section's candidates. Raises UserError for pins that no kind can meet."""
    found: list[Candidate] = []
    errors: list[UserError] = []
    for kind, part in ((ALL, work), *enumerate(work.kinds)):
        try:
            every = _fitting(
                part, {name: part.loads[name]}, part.cluster.ranks, pins, free, whole=kind == ALL
            )[name]
            found += candidate_pruning.unbeaten(
                (replace(c, kind=kind) for c in every), part.cluster.device.usable
            )
        except UserError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def edges(work: Workload, sections: Mapping[str, tuple[Candidate, ...]]) -> tuple[Edge, ...]:
    """What edges cost under each of the sections' candidates."""
    return tuple(_edge(work, c, sections) for c in work.crossings)


def usable_ranks(work: Workload, strategy: str, pins: Pins, ranks: int) -> int:
    """The most ranks of `ranks` that can all have work."""
    largest = {
        name: max(tp * pp for tp, pp in shapes(work, load, pins, ranks)) for name, load in work.loads.items()
    }
    counts = [work.samples(load) * largest[name] for name, load in work.loads.items()]
    return max(counts) if strategy in {"colocate", "uniform"} else sum(counts)


def _fitting(
    work: Workload,
    loads: Mapping[str, Load],
    ranks: int,
    pins: Pins,
    free: bool,
    alike: bool = False,
    whole: bool = False,
) -> dict[str, list[Candidate]]:
    """Sections' candidates on up to `ranks` devices, or on exactly so many (`whole`), without those that
    others of their shape beat.

    Those that fit no device are among them only where none of their section does.
    """
    capacity, every = (
        work.cluster.device.usable,
        {name: shapes(work, load, pins, ranks, free) for name, load in loads.items()},
    )

    def found(names: Sequence[str], most: int | None) -> dict[str, list[Candidate]]:
        def of_shape(item: tuple[str, tuple[int, int]]) -> tuple[Candidate, ...]:
            name, shape = item
            own = _candidates(work, loads[name], ranks, pins, shape, min(map(prod, every[name])), whole, most)
            return candidate_pruning.unbeaten(own, capacity, alike)

        items = [(name, shape) for name in names for shape in every[name]]
        some = process_map.mapped(of_shape, items) if ranks >= MANY_RANKS else map(of_shape, items)
        of = {name: list[Candidate]() for name in names}
        for (name, _), candidates in zip(items, some, strict=True):
            of[name] += candidates
        return of

    made = found([*loads], capacity)
    none = [name for name, candidates in made.items() if not any(c.memory <= capacity for c in candidates)]
    return made | (found(none, None) if none else {})


def _candidates(
    work: Workload,
    load: Load,
    ranks: int,
    pins: Pins,
    shape: tuple[int, int],
    least: int,
    whole: bool,
    capacity: int | None,
) -> Iterator[Candidate]:
    """Candidates of one (tp, pp), without those that need more than `capacity` bytes. `least` are the ranks
    of the smallest replicas."""
    ways, size_of_replica = ways_to_run(work, load, pins), prod(shape)
    replica = replica_of(work, load, *shape, ranks)
    most = min(ranks // size_of_replica, work.global_batch)
    if size_of_replica > least and (pins.fixed(load.name, "dp") or 1) > most:
        return  # so many replicas are for the smaller ones
    for dp in pins.dp(
        load.name, most, candidate_pruning.replicas(size_of_replica, ranks, work.cluster.per_node, most)
    ):
        if whole and dp * size_of_replica != ranks:
            continue
        fit = {sharding: capacity is None or stays(replica, dp, sharding, capacity) for sharding, _ in ways}
        for size in pins.micro_batch(load.name, -(-work.samples(load) // dp)):
            for way in (way for way in ways if fit[way[0]]):
                yield from fitting(work, replica, dp, size, *way, capacity)


def shapes(work: Workload, load: Load, pins: Pins, ranks: int, free: bool = True) -> list[tuple[int, int]]:
    """The (tp, pp) to consider: pinned ones, and where `free` those that the section is known to take."""
    whole = (load.cost.trainable and work.unshardable) or pins.splits_backward(load.name)
    tps = [1, *cuttable(work.graph, load.section)] if free and not whole else [1]
    layers = min(declared_layers(work.graph, load.section), work.places(load))
    stages = candidate_pruning.powers(max(1, layers)) if free else [1]
    found = [
        (tp, pp) for tp in pins.choices(load.name, "tp", tps) for pp in pins.choices(load.name, "pp", stages)
    ]
    fixed = pins.fixed(load.name, "tp") and pins.fixed(load.name, "pp")
    return (
        found
        if fixed
        else [s for s in found if s[0] * s[1] <= ranks and s[0] <= work.cluster.per_node] or found[:1]
    )


def _edge(work: Workload, crossing: Crossing, sections: Mapping[str, tuple[Candidate, ...]]) -> Edge:
    src, dst = work.loads[crossing.src], work.loads[crossing.dst]
    gradient = crossing.grad and src.mode != "forward" and dst.mode != "forward"
    directions = 2 if gradient else 1
    free = _independent(src, dst)
    sizes = {c.micro_batch for name in (crossing.src, crossing.dst) for c in sections[name]}
    largest = {n: _largest(work, crossing, src, n) for n in sizes}
    message = {n: roofline.message_ns(size, work.cluster) for n, size in largest.items()}
    batch = [micro_batch(work.graph, p.sizes, ceil(work.global_batch * p.share)) for p in src.active]
    total = sum(evaluate(crossing.size, sizes) for sizes in batch)
    latency = work.cluster.link(work.cluster.ranks).latency_ns
    return Edge(
        src=crossing.src,
        dst=crossing.dst,
        sent=tuple(_held(total, largest, c) for c in sections[crossing.src]),
        returned=tuple(gradient * _held(total, largest, c) for c in sections[crossing.dst]),
        latency=tuple(
            c.fill_ns + gradient * c.drain_ns + directions * message[c.micro_batch]
            for c in sections[crossing.src]
        ),
        slack=tuple((c.micro_batches - 1) * c.drain_ns for c in sections[crossing.src]),
        free=tuple(int(free * c.time_ns) for c in sections[crossing.dst]),
        messages=tuple(directions * latency * c.micro_batches for c in sections[crossing.dst]),
        round=tuple(c.fill_ns + c.drain_ns for c in sections[crossing.dst]),
    )


def _held(total: int, largest: Mapping[int, int], c: Candidate) -> int:
    """Bytes of messages that a rank has sent and that are not received yet; the ranks of tp send a slice
    each."""
    return -(-min(-(-total // c.dp), SENDS * largest[c.micro_batch]) // c.tp)


def _independent(src: Load, dst: Load) -> Fraction:
    """The share of dst's samples that need nothing of src."""
    alone = sum((p.share for p in dst.active if p not in src.active), Fraction(0))
    return alone / dst.share if dst.share else Fraction(0)


def _largest(work: Workload, crossing: Crossing, src: Load, samples: int) -> int:
    """Bytes of the tensors of a micro-batch of `samples`, at the largest pattern."""
    return max((evaluate(crossing.size, work.sizes(p, samples)) for p in src.active), default=0)
