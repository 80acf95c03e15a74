"""Times of micro-batches: on one rank as expressions over sizes, and of all that the busiest replica gets.

The busiest of `dp` replicas gets the dp-th part of a section's active samples, rounded up. As in the
scheduler, a micro-batch holds samples of one pattern; it is priced at the pattern's mean sizes. Pipeline
stages, and replicas that gather parameters together (ZeRO-3), wait for the longest of several micro-batches,
so their times also depend on the spread of the samples (`secc.alloc.problem.size_spread`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, lcm

from secc.alloc.problem.candidate_memory import edge_size_expressions, working_expressions
from secc.alloc.problem.section_load import BusiestReplica, ExpectedMicroBatches, SectionLoad
from secc.alloc.problem.size_spread import PERMILLE
from secc.alloc.problem.types import Candidate
from secc.alloc.problem.workload import Workload
from secc.cost.model.collectives import RankSpan, span_of_consecutive_ranks
from secc.cost.model.cost_expressions import max_expr
from secc.cost.model.patterns_and_transfers import InputPattern
from secc.cost.model.zero3_cost import ParameterTransfers, zero3_collectives
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.schema import Cost, SubgroupCost


def micro_batch_time_expressions(
    work: Workload, load: SectionLoad, dp: int, sharding: str, recompute: str, span: RankSpan | None = None
) -> tuple[str, str]:
    """Returns (forward, backward) expressions in ns of a micro-batch on a rank, over the micro-batch's
    symbols.

    `span` is the location of the data-parallel group's ranks if they are placed already; by default they are
    consecutive replicas.
    """
    expressions, span = load.pass_ns(recompute), span or _replica_span(work, load, dp)
    gathers = zero3_collectives(load.cost, sharding, work.cluster, span)
    return expressions if gathers is None else gathers.add_to_expressions(*expressions)


def _replica_span(work: Workload, load: SectionLoad, dp: int) -> RankSpan:
    """Location of the ranks that hold the same parameters if those of a stage are placed in a row."""
    return span_of_consecutive_ranks(dp * load.shape.cp, work.cluster, load.shape.tp)


def busiest_replica_ns(
    work: Workload, load: SectionLoad, dp: int, size: int, sharding: str, recompute: str
) -> BusiestReplica:
    """Load of the busiest of `dp` replicas with micro-batches of `size` samples (memoised)."""
    gathers = _zero3_gathers(work, load, dp) if sharding == "zero3" else None
    lockstep = gathers is not None or load.cost.expert_replicas > 1
    samples_of_busiest = -(-work.active_sample_count(load) // dp)
    key = samples_of_busiest, size, recompute
    if not lockstep and key in load.cached_busiest:
        return load.cached_busiest[key]
    denominator, count, micro_batches = expect_micro_batches(load, samples_of_busiest, size)
    together = dp if gathers is not None else load.cost.expert_replicas
    slowdown = (
        _round_slowdown(load, count, dp, together, size)
        if lockstep
        else load.spread.replica_imbalance(samples_of_busiest, count)
    )
    total, fill, drain = 0, 0, 0
    for pattern, samples, number in micro_batches:
        forward, backward = _micro_batch_times(work, load, pattern, samples, recompute)
        if lockstep:
            forward, backward = (ns * slowdown // PERMILLE for ns in (forward, backward))
        if gathers is not None:
            forward, backward = gathers.forward_ns(forward), gathers.backward_ns(backward)
        total += number * (forward + backward)
        fill, drain = max(fill, forward), max(drain, backward)
    total_ns = -(-total * (PERMILLE if lockstep else slowdown) // (denominator * PERMILLE))
    result = BusiestReplica(total_ns, count, fill, drain)
    if not lockstep:
        load.cached_busiest[key] = result
    return result


def _round_slowdown(load: SectionLoad, rounds: int, dp: int, together: int, size: int) -> int:
    """Longest micro-batch of a round over the mean one, in permille, as mean over the rounds of `together`
    replicas in lockstep, or as one of the groups of replicas has it in few rounds."""
    key = "rounds", rounds, dp, together, size
    if key not in load.cached_numbers:
        in_rounds = load.spread.mean_round_maximum(rounds * dp // together, together, size)
        busiest = load.spread.longest_micro_batch(size) // rounds if together < dp else 0
        load.cached_numbers[key] = max(in_rounds, busiest), 0
    return load.cached_numbers[key][0]


def _zero3_gathers(work: Workload, load: SectionLoad, dp: int) -> ParameterTransfers | None:
    """Collectives of a forward and backward under ZeRO-3, None where there is nothing to gather."""
    if dp not in load.cached_gathers:
        load.cached_gathers[dp] = zero3_collectives(
            load.cost, "zero3", work.cluster, _replica_span(work, load, dp)
        )
    return load.cached_gathers[dp]


def expect_micro_batches(load: SectionLoad, busiest: int, size: int) -> ExpectedMicroBatches:
    """Splits `busiest` samples of a replica into micro-batches of at most `size` samples of one pattern.

    Returns (denominator, micro-batches in all, [(pattern, samples in a micro-batch, numerator)]): a pattern
    has numerator/denominator micro-batches, which need not be a whole number.
    """
    if (busiest, size) not in load.cached_micro_batches:
        samples_of = [
            (pattern, busiest * pattern.share / load.sample_share) for pattern in load.active_patterns
        ]
        numbers = [(pattern, min(size, ceil(n)), n / min(size, ceil(n))) for pattern, n in samples_of]
        denominator = lcm(*(n.denominator for *_, n in numbers))
        micro_batches = [(p, samples_each, int(n * denominator)) for p, samples_each, n in numbers]
        load.cached_micro_batches[busiest, size] = (
            denominator,
            max(1, -(-sum(number for *_, number in micro_batches) // denominator)),
            micro_batches,
        )
    return load.cached_micro_batches[busiest, size]


def _micro_batch_times(
    work: Workload, load: SectionLoad, pattern: InputPattern, samples: int, recompute: str
) -> tuple[int, int]:
    """(forward, backward) ns of a micro-batch of `samples` samples of a pattern."""
    key = (pattern.when, samples, recompute)
    if key not in load.cached_numbers:
        sizes = work.mean_micro_batch_sizes(pattern, samples)
        forward, backward = load.pass_ns(recompute)
        mean_sample_times = evaluate_expr(forward, sizes), evaluate_expr(backward, sizes)
        load.cached_numbers[key] = (
            load.spread.mean_ns(pattern.when, mean_sample_times[0]),
            load.spread.mean_ns(pattern.when, mean_sample_times[1]),
        )
    return load.cached_numbers[key]


def pipeline_bubble_ns(load: SectionLoad, size: int, busy: BusiestReplica, recompute: str) -> int:
    """Idle time of a stage in a step: filling, draining, and waiting where long micro-batches follow short
    ones.

    For each stage but the longest, half a mean micro-batch and half of the longest one; this is close to what
    scheduled steps show. A pipeline without backward has nothing else to do while the longest one passes: a
    step takes all work of a stage, and the longest job once more for each other stage, in any order (Pinedo,
    "Scheduling", proportionate flow shops), unless it runs ahead (`Candidate.idle_ns`). Of a split backward
    no stage waits for the second part, and computes another micro-batch's in idle time (Qi et al. 2023:
    F + B - W remains of F + B + W). With several chunks on a rank, each idle time is that of one chunk
    (Narayanan et al. 2021).
    """
    total, micro_batches, fill, drain = busy
    longest = max(fill + drain, load.spread.longest_micro_batch(size) * total // (PERMILLE * micro_batches))
    if load.mode == "forward":
        return (load.stages.sum_over(longest) - longest) // load.shape.chunks
    later = deferred_backward_ns(load, drain, recompute)
    awaited = longest - deferred_backward_ns(load, longest * drain // max(1, fill + drain), recompute)
    waits = fill + drain - 2 * later + awaited
    return (load.stages.sum_over(waits) - waits) // (2 * load.shape.chunks)


def deferred_backward_ns(load: SectionLoad, backward_ns: int, recompute: str) -> int:
    """The part of a backward that stages compute later, 0 where backward is not split."""
    return backward_ns * load.weight_permille.get(recompute, 0) // PERMILLE


def subgroup_costs(
    work: Workload, load: SectionLoad, c: Candidate, stage: int | None = None
) -> tuple[SubgroupCost, ...]:
    """The costs of samples that some ranks of cp compute without the others, for each size of
    subgroups that candidate `c` may have. `load` is the section's."""
    span = _replica_span(work, work.rank_load(load, c.shape, stage=stage), c.dp)
    found: list[SubgroupCost] = []
    for ranks, own, saved in subgroup_loads(work, load, c, stage):
        times = micro_batch_time_expressions(work, own, c.dp, c.sharding, c.recompute, span)
        held = own.cost_under_recompute(c.recompute)
        between = "" if held.kept_between == "0" else held.kept_between
        found.append(SubgroupCost(ranks, Cost(*times, label=own.label, saved=saved, kept_between=between)))
    return tuple(found)


