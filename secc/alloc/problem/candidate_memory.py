"""Memory of a candidate on a rank: parameters, optimizer states, and what micro-batches keep for backward.

The largest pattern counts, and the largest listed sample in a micro-batch of its own. Bytes grow with sizes,
so samples that are smaller than another one in every size are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from secc.alloc.problem.in_flight import IN_FLIGHT_PER_STAGE, divide_in_flight_room, least_in_flight
from secc.alloc.problem.section_load import SectionLoad
from secc.alloc.problem.types import Candidate
from secc.alloc.problem.workload import Workload
from secc.cost.model.memory import RankMemory, rank_memory
from secc.runtime.plan.expr_eval import evaluate_expr, evaluate_expr_columns


def memory_on_rank(
    work: Workload,
    load: SectionLoad,
    dp: int,
    size: int,
    sharding: str,
    recompute: str,
    micro_batches: int,
    most: int = 0,
) -> RankMemory:
    """Bytes on a rank by purpose. A micro-batch of `size` samples keeps what backward needs and the tensors
    that enter and leave the section; the largest pattern counts. What passes need for a time is that of a
    micro-batch of `most` samples, if these are more.

    micro_batches: expected in a step. A single one saves memory, since gradients take the place of its
    activations; that counts only where there are no more samples than replicas.
    """
    if micro_batches == 1 and not work.whole_batch_kind(load) and work.active_sample_count(load) > dp:
        micro_batches = 2
    activation, working = _activation_bytes(work, load, size, recompute)
    if most > size:
        working = max(working, _activation_bytes(work, load, most, recompute)[1])
    memory = rank_memory(
        load.cost,
        activation,
        working,
        dp * load.shape.cp,
        sharding,
        micro_batches,
        _largest_sample_bytes(work, load, max(size, most), recompute),
        load.shape.offload,
    )
    if load.shape.backward_parts > 1:
        memory = memory._replace(kept_between=_bytes_between_parts(work, load, size, recompute))
    if (copies := load.activation_copies(recompute)) is None:
        return memory
    return memory._replace(host_activation=_moved_bytes(work, load, size, copies.moved, recompute))


def _bytes_between_parts(work: Workload, load: SectionLoad, size: int, recompute: str) -> int:
    """Bytes that a mean micro-batch keeps in addition between the parts of its split backward."""
    key = "between", size, recompute
    if key not in load.cached_numbers:
        text = load.cost_under_recompute(recompute).kept_between
        means = (evaluate_expr(text, work.mean_micro_batch_sizes(p, size)) for p in load.active_patterns)
        load.cached_numbers[key] = max(means, default=0), 0
    return load.cached_numbers[key][0]


def _moved_bytes(work: Workload, load: SectionLoad, size: int, moved: str, recompute: str) -> int:
    """Bytes that a micro-batch has in host memory, the largest listed sample alone included."""
    key = "moved", size, recompute
    if key not in load.cached_numbers:
        samples = chain.from_iterable(held for _, held in _sample_bytes(work, load, (moved,)))
        means = (evaluate_expr(moved, work.mean_micro_batch_sizes(p, size)) for p in load.active_patterns)
        load.cached_numbers[key] = max((*means, *samples), default=0), 0
    return load.cached_numbers[key][0]


def host_bytes(work: Workload, load: SectionLoad, rank: RankMemory) -> int:
    """Bytes of host memory of a rank, with as many micro-batches as it may hold in flight."""
    most = rank.micro_batches
    if load.name not in work.producing_sections:
        most = min(most, IN_FLIGHT_PER_STAGE * load.shape.pp)
    return rank.host_bytes(most)


def candidate_memory(work: Workload, load: SectionLoad, c: Candidate) -> RankMemory:
    """Bytes on one rank under candidate `c`. `load` must be that of a rank (see `Workload.rank_load`)."""
    most = 0 if c.micro_batch_tokens else c.sample_limit
    return memory_on_rank(work, load, c.dp, c.micro_batch, c.sharding, c.recompute, c.micro_batches, most)


def passing_bytes(work: Workload, load: SectionLoad, c: Candidate) -> int:
    """Bytes that passes of candidate `c` of a section need for a time on a rank."""
    return candidate_memory(work, work.rank_load(load, c.shape), c).transient_bytes(c.sharding)


def stage_in_flight_limit(
    work: Workload, load: SectionLoad, c: Candidate, stage: int, others: int = 0
) -> int:
    """Number of micro-batches that pipeline stage `stage` may hold: its part of up to
    `IN_FLIGHT_PER_STAGE * pp` micro-batches on its rank where memory allows, at least what `least_in_flight`
    says.

    `load` is that of a rank of the stage, `others` the bytes of other sections on it.
    """
    rank, device = candidate_memory(work, load, c), work.cluster.device
    least, most = least_in_flight(c.pp, c.chunks, stage), IN_FLIGHT_PER_STAGE * c.pp
    if c.chunks == 1:
        return next((n for n in range(most, least, -1) if rank.fits_device(n, device, others)), least)
    free_bytes = max(0, device.usable_memory - others - rank.fixed - rank.gradients)
    room = divide_in_flight_room(c.shape, stage, free_bytes, rank.largest_sample // c.chunks)
    part = load.stages.held[stage] / load.stages.layers
    room -= int(rank.kept_between * part)
    fitting = room // max(1, int(rank.activation * part))
    return max(least, min(divide_in_flight_room(c.shape, stage, c.chunks * most), fitting))


def _activation_bytes(work: Workload, load: SectionLoad, size: int, recompute: str) -> tuple[int, int]:
    """(bytes that a micro-batch keeps from forward to backward, bytes that its forward, backward or
    recomputation needs temporarily)."""
    if (size, recompute) not in load.cached_numbers:
        activation = working = 0
        saved = load.cost_under_recompute(recompute).saved
        for pattern in load.active_patterns:
            sizes = work.mean_micro_batch_sizes(pattern, size)
            activation = max(
                activation,
                sum(evaluate_expr(text, sizes) for text in (saved, *edge_size_expressions(work, load))),
            )
            working = max(
                working, *(evaluate_expr(text, sizes) for text in working_expressions(load, recompute))
            )
        if load.mode == "forward":
            working = max(
                working,
                *(
                    max(held)
                    for text in working_expressions(load, recompute)
                    for _, held in _sample_bytes(work, load, (text,))
                ),
                0,
            )
        load.cached_numbers[size, recompute] = activation, working
    return load.cached_numbers[size, recompute]


def _largest_sample_bytes(work: Workload, load: SectionLoad, size: int, recompute: str) -> int:
    """Bytes that the largest listed sample needs in a micro-batch of its own: what it keeps, and what it
    needs temporarily beyond what a micro-batch of `size` mean samples does."""
    key = "largest", recompute
    if key not in load.cached_numbers:
        needed = _needed_sample_bytes(work, load, recompute)
        load.cached_numbers[key] = (
            max((kept for kept, _ in needed), default=0),
            max(map(sum, needed), default=0),
        )
    kept, kept_and_temporary = load.cached_numbers[key]
    _, working = _activation_bytes(work, load, size, recompute)
    return max(kept, kept_and_temporary - working)


def longest_sample_bytes(work: Workload, load: SectionLoad, recompute: str) -> int:
    """Bytes of activations that the largest listed sample needs in a micro-batch of its own; `load` is that
    of a rank."""
    return max(
        (kept + temporary for kept, temporary in _needed_sample_bytes(work, load, recompute)), default=0
    )


def _needed_sample_bytes(work: Workload, load: SectionLoad, recompute: str) -> list[tuple[int, int]]:
    """(bytes kept, bytes needed temporarily) of each of the largest listed samples in a micro-batch of its
    own."""
    if recompute not in load.cached_sample_bytes:
        kept = chain.from_iterable(held for _, held in sample_activation_bytes(work, load, recompute))
        working = [
            chain.from_iterable(held for _, held in _sample_bytes(work, load, (text,)))
            for text in working_expressions(load, recompute)
        ]
        load.cached_sample_bytes[recompute] = list(
            zip(kept, map(max, zip(*working, strict=True)), strict=True)
        )
    return load.cached_sample_bytes[recompute]


def working_expressions(load: SectionLoad, recompute: str) -> tuple[str, ...]:
    """Byte expressions of what a forward, backward or recomputation needs temporarily, one at a time."""
    texts = (load.cost.call_transient, load.cost.glue_transient, load.cost.logits_transient)
    if load.mode == "forward":
        return texts
    again = load.cost.recompute.get(recompute)
    texts = (*texts, again.working if again else "0")
    streamed = load.cost_under_recompute(recompute).streamed
    return texts if streamed == "0" else tuple(f"{text} + {streamed}" for text in texts)


def sample_activation_bytes(
    work: Workload, load: SectionLoad, recompute: str
) -> Iterator[tuple[Mapping[str, Sequence[int]], list[int]]]:
    """Yields, for each pattern, the columns of the largest listed sizes and the bytes that each of these
    samples keeps in a micro-batch of its own, with a backward in one part.

    `load` is that of a rank.
    """
    return _sample_bytes(
        work, load, (load.cost_under_recompute(recompute).saved, *edge_size_expressions(work, load))
    )


def _sample_bytes(
    work: Workload, load: SectionLoad, texts: Sequence[str]
) -> Iterator[tuple[Mapping[str, Sequence[int]], list[int]]]:
    """Sum of byte expressions for each of the largest listed samples in a micro-batch of its own."""
    for pattern in load.active_patterns:
        if columns := work.largest_sizes.get(pattern.when):
            count = len(next(iter(columns.values())))
            every = {
                name: [size] * count for name, size in work.mean_micro_batch_sizes(pattern, 1).items()
            } | columns
            yield (
                columns,
                list(
                    map(sum, zip(*(evaluate_expr_columns(text, every, count) for text in texts), strict=True))
                ),
            )


def edge_size_expressions(work: Workload, load: SectionLoad) -> list[str]:
    """Byte expressions of the tensors that enter and leave the section."""
    return [c.size for c in work.crossings if load.name in (c.src, c.dst)]
