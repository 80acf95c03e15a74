"""Builds the solver's `Problem` from the IR and a cluster: candidates of each section, and the costs of
edges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from math import ceil
from operator import le

from secc import process_map
from secc.alloc.problem import candidate_pruning
from secc.alloc.problem.allowed_choices import (
    list_backward_parts,
    list_offloads,
    list_sharding_and_recompute,
    require_exchanging_replicas,
    require_offload,
    require_rank_load,
)
from secc.alloc.problem.candidates import (
    fixed_memory_fits,
    micro_batches_held,
    price_fitting_candidates,
    time_without_update_ns,
    with_sample_limit,
)
from secc.alloc.problem.dealt_prices import DealtPrices
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.row_parts import row_part_choices
from secc.alloc.problem.section_load import SectionLoad
from secc.alloc.problem.sequence_norms import list_norms
from secc.alloc.problem.stackable_layers import count_declared_layers, runs_layers_again
from secc.alloc.problem.types import ALL_KINDS, AllocEdge, Candidate, DevicePool, Problem, ReplicaShape
from secc.alloc.problem.workload import Workload
from secc.cost.model import roofline
from secc.cost.model.cp_scaling import can_exchange_heads, can_share_frames
from secc.cost.model.patterns_and_transfers import SectionTransfer, micro_batch_sizes
from secc.errors import UserError
from secc.ir.analysis.token_count import token_count
from secc.ir.analysis.tp_layouts import feasible_tp
from secc.ir.analysis.whole_batch import ALONE
from secc.ir.dialect.ops import WHOLE_ATTRIBUTE, strings_of
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.validation.send_window import DEFAULT_SEND_LIMIT

MAX_EXPERT_PARTS = 64  # the largest ep that is considered without a pin
_Choices = tuple[int, int, int, str, str, int]  # ep, dp, micro-batch, sharding, recompute, backward parts
# From this number of ranks on, forked processes price a section's many candidates faster, and those that take
# very long are not priced.
PARALLEL_PRICING_RANKS = 64
TIME_LIMIT_RATIO = 5
FAR_WITHIN_RATIO = 4  # with a time of at most this part of the limit, no other way is held against it


def build_problem(
    work: Workload,
    ranks: int,
    strategy: str,
    pins: Pins,
    free: bool = True,
    most_dealt: int | None = None,
    most_ns: int | None = None,
) -> Problem:
    """Builds the solver's problem for `ranks` devices.

    With `free=False` only pinned sections have replicas of several ranks. Given `most_dealt`, sections with
    cp deal their micro-batches if that is not pinned, in candidates with at most that many ns of work of all
    ranks if they did not. Given `most_ns`, candidates in which a rank computes for longer than that are left
    out; clusters of several kinds of devices have all. Raises UserError for pins that leave a section without
    a candidate.
    """
    if work.by_kind and strategy in {"auto", "apart"} and ranks == work.cluster.ranks:
        return _build_mixed_problem(work, strategy, pins, free)
    capacity, by_micro_batch = work.cluster.device.usable_memory, strategy == "uniform"
    sections: dict[str, tuple[Candidate, ...]] = {}
    for name, fitting in _fitting_candidates(
        work, work.loads, ranks, pins, free, by_micro_batch, most_dealt=most_dealt, most_ns=most_ns
    ).items():
        on_all_kinds = (replace(c, kind=ALL_KINDS) for c in fitting) if work.by_kind else fitting
        sections[name] = candidate_pruning.prune_dominated(on_all_kinds, capacity, by_micro_batch)
    return Problem(
        sections,
        price_edges(work, sections),
        ranks,
        capacity,
        strategy,
        pins.together + work.sharing_sections,
        work.cluster.per_node,
        host_capacity=work.cluster.device.usable_host_memory,
    )


def _build_mixed_problem(work: Workload, strategy: str, pins: Pins, free: bool) -> Problem:
    """Problem of a cluster of several device kinds: a section runs on one kind, or on all ranks with the
    worst figures."""
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
        pins.together + work.sharing_sections,
        work.cluster.per_node,
        pools=pools,
        host_capacity=work.cluster.device.usable_host_memory,
    )


def _candidates_of_any_kind(work: Workload, name: str, pins: Pins, free: bool) -> list[Candidate]:
    """Candidates of a section on each device kind and on all. Raises UserError for pins that no kind can
    meet."""
    candidates: list[Candidate] = []
    errors: list[UserError] = []
    for kind, work_on_kind in ((ALL_KINDS, work), *enumerate(work.by_kind)):
        try:
            fitting = _fitting_candidates(
                work_on_kind,
                {name: work_on_kind.loads[name]},
                work_on_kind.cluster.ranks,
                pins,
                free,
                whole=kind == ALL_KINDS,
            )[name]
            candidates += candidate_pruning.prune_dominated(
                (replace(c, kind=kind) for c in fitting), work_on_kind.cluster.device.usable_memory
            )
        except UserError as error:
            errors.append(error)
    if not candidates:
        raise errors[0]
    return candidates


def price_edges(work: Workload, sections: Mapping[str, tuple[Candidate, ...]]) -> tuple[AllocEdge, ...]:
    """Prices the edges under each candidate of the sections at their ends."""
    return tuple(_price_edge(work, c, sections) for c in work.crossings)


def count_usable_ranks(work: Workload, strategy: str, pins: Pins, ranks: int) -> int:
    """The largest number of ranks, up to `ranks`, that can all have work. On CPUs a free cp is only a last
    resort for memory, so it does not count."""
    shares_memory = work.cluster.device.backend == "cpu"
    largest_replica = {
        name: max(
            shape.ranks
            for shape in parallel_shapes(work, load, pins, ranks)
            if not shares_memory or shape.cp in (1, pins.pinned_number(name, "cp"))
        )
        for name, load in work.loads.items()
    }
    replicas = {
        name: 1 if work.whole_batch_kind(load) == ALONE else work.active_sample_count(load)
        for name, load in work.loads.items()
    }
    counts = {name: count * largest_replica[name] for name, count in replicas.items()}
    if strategy in {"colocate", "uniform"}:
        return max(counts.values())
    sharing = set(chain.from_iterable(work.sharing_sections))
    shared = max((counts[name] for name in sharing), default=0)
    return shared + sum(count for name, count in counts.items() if name not in sharing)


def estimate_longest_time(work: Workload, ranks: int, pins: Pins, free: bool = True) -> int | None:
    """Ns that a rank computes for a section at most in plans worth a look: `TIME_LIMIT_RATIO` times what all
    sections take on most ranks, one after the other, if activations needed no memory. None where candidates
    are too few to leave any out."""
    if ranks < PARALLEL_PRICING_RANKS or work.by_kind:
        return None
    capacity, total = work.cluster.device.usable_memory, 0
    for name, load in work.loads.items():
        times: list[int] = []
        for shape in parallel_shapes(work, load, pins, ranks, free):
            most = min(ranks // shape.ranks, work.global_batch)
            if (pins.pinned_number(name, "dp") or 1) > most:
                continue  # possible with smaller replicas, or refused where candidates are listed
            counts = candidate_pruning.replica_counts(shape.ranks, ranks, work.cluster.per_node, most)
            dp = max(pins.dp_choices(name, most, counts), default=0)
            sizes, _ = _micro_batch_limits(work, load, pins, -(-work.active_sample_count(load) // max(1, dp)))
            times += (
                time_without_update_ns(work, by_norms[0], dp, size, "none", recompute)
                for (sharding, recompute), offload, by_norms in list_rank_loads(work, load, shape, pins)
                if dp and fixed_memory_fits(by_norms[0], dp, sharding, offload, capacity)
                for size in sizes
            )
        if not times:
            return None
        total += min(times)
    return TIME_LIMIT_RATIO * total


def _fitting_candidates(
    work: Workload,
    loads: Mapping[str, SectionLoad],
    ranks: int,
    pins: Pins,
    free: bool,
    by_micro_batch: bool = False,
    whole: bool = False,
    most_dealt: int | None = None,
    most_ns: int | None = None,
) -> dict[str, list[Candidate]]:
    """Undominated candidates of sections on up to `ranks` devices, or with `whole` on exactly that many.
    most_dealt, most_ns: see `build_problem`.

    Candidates that fit no device are included only for sections without a fitting one.
    """
    capacity = work.cluster.device.usable_memory
    shapes = {name: parallel_shapes(work, load, pins, ranks, free) for name, load in loads.items()}
    prices = {name: DealtPrices(work, load) for name, load in loads.items()}

    map_shapes = process_map.map_in_processes if ranks >= PARALLEL_PRICING_RANKS else map
    # what candidates depend on
    asked = pins.as_text, pins.refused, ranks, whole, by_micro_batch, most_ns

    def price_shapes(names: Sequence[str], most: int | None) -> dict[str, list[Candidate]]:
        def of_shape(item: tuple[str, ReplicaShape]) -> tuple[Candidate, ...]:
            name, shape = item
            base = work.without_offloads
            known = base.cached_candidates.get((asked, most, name, shape)) if base is not None else None
            least = min(s.ranks for s in shapes[name])
            of_this_shape = _candidates_of_shape(
                work, loads[name], ranks, pins, shape, least, whole, most, most_ns, known
            )
            return candidate_pruning.prune_dominated(of_this_shape, capacity, by_micro_batch)

        def price_as_dealt(name: str, shape: ReplicaShape) -> tuple[Candidate, ...]:
            found = work.cached_candidates[asked, most, name, shape]
            if shape.cp == 1 or not _deals(pins, name, most_dealt):
                return found
            most_work = None if pins.deals_micro_batches(name) else most_dealt
            degrees = pins.words.get(name, {}).get("cp_degrees", "any")
            return tuple(
                prices[name].price_as_dealt(c, degrees)
                for c in found
                if most_work is None or c.least_work <= most_work
            )

        items = [(name, shape) for name in names for shape in shapes[name]]
        new = [item for item in items if (asked, most, *item) not in work.cached_candidates]
        work.cached_candidates.update(
            ((asked, most, *item), found) for item, found in zip(new, map_shapes(of_shape, new), strict=True)
        )
        by_section = {name: list[Candidate]() for name in names}
        for name, shape in items:  # here: forked processes would each evaluate what shapes have in common
            by_section[name] += price_as_dealt(name, shape)
        return by_section

    fitting = price_shapes([*loads], capacity)
    unfitting = [
        name for name, candidates in fitting.items() if not any(c.memory <= capacity for c in candidates)
    ]
    return fitting | (price_shapes(unfitting, None) if unfitting else {})


def _deals(pins: Pins, section: str, most_dealt: int | None) -> bool:
    """Whether candidates of a section with cp deal their micro-batches."""
    is_pinned = "cp_per" in pins.words.get(section, {})
    return pins.deals_micro_batches(section) if is_pinned else most_dealt is not None


def _candidates_of_shape(
    work: Workload,
    load: SectionLoad,
    ranks: int,
    pins: Pins,
    shape: ReplicaShape,
    least: int,
    whole: bool,
    capacity: int | None,
    most_ns: int | None,
    known: Sequence[Candidate] | None = None,
) -> Iterator[Candidate]:
    """Yields the candidates of one (tp, pp, cp) that need at most `capacity` bytes, and at most `most_ns` on
    a rank. `least` is the number of ranks of the smallest replica. `known`: the undominated ones without
    offload, if they are priced already; these are not priced again."""
    by_choices: dict[_Choices, list[Candidate]] = {}
    for c in known or ():
        by_choices.setdefault(_choices_of(c), []).append(c)
    for ep in expert_parts(work, load, pins, shape, ranks):
        yield from _candidates_of_parts(
            work,
            load,
            ranks,
            pins,
            shape._replace(ep=ep),
            least,
            whole,
            capacity,
            most_ns,
            None if known is None else by_choices,
        )


def _choices_of(c: Candidate) -> _Choices:
    """What tells a candidate of a (tp, pp, cp) without offload from others, apart from memory in flight."""
    return c.ep, c.dp, c.micro_batch, c.sharding, c.recompute, c.backward_parts


def expert_parts(work: Workload, load: SectionLoad, pins: Pins, shape: ReplicaShape, ranks: int) -> list[int]:
    """The ep to consider for a section on up to `ranks` ranks: the pinned one, else powers of two that divide
    its experts, in a replica all of its ranks or none. Ranks on CPUs share a memory, so they gain nothing.
    Of experts that neither compute grouped products nor were counted on samples, no one knows how many tokens
    travel: only a pin divides them."""
    tp = shape.tp
    experts, undivided = load.cost.experts, load.cost.trainable and work.unshardable
    free = [1]
    experts = experts if load.cost.routed_work != "0" else 0
    if experts and not undivided and shape.cp == 1 and work.cluster.device.backend != "cpu":
        most = min(experts, ranks, MAX_EXPERT_PARTS)
        free += [n for n in candidate_pruning.powers_of_two(most) if n >= max(2, tp) and experts % n == 0]
    if pins.splits_backward(load.name):
        free = [n for n in free if n <= tp]
    return pins.number_choices(load.name, "ep", free)


def _candidates_of_parts(
    work: Workload,
    load: SectionLoad,
    ranks: int,
    pins: Pins,
    shape: ReplicaShape,
    least: int,
    whole: bool,
    capacity: int | None,
    most_ns: int | None,
    known: Mapping[_Choices, Sequence[Candidate]] | None,
) -> Iterator[Candidate]:
    """Yields the candidates of one shape; `known` has those without offload that are priced already."""
    modes, size_of_replica = list_sharding_and_recompute(work, load, pins), shape.ranks
    offloads = {way: list_offloads(work, load, shape, way, pins) for way, _ in modes}
    if not any(offloads.values()):
        if shape.ep > shape.tp and pins.pinned_number(load.name, "ep") is None:
            return  # possible without parts of experts on other replicas
        require_offload(work, load, shape, offloads, pins)
    replica = require_rank_load(work, load, shape, ranks)
    most = min(ranks // size_of_replica, work.global_batch)
    replicas = max(1, shape.ep // shape.tp)
    if size_of_replica == least and pins.pinned_number(load.name, "ep") is not None:
        require_exchanging_replicas(replica, most, pins)
    if size_of_replica > least and (pins.pinned_number(load.name, "dp") or 1) > most:
        return  # the pinned dp is possible with smaller replicas only
    all_ways = list_rank_loads(work, load, shape, pins)
    counts = [
        dp
        for dp in pins.dp_choices(
            load.name,
            most,
            candidate_pruning.replica_counts(size_of_replica, ranks, work.cluster.per_node, most),
        )
        if dp % replicas == 0 and (dp * size_of_replica == ranks or not whole)
    ]
    by_count = {dp: list[Candidate]() for dp in counts}
    # By mode and shape: what did not fit, as (samples of a micro-batch, micro-batches held). Larger
    # micro-batches, more of them, and fewer replicas need more of the device; what is in host memory depends
    # on all micro-batches. A single copy of the parameters needs no memory for sums, so it is apart.
    exceeded: dict[tuple[tuple[str, str], ReplicaShape, bool], list[tuple[int, int, int]]] = {}
    for dp in sorted(counts, reverse=True):
        fixed_fits = {
            (sharding, offload): capacity is None
            or fixed_memory_fits(replica, dp, sharding, offload, capacity)
            for sharding, of_sharding in offloads.items()
            for offload in of_sharding
        }
        samples = -(-work.active_sample_count(load) // dp)
        sizes, limits = _micro_batch_limits(work, load, pins, samples)
        ways = [(mode, by_norms) for mode, offload, by_norms in all_ways if fixed_fits[mode[0], offload]]
        times = _LeastTimes(work, dp, most_ns)
        if ways and times.are_far_within(all_ways[0][2][0], sizes[0]):
            times = _LeastTimes(work, dp, None)
        for size in sizes:
            for mode, by_norms in ways:
                first = by_norms[0].shape
                if not times.are_within(by_norms[0], size, *mode):
                    continue
                if known is not None and first.offload == "none":
                    by_count[dp] += known.get((shape.ep, dp, size, *mode, first.backward_parts), ())
                    continue
                found: list[Candidate] = []
                for rank in by_norms:
                    held = size, *micro_batches_held(work, rank, dp, size)
                    failed = exceeded.setdefault((mode, rank.shape, dp * rank.shape.cp > 1), [])
                    if any(all(map(le, less, held)) for less in failed):
                        continue
                    fitting = price_fitting_candidates(work, rank, dp, size, *mode, capacity)
                    found += fitting
                    # Stages with less memory in use hold more micro-batches, and wait less for each other.
                    if fitting and shape.pp == 1:
                        break
                    if not fitting and rank.shape.offload == "none":
                        failed.append(held)
                if "micro_batch_tokens" in limits:
                    found = [replace(c, **limits) for c in found]
                elif limits:
                    own = [(c, work.rank_load(load, c.shape)) for c in found]
                    found = [with_sample_limit(work, rank, c, **limits) for c, rank in own]
                by_count[dp] += found
        if not times.any_within:
            break  # with fewer replicas, each computes for longer
    for dp in counts:
        yield from by_count[dp]


class _LeastTimes:
    """Least times of `dp` replicas, held against a limit in ns, None for no limit. `any_within`: whether a
    time that was asked for is within it."""

    def __init__(self, work: Workload, dp: int, limit: int | None) -> None:
        self._work, self._dp, self._limit = work, dp, limit
        self._known: dict[tuple[int, int, str], bool] = {}
        self.any_within = limit is None

    def are_far_within(self, rank: SectionLoad, size: int) -> bool:
        """Whether steps take no more than a part of the limit even with the smallest micro-batches, of `size`
        samples, and layers that run again, so that no way needs to be held against it."""
        if self._limit is None:
            return True
        most_ns = time_without_update_ns(self._work, rank, self._dp, size, "none", "full")
        return FAR_WITHIN_RATIO * most_ns <= self._limit

    def are_within(self, rank: SectionLoad, size: int, sharding: str, recompute: str) -> bool:
        """Whether a step is within the limit with micro-batches of `size` samples."""
        if self._limit is None:
            return True
        # Times without sharding are memoised and hold for most of its ways. ZeRO-3 takes longer.
        key = id(rank), size, recompute
        if key not in self._known:
            least_ns = time_without_update_ns(self._work, rank, self._dp, size, "none", recompute)
            self._known[key] = least_ns <= self._limit
            self.any_within |= self._known[key]
        return self._known[key] and (
            sharding != "zero3"
            or time_without_update_ns(self._work, rank, self._dp, size, sharding, recompute) <= self._limit
        )


def list_rank_loads(
    work: Workload, load: SectionLoad, shape: ReplicaShape, pins: Pins
) -> list[tuple[tuple[str, str], str, list[SectionLoad]]]:
    """Lists the ways to run replicas of a shape: ((sharding, recompute), offload, load of a rank by how norms
    are computed)."""
    norms = list_norms(work, load, shape, pins)
    return [
        (
            mode,
            offload,
            [
                work.rank_load(load, shape._replace(backward_parts=parts, offload=offload, norms=way))
                for way in norms
            ],
        )
        for mode in list_sharding_and_recompute(work, load, pins)
        for parts in list_backward_parts(load, shape, mode[0], pins)
        for offload in list_offloads(work, load, shape, mode[0], pins)
        if parts == 1 or offload != "activations"
    ]


def _micro_batch_limits(
    work: Workload, load: SectionLoad, pins: Pins, samples: int
) -> tuple[list[int], dict[str, int]]:
    """Returns the mean samples of a micro-batch to consider for `samples` samples on a replica, and the
    limits on tokens and samples if the section has a token budget, or the `most` short samples if that is
    pinned."""
    if work.whole_batch_kind(load):
        return [samples], {}
    tokens = pins.pinned_number(load.name, "micro_batch_tokens")
    if tokens is None:
        most = pins.pinned_number(load.name, "most_samples")
        sizes = pins.micro_batch_choices(load.name, samples)
        if most is None:
            return sizes, {}
        if min(sizes) > most:
            raise UserError(
                f"{load.name}.most_samples={most} is impossible with {load.name}.micro_batch={min(sizes)}",
                remedy=f"set {load.name}.most_samples to at least {min(sizes)}, or leave it out",
            )
        return [n for n in sizes if n <= most], {"most": most}
    counted = token_count(work.graph)
    if not counted:
        message = f"{load.name}.micro_batch_tokens={tokens} is impossible: samples have no texts to count"
        raise UserError(message, remedy=f"set {load.name}.micro_batch, a number of samples")
    most = min(samples, pins.pinned_number(load.name, "micro_batch") or samples)
    summed = sum(
        p.share * evaluate_expr(counted, work.mean_micro_batch_sizes(p, 1)) for p in load.active_patterns
    )
    size = max(1, min(most, int(tokens * load.sample_share / max(1, summed))))
    return [size], {"micro_batch_tokens": tokens, "sample_limit": most}


def parallel_shapes(
    work: Workload, load: SectionLoad, pins: Pins, ranks: int, free: bool = True
) -> list[ReplicaShape]:
    """The (tp, pp, cp) to consider: pinned ones, and with `free` all that the section supports."""
    undivided = load.cost.trainable and work.unshardable
    tps = [1, *feasible_tp(work.graph, load.section)] if free and not undivided else [1]
    layers = count_cuttable_layers(work, load)
    chunks, placement = pins.interleaving(load.name) or (1, "loop")
    may_have_stages = (free or chunks > 1) and not (load.cost.trainable and work.coupled)
    # Closed forms cannot tell the pipelines of mixtures of experts apart, so these get fewer to compare.
    counts = candidate_pruning.powers_of_two if load.cost.experts else candidate_pruning.stage_counts
    stages = counts(max(1, layers)) if may_have_stages else [1]
    ep = pins.pinned_number(load.name, "ep") or 1
    shapes = [
        ReplicaShape(tp, pp, cp, chunks=chunks, placement=placement)
        for tp in pins.number_choices(load.name, "tp", tps)
        for pp in pins.number_choices(load.name, "pp", stages)
        for cp in row_part_choices(work, load, pins, tp, pp, ranks, free)
    ]
    if chunks > 1:
        staged = [s for s in shapes if s.pp > 1]
        shapes = [s for s in staged if s.stages <= layers] or staged[:1] or shapes[-1:]
    shapes = [s for s in shapes if s.tp % ep == 0 or ep % s.tp == 0] or shapes
    attention = pins.words.get(load.name, {}).get("attention")
    if attention == "ulysses":
        shapes = [s for s in shapes if can_exchange_heads(load.cost, s.tp, s.cp)]
        if not shapes:
            raise _refuse_head_exchange(load)
    if attention == "frames":
        shapes = [s for s in shapes if can_share_frames(load.cost, s.cp)]
        if not shapes:
            raise _refuse_whole_frames(load)
    if pins.deals_micro_batches(load.name):
        shapes = [s for s in shapes if s.cp > 1]
        if not shapes:
            raise UserError(
                f"{load.name}.cp_per=micro_batch is impossible: micro-batches are dealt to ranks of cp, which"
                " must be above 1",
                remedy=f"set {load.name}.cp above 1, or leave it out",
            )
    both_pinned = pins.pinned_number(load.name, "tp") and pins.pinned_number(load.name, "pp")
    return (
        shapes
        if both_pinned
        else [s for s in shapes if s.ranks <= ranks and s.tp <= work.cluster.per_node] or shapes[:1]
    )


def count_cuttable_layers(work: Workload, load: SectionLoad) -> int:
    """The number of layers between which stages of a section may be cut, as far as capture has shown; 1 for
    layers that run again in the same forward, which stages would hold once for each run."""
    if runs_layers_again(work.graph, load.section) or any(
        WHOLE_ATTRIBUTE in work.graph.blocks[path].attributes for path in strings_of(load.section.blocks)
    ):
        return 1
    return min(count_declared_layers(work.graph, load.section), work.stackable_layers(load))


def _refuse_head_exchange(load: SectionLoad) -> UserError:
    name, heads = load.name, load.cost.key_heads
    reason = (
        f"cp must be above 1, and tp * cp a divisor of its {heads} heads of keys and values"
        if heads > 1
        else "not all its layers call scaled_dot_product_attention with several heads of keys and values"
    )
    return UserError(
        f"{name}.attention=ulysses is impossible: {reason}", remedy=f"set another {name}.cp, or leave it out"
    )


def _refuse_whole_frames(load: SectionLoad) -> UserError:
    if load.cost.batch_entries != "0":
        return UserError(
            f"{load.name}.attention=frames is impossible: cp must be above 1",
            remedy=f"set another {load.name}.cp, or leave out {load.name}.attention",
        )
    return UserError(
        f"{load.name}.attention=frames is impossible: its layers do not work on a batch in which a sample has"
        " several entries, such as the frames of a video",
        remedy=f"leave out {load.name}.attention",
    )


def _price_edge(
    work: Workload, crossing: SectionTransfer, sections: Mapping[str, tuple[Candidate, ...]]
) -> AllocEdge:
    """Edge of the solver's problem for a transfer between two sections."""
    src, dst = work.loads[crossing.src], work.loads[crossing.dst]
    gradient = crossing.grad and src.mode != "forward" and dst.mode != "forward"
    directions = 2 if gradient else 1
    independent = _independent_share(src, dst)
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
        independent_ns=tuple(int(independent * c.time_ns) for c in sections[crossing.dst]),
        message_ns=tuple(directions * latency * c.micro_batches for c in sections[crossing.dst]),
        round_trip_ns=tuple(c.fill_ns + c.drain_ns for c in sections[crossing.dst]),
    )


def _unreceived_bytes(total: int, largest: Mapping[int, int], c: Candidate) -> int:
    """Bytes of sent messages that a rank holds until they are received; each rank of a stage sends a
    slice."""
    return -(-min(-(-total // c.dp), DEFAULT_SEND_LIMIT * largest[c.micro_batch]) // c.stage_ranks)


def _independent_share(src: SectionLoad, dst: SectionLoad) -> Fraction:
    """Share of dst's samples that need nothing from src."""
    independent = sum((p.share for p in dst.active_patterns if p not in src.active_patterns), Fraction(0))
    return independent / dst.sample_share if dst.sample_share else Fraction(0)


def _largest_message_bytes(work: Workload, crossing: SectionTransfer, src: SectionLoad, samples: int) -> int:
    """Bytes of the tensors of a micro-batch of `samples`, for the largest pattern."""
    return max(
        (evaluate_expr(crossing.size, work.mean_micro_batch_sizes(p, samples)) for p in src.active_patterns),
        default=0,
    )
