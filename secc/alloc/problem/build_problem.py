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
from secc.alloc.problem.candidates import (
    SectionLoad,
    Workload,
    fixed_memory_fits,
    list_sharding_and_recompute,
    price_fitting_candidates,
    require_rank_load,
)
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.stackable_layers import count_declared_layers
from secc.alloc.problem.types import ALL_KINDS, AllocEdge, Candidate, DevicePool, Problem
from secc.cost.model import roofline
from secc.cost.model.patterns_and_transfers import SectionTransfer, micro_batch_sizes
from secc.errors import UserError
from secc.ir.analysis.tp_layouts import feasible_tp
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.validation.send_window import DEFAULT_SEND_LIMIT

PARALLEL_PRICING_RANKS = (
    64  # from which on a section's candidates are so many that copies of the process make them sooner
)


def build_problem(work: Workload, ranks: int, strategy: str, pins: Pins, free: bool = True) -> Problem:
    """The solver's problem for `ranks` devices. Raises UserError for pins that leave a section without a
    candidate.

    Unless `free`, only pinned sections have replicas of several ranks.
    """
    if work.by_kind and strategy in {"auto", "apart"} and ranks == work.cluster.ranks:
        return _build_mixed_problem(work, strategy, pins, free)
    capacity, alike = work.cluster.device.usable_memory, strategy == "uniform"
    sections: dict[str, tuple[Candidate, ...]] = {}
    for name, every in _fitting_candidates(work, work.loads, ranks, pins, free, alike).items():
        found = (replace(c, kind=ALL_KINDS) for c in every) if work.by_kind else every
        sections[name] = candidate_pruning.prune_dominated(found, capacity, alike)
    return Problem(
        sections, price_edges(work, sections), ranks, capacity, strategy, pins.together, work.cluster.per_node
    )


def _build_mixed_problem(work: Workload, strategy: str, pins: Pins, free: bool) -> Problem:
    """The problem of a cluster of several kinds of devices: each section on one of them, or on all ranks with
    the worst figures."""
    pools = tuple(DevicePool(part.cluster.ranks, part.cluster.device.usable_memory) for part in work.by_kind)
    sections = {name: tuple(_candidates_of_any_kind(work, name, pins, free)) for name in work.loads}
    capacity = max(pool.capacity for pool in pools)
    ranks = work.cluster.ranks
    return Problem(
        sections,
        price_edges(work, sections),
        ranks,
        capacity,
        strategy,
        pins.together,
        work.cluster.per_node,
        pools=pools,
    )


def _candidates_of_any_kind(work: Workload, name: str, pins: Pins, free: bool) -> list[Candidate]:
    """A section's candidates. Raises UserError for pins that no kind can meet."""
    found: list[Candidate] = []
    errors: list[UserError] = []
    for kind, part in ((ALL_KINDS, work), *enumerate(work.by_kind)):
        try:
            every = _fitting_candidates(
                part, {name: part.loads[name]}, part.cluster.ranks, pins, free, whole=kind == ALL_KINDS
            )[name]
            found += candidate_pruning.prune_dominated(
                (replace(c, kind=kind) for c in every), part.cluster.device.usable_memory
            )
        except UserError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def price_edges(work: Workload, sections: Mapping[str, tuple[Candidate, ...]]) -> tuple[AllocEdge, ...]:
    """What edges cost under each of the sections' candidates."""
    return tuple(_price_edge(work, c, sections) for c in work.crossings)


def count_usable_ranks(work: Workload, strategy: str, pins: Pins, ranks: int) -> int:
    """The most ranks of `ranks` that can all have work."""
    largest = {
        name: max(tp * pp for tp, pp in parallel_shapes(work, load, pins, ranks))
        for name, load in work.loads.items()
    }
    counts = [work.active_sample_count(load) * largest[name] for name, load in work.loads.items()]
    return max(counts) if strategy in {"colocate", "uniform"} else sum(counts)


def _fitting_candidates(
    work: Workload,
    loads: Mapping[str, SectionLoad],
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
        work.cluster.device.usable_memory,
        {name: parallel_shapes(work, load, pins, ranks, free) for name, load in loads.items()},
    )

    def found(names: Sequence[str], most: int | None) -> dict[str, list[Candidate]]:
        def of_shape(item: tuple[str, tuple[int, int]]) -> tuple[Candidate, ...]:
            name, shape = item
            own = _candidates_of_shape(
                work, loads[name], ranks, pins, shape, min(map(prod, every[name])), whole, most
            )
            return candidate_pruning.prune_dominated(own, capacity, alike)

        items = [(name, shape) for name in names for shape in every[name]]
        some = (
            process_map.map_in_processes(of_shape, items)
            if ranks >= PARALLEL_PRICING_RANKS
            else map(of_shape, items)
        )
        of = {name: list[Candidate]() for name in names}
        for (name, _), candidates in zip(items, some, strict=True):
            of[name] += candidates
        return of

    made = found([*loads], capacity)
    none = [name for name, candidates in made.items() if not any(c.memory <= capacity for c in candidates)]
    return made | (found(none, None) if none else {})


