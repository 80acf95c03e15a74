"""Cost of a section on one rank when its experts form parts (`ep`) that lie on different ranks.

A part holds whole experts, so products keep their widths, but parts are unevenly loaded: the rank with the
busiest part counts. Where the section's routers were run on drawn samples, the load of the busiest part is
that of these samples (`SectionCost.expert_parts`). Otherwise loads of experts are assumed to follow Zipf's
law with a stated exponent, with popular experts anywhere. The expected load of the busiest of n parts is then
about one share plus sqrt(2 ln n) standard deviations of a part's load (the expected maximum of n normal
variables).

Above tp, parts lie on several replicas. Their ranks exchange rows of tokens: to experts and back, in forward
and in backward, and once more where a layer is recomputed. Rows to ranks of the same node and rows to other
nodes take different links at the same time; the slower of both counts, for the rank that gets most rows.
Experts' parameters exist once in a group.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import log, sqrt

from secc.cluster import Cluster
from secc.cost.model.collectives import all_to_all_links, span_of_consecutive_ranks
from secc.cost.model.cost_expressions import scale_expression
from secc.cost.model.section_cost import FLOAT32_BYTES, SectionCost
from secc.cost.model.tp_pp_scaling import (
    WHOLE_SECTION,
    StageShares,
    ceil_share,
    cost_on_rank,
    narrowing_slowdown,
)

EXCHANGES_PER_MIXTURE = 3  # numbers of rows, rows, results


def busiest_part(experts: int, parts: int, exponent: float) -> Fraction:
    """Load of the busiest of `parts` equal parts of the experts, over the mean one, in hundredths."""
    if parts < 2 or exponent == 0:
        return Fraction(1)
    loads = [(i + 1) ** -exponent for i in range(experts)]
    mean, size = sum(loads) / experts, experts // parts
    variance = sum((load - mean) ** 2 for load in loads) / experts / mean**2
    # Experts are drawn without replacement, so parts vary less than independent draws would.
    deviation = sqrt(variance / size * (experts - size) / max(1, experts - 1))
    largest = sum(loads[:size]) / size / mean
    return Fraction(round(100 * min(largest, 1 + deviation * sqrt(2 * log(parts)))), 100)


def busiest_part_of(cost: SectionCost, parts: int) -> Fraction:
    """Load of the busiest of `parts` parts of a section's experts over the mean one: as counted on drawn
    samples, else as assumed."""
    counted = dict(cost.expert_parts).get(parts)
    return busiest_part(cost.experts, parts, cost.expert_load) if counted is None else Fraction(counted, 1000)


def cost_with_expert_parts(
    cost: SectionCost, tp: int, ep: int, stages: StageShares = WHOLE_SECTION
) -> SectionCost:
    """The cost of the part of a section that the busiest rank of a stage has, with experts in `ep` parts;
    `tp_pp_scaling.cost_on_rank` where they form none."""
    rank = cost_on_rank(cost, tp, stages)
    if ep == 1 or not cost.experts:
        return rank
    longest, replicas = stages.longest, max(1, ep // tp)
    widths_divided_by = max(1, tp // ep)
    routed_share = (
        longest / tp * busiest_part_of(cost, ep) * narrowing_slowdown(cost.narrowest_dim, widths_divided_by)
    )
    rows_share = longest / max(tp, ep) * narrowing_slowdown(cost.narrowest_dim, widths_divided_by)
    experts = {
        key: ceil_share(getattr(cost, f"expert_{key}"), stages.layers / max(tp, ep))
        for key in ("params", "trainable", "bytes", "trainable_bytes")
    }
    fewer = {key: getattr(rank, f"expert_{key}") - count for key, count in experts.items()}
    layers = max(1, rank.layers)
    return replace(
        rank,
        params=rank.params - fewer["params"],
        trainable=rank.trainable - fewer["trainable"],
        param_bytes=rank.param_bytes - fewer["bytes"],
        trainable_bytes=rank.trainable_bytes - fewer["trainable_bytes"],
        master_bytes=rank.master_bytes - (FLOAT32_BYTES * fewer["trainable"] if rank.master_bytes else 0),
        # Layers that are gathered have no experts of other replicas.
        largest_layer_bytes=max(0, rank.largest_layer_bytes - rank.expert_bytes // layers)
        if replicas > 1
        else rank.largest_layer_bytes,
        routed_work=scale_expression(cost.routed_work, routed_share),
        routed_backward_work=scale_expression(cost.routed_backward_work, routed_share),
        expert_row_work=ceil_share(cost.expert_row_work, rows_share),
        expert_replicas=replicas,
        **{f"expert_{key}": count for key, count in experts.items()},
    )


def exchange_ns(rank: SectionCost, tp: int, ep: int, cluster: Cluster) -> str:
    """Nanoseconds that the busiest rank exchanges rows of tokens in a forward, or in a backward, as an
    expression over a micro-batch's symbols; "0" where each replica has all experts.

    The replicas of a group are taken to be neighbours: `place` puts them on as few nodes as it can.
    """
    if rank.expert_replicas == 1 or rank.routed_bytes == "0":
        return "0"
    span = span_of_consecutive_ranks(rank.expert_replicas, cluster, tp)
    busiest, latency, terms = busiest_part_of(rank, ep), 0, list[str]()
    for link in all_to_all_links(span, cluster):
        share = 2 * busiest * link.share
        latency = max(latency, EXCHANGES_PER_MIXTURE * rank.expert_layers * link.latency_ns)
        bytes_per_us = share.denominator * (link.bytes_per_s // 10**6)
        terms.append(f"{1000 * share.numerator}*({rank.routed_bytes})//({bytes_per_us})")
    moving = terms[0] if len(terms) == 1 else f"max({', '.join(terms)})"
    return f"{latency} + {moving}"