def subgroup_loads(
    work: Workload, load: SectionLoad, c: Candidate, stage: int | None = None
) -> Iterator[tuple[int, SectionLoad, str]]:
    """Yields, for each size of subgroups that candidate `c` of a section may have, (its ranks, the load of
    one of them, what it keeps of a micro-batch). What a rank (of `stage`, or by default one with most to do)
    keeps includes what it needs temporarily, and the tensors of edges of all samples that its replica
    computes meanwhile."""
    all_ranks = work.rank_load(load, c.shape, stage=stage)
    for ranks in c.subgroup_sizes:
        own = work.rank_load(load, c.shape._replace(cp=ranks), all_ranks.row_attention, stage)
        edges = [f"{1 + c.cp // ranks}*({text})" for text in edge_size_expressions(work, load)]
        working = max_expr([text for text in working_expressions(own, c.recompute) if text != "0"] or ["0"])
        yield ranks, own, " + ".join([own.cost_under_recompute(c.recompute).saved, working, *edges])


def micro_batch_ns_of_samples(
    work: Workload,
    load: SectionLoad,
    c: Candidate,
    spans: SectionLoad,
    evaluate: Callable[[str], Sequence[int]],
) -> list[int]:
    """Forward plus backward ns of micro-batches on a rank under candidate `c`, which the expressions of
    `micro_batch_time_expressions` say; `evaluate` returns the values of one for all of them. `load` is that
    of the rank, `spans` that of one of all ranks of a replica."""
    forward, backward = load.pass_ns(c.recompute)
    forward_ns, backward_ns = evaluate(forward), evaluate(backward)
    gathers = zero3_collectives(load.cost, c.sharding, work.cluster, _replica_span(work, spans, c.dp))
    if gathers is not None:  # many candidates differ only in these
        forward_ns = map(gathers.forward_ns, forward_ns)
        backward_ns = map(gathers.backward_ns, backward_ns)
    return list(map(int.__add__, forward_ns, backward_ns))