def _candidates_of_shape(
    work: Workload,
    load: SectionLoad,
    ranks: int,
    pins: Pins,
    shape: tuple[int, int],
    least: int,
    whole: bool,
    capacity: int | None,
) -> Iterator[Candidate]:
    """Candidates of one (tp, pp), without those that need more than `capacity` bytes. `least` are the ranks
    of the smallest replicas."""
    ways, size_of_replica = list_sharding_and_recompute(work, load, pins), prod(shape)
    replica = require_rank_load(work, load, *shape, ranks)
    most = min(ranks // size_of_replica, work.global_batch)
    if size_of_replica > least and (pins.pinned_number(load.name, "dp") or 1) > most:
        return  # so many replicas are for the smaller ones
    for dp in pins.dp_choices(
        load.name, most, candidate_pruning.replica_counts(size_of_replica, ranks, work.cluster.per_node, most)
    ):
        if whole and dp * size_of_replica != ranks:
            continue
        fit = {
            sharding: capacity is None or fixed_memory_fits(replica, dp, sharding, capacity)
            for sharding, _ in ways
        }
        for size in pins.micro_batch_choices(load.name, -(-work.active_sample_count(load) // dp)):
            for way in (way for way in ways if fit[way[0]]):
                yield from price_fitting_candidates(work, replica, dp, size, *way, capacity)


def parallel_shapes(
    work: Workload, load: SectionLoad, pins: Pins, ranks: int, free: bool = True
) -> list[tuple[int, int]]:
    """The (tp, pp) to consider: pinned ones, and where `free` those that the section is known to take."""
    whole = (load.cost.trainable and work.unshardable) or pins.splits_backward(load.name)
    tps = [1, *feasible_tp(work.graph, load.section)] if free and not whole else [1]
    layers = min(count_declared_layers(work.graph, load.section), work.stackable_layers(load))
    stages = candidate_pruning.powers_of_two(max(1, layers)) if free else [1]
    found = [
        (tp, pp)
        for tp in pins.number_choices(load.name, "tp", tps)
        for pp in pins.number_choices(load.name, "pp", stages)
    ]
    fixed = pins.pinned_number(load.name, "tp") and pins.pinned_number(load.name, "pp")
    return (
        found
        if fixed
        else [s for s in found if s[0] * s[1] <= ranks and s[0] <= work.cluster.per_node] or found[:1]
    )


def _price_edge(
    work: Workload, crossing: SectionTransfer, sections: Mapping[str, tuple[Candidate, ...]]
) -> AllocEdge:
    src, dst = work.loads[crossing.src], work.loads[crossing.dst]
    gradient = crossing.grad and src.mode != "forward" and dst.mode != "forward"
    directions = 2 if gradient else 1
    free = _independent_share(src, dst)
    sizes = {c.micro_batch for name in (crossing.src, crossing.dst) for c in sections[name]}
    largest = {n: _largest_message_bytes(work, crossing, src, n) for n in sizes}
    message = {n: roofline.section_message_ns(size, work.cluster) for n, size in largest.items()}
    batch = [
        micro_batch_sizes(work.graph, p.sizes, ceil(work.global_batch * p.share)) for p in src.active_patterns
    ]
    total = sum(evaluate_expr(crossing.size, sizes) for sizes in batch)
    latency = work.cluster.slowest_link(work.cluster.ranks).latency_ns
    return AllocEdge(
        src=crossing.src,
        dst=crossing.dst,
        sent_bytes=tuple(_unreceived_bytes(total, largest, c) for c in sections[crossing.src]),
        returned_bytes=tuple(gradient * _unreceived_bytes(total, largest, c) for c in sections[crossing.dst]),
        latency_ns=tuple(
            c.fill_ns + gradient * c.drain_ns + directions * message[c.micro_batch]
            for c in sections[crossing.src]
        ),
        slack_ns=tuple((c.micro_batches - 1) * c.drain_ns for c in sections[crossing.src]),
        independent_ns=tuple(int(free * c.time_ns) for c in sections[crossing.dst]),
        message_ns=tuple(directions * latency * c.micro_batches for c in sections[crossing.dst]),
        round_trip_ns=tuple(c.fill_ns + c.drain_ns for c in sections[crossing.dst]),
    )


def _unreceived_bytes(total: int, largest: Mapping[int, int], c: Candidate) -> int:
    """Bytes of messages that a rank has sent and that are not received yet; the ranks of tp send a slice
    each."""
    return -(-min(-(-total // c.dp), DEFAULT_SEND_LIMIT * largest[c.micro_batch]) // c.tp)


def _independent_share(src: SectionLoad, dst: SectionLoad) -> Fraction:
    """The share of dst's samples that need nothing of src."""
    alone = sum((p.share for p in dst.active_patterns if p not in src.active_patterns), Fraction(0))
    return alone / dst.sample_share if dst.sample_share else Fraction(0)


def _largest_message_bytes(work: Workload, crossing: SectionTransfer, src: SectionLoad, samples: int) -> int:
    """Bytes of the tensors of a micro-batch of `samples`, at the largest pattern."""
    return max(
        (evaluate_expr(crossing.size, work.mean_micro_batch_sizes(p, samples)) for p in src.active_patterns),
        default=0,
    )
