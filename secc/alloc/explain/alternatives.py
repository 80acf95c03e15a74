"""Explains a plan: for each section the alternatives with their step time and memory, and what its time and
memory consist of.

An alternative changes one choice of one section and leaves everything else: another tp or pp on as many
ranks, a micro-batch of twice or half the size, another sharding or recomputation, or the next number of
replicas. It is priced with the same closed forms as the chosen plan (`secc.alloc.problem.closed_form`), so
both can be compared. The best alternative that fits is the runner-up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

from secc.alloc.explain.cost_breakdown import break_down_memory, break_down_time, find_largest_tensor
from secc.alloc.problem import candidate_pruning
from secc.alloc.problem.allowed_choices import (
    list_backward_parts,
    list_offloads,
    list_sharding_and_recompute,
    require_rank_load,
)
from secc.alloc.problem.build_problem import expert_parts, parallel_shapes, price_edges
from secc.alloc.problem.candidates import in_flight_variants, price_candidate
from secc.alloc.problem.closed_form import evaluate_assignment, groups_that_run_ahead
from secc.alloc.problem.dealt_prices import DealtPrices
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.section_load import SectionLoad
from secc.alloc.problem.types import Assignment, Candidate, Problem, ReplicaShape, Solution
from secc.alloc.problem.workload import Workload
from secc.alloc.refine import prefetch_memory
from secc.cost.model.section_cost import count_cost_origins

LAYOUT_KEYS = ("dp", "tp", "pp", "cp", "ep", "micro_batch", "sharding", "recompute", "offload")

UNLIMITED_BYTES = 1 << 62


def explain_choices(
    work: Workload,
    asked: Problem,
    solution: Solution,
    refused: frozenset[str],
    results: Mapping[str, int],
    size: int | None,
) -> dict[str, Any]:
    """Returns, for each section, alternatives, time and memory as plain data for plan.json; times in seconds,
    memory in bytes.

      refused: choices that a later pass could not carry out.
      results: bytes for results of the next step on the ranks of groups that prefetch.
      size: bytes that were asked for with --run-ahead (`secc.alloc.refine.prefetch_memory`).
    """
    assignment = solution.assignment
    chosen = {s: cs[assignment.choice[s]] for s, cs in asked.sections.items()}
    # Parts of time are known for samples that all ranks of cp share.
    divided = {
        s: DealtPrices(own, own.loads[s]).price_as_divided(c) if c.cp_per == "micro_batch" else c
        for s, c in chosen.items()
        for own in [work.for_kind(c.kind)]
    }
    value, ahead = evaluate_assignment(asked, assignment), groups_that_run_ahead(chosen, assignment.group)
    return {
        name: {
            "alternatives": list(
                _price_alternatives(work, asked, assignment, chosen, name, Pins(refused=refused), size)
            ),
            "time_s": {
                what: ns / 10**9
                for what, ns in break_down_time(own, own.loads[name], divided[name], group in ahead).items()
            },
            "memory": _memory_report(
                own,
                asked,
                assignment,
                own.loads[name],
                chosen[name],
                value.memory[group],
                results.get(group, 0),
            ),
            "costs": count_cost_origins(work.graph, load.section),
        }
        for name, load in work.loads.items()
        for own, group in [(work.for_kind(chosen[name].kind), assignment.group[name])]
    }


def _memory_report(
    work: Workload,
    asked: Problem,
    assignment: Assignment,
    load: SectionLoad,
    c: Candidate,
    group: int,
    results: int,
) -> dict[str, Any]:
    parts = section_memory_parts(work, asked, assignment, load, c)
    other_sections = group - sum(parts.values())
    parts |= {"results for the next step": results} if results else {}
    device = work.cluster.device
    tensor, size = find_largest_tensor(work, load, c)
    return {
        "parts": parts | ({"other sections on these ranks": other_sections} if other_sections > 0 else {}),
        "used": group + results,
        "usable": asked.usable_bytes(c),
        "margin": device.memory - device.usable_memory,
        "largest_tensor": {"tensor": tensor, "bytes": size},
    }


def section_memory_parts(
    work: Workload, asked: Problem, assignment: Assignment, load: SectionLoad, c: Candidate
) -> dict[str, int]:
    """Bytes that a section holds on a rank under an assignment, by purpose."""
    name, own, group = load.name, assignment.choice[load.name], assignment.group
    apart = [e for e in asked.edges if group[e.src] != group[e.dst]]
    messages = sum(e.sent_bytes[own] for e in apart if e.src == name) + sum(
        e.returned_bytes[own] for e in apart if e.dst == name
    )
    return break_down_memory(work, load, c, any(e.src == name for e in apart), messages)


def _price_alternatives(
    work: Workload,
    asked: Problem,
    assignment: Assignment,
    chosen: Mapping[str, Candidate],
    name: str,
    pins: Pins,
    size: int | None,
) -> Iterator[dict[str, Any]]:
    """Yields the priced alternatives of a section, one for each change."""
    own, load = work.for_kind(chosen[name].kind), work.for_kind(chosen[name].kind).loads[name]
    others = [
        *_candidates_of_same_kind(own, min(asked.ranks, own.cluster.ranks), chosen[name], load, pins),
        *_on_other_kinds(work, chosen[name], name),
    ]
    if chosen[name].cp_per == "micro_batch":
        prices, degrees = DealtPrices(own, load), chosen[name].cp_degrees
        others = [(what, prices.price_as_dealt(c, degrees) if c.cp > 1 else c) for what, c in others]
    alternatives = [
        (what, c)
        for what, other in others
        for c in in_flight_variants(work.for_kind(other.kind), load, other)
    ]
    candidates = {
        s: (c, *(other for _, other in alternatives)) if s == name else (c,) for s, c in chosen.items()
    }
    pools = tuple(replace(pool, capacity=UNLIMITED_BYTES) for pool in asked.pools)
    problem = replace(
        asked,
        sections=candidates,
        edges=price_edges(work, candidates),
        capacity=UNLIMITED_BYTES,
        pools=pools,
        deadline=None,
    )
    problem = prefetch_memory.with_prefetch_buffers(problem, work, size)
    best_by_change: dict[str, dict[str, Any]] = {}
    for i, (what, other) in enumerate(alternatives, 1):
        choice = {s: i if s == name else 0 for s in candidates}
        try:
            value = evaluate_assignment(problem, Assignment(choice, assignment.group))
        except ValueError:  # on another number of ranks than its group has, say
            continue
        alternative = {
            "choice": what,
            "layout": {key: getattr(other, key) for key in LAYOUT_KEYS},
            "step_time_s": value.time_ns / 10**9,
            "memory": value.memory[assignment.group[name]],
            "fits": value.memory[assignment.group[name]] <= asked.usable_bytes(other),
        }
        best_by_change[what] = min(best_by_change.get(what, alternative), alternative, key=_alternative_rank)
    yield from best_by_change.values()


def _alternative_rank(priced: Mapping[str, Any]) -> tuple[bool, float]:
    """Sort key for variants of one alternative with different in-flight budgets: the fastest that fits,
    else the smallest."""
    return not priced["fits"], priced["step_time_s"] if priced["fits"] else priced["memory"]


def _on_other_kinds(work: Workload, c: Candidate, name: str) -> Iterator[tuple[str, Candidate]]:
    """Yields the candidate on as many devices of another kind."""
    for kind, other in enumerate(work.by_kind):
        if kind != c.kind and c.ranks <= other.cluster.ranks:
            replica = require_rank_load(other, other.loads[name], c.shape, c.ranks)
            found = price_candidate(other, replica, c.dp, c.micro_batch, c.sharding, c.recompute)
            yield f"on {other.cluster.device.kind}", replace(found, kind=kind)


def _candidates_of_same_kind(
    work: Workload, ranks: int, c: Candidate, load: SectionLoad, pins: Pins
) -> Iterator[tuple[str, Candidate]]:
    """Yields (change, candidate) for up to `ranks` devices of the same kind that differ from `c` in one
    choice."""
    return (
        (what, replace(other, kind=c.kind)) for what, other in _change_one_choice(work, ranks, c, load, pins)
    )


def _change_one_choice(
    work: Workload, ranks: int, c: Candidate, load: SectionLoad, pins: Pins
) -> Iterator[tuple[str, Candidate]]:
    samples = -(-work.active_sample_count(load) // c.dp)
    allowed = parallel_shapes(work, load, pins, ranks)
    for key in ("tp", "pp", "cp"):
        same = c.shape._replace(**{key: 1, "ep": 1, "backward_parts": 1, "offload": "none"})
        similar = [s for s in allowed if s._replace(**{key: 1}) == same]
        for degree in _adjacent_values([getattr(s, key) for s in similar], getattr(c, key)):
            shape = c.shape._replace(**{key: degree})
            shape = shape._replace(
                ep=gcd(shape.ep, shape.tp) if shape.cp == 1 else 1,
                backward_parts=c.backward_parts if shape.pp > 1 else 1,
            )
            yield from _with_shape(work, load, c, f"{key}={degree}", shape)
    for ep in _adjacent_values(expert_parts(work, load, pins, c.shape, ranks), c.ep):
        if c.dp % max(1, ep // c.tp) == 0:
            other = require_rank_load(work, load, c.shape._replace(ep=ep), c.ranks)
            yield f"ep={ep}", price_candidate(work, other, c.dp, c.micro_batch, c.sharding, c.recompute)
    replica = require_rank_load(work, load, c.shape, c.ranks)
    for size in (c.micro_batch // 2, min(2 * c.micro_batch, samples)):
        if 0 < size != c.micro_batch:
            yield f"micro_batch={size}", price_candidate(work, replica, c.dp, size, c.sharding, c.recompute)
    for sharding, recompute in list_sharding_and_recompute(work, load, pins):
        if (sharding == c.sharding) != (recompute == c.recompute):
            what = f"recompute={recompute}" if sharding == c.sharding else f"sharding={sharding}"
            parts = list_backward_parts(load, c.shape, sharding, pins)
            shape = c.shape._replace(backward_parts=min(c.backward_parts, parts[-1]))
            replica = require_rank_load(work, load, shape, c.ranks)
            yield what, price_candidate(work, replica, c.dp, c.micro_batch, sharding, recompute)
    for parts in list_backward_parts(load, c.shape, c.sharding, pins):
        if parts != c.backward_parts:
            replica = require_rank_load(work, load, c.shape._replace(backward_parts=parts), c.ranks)
            other = price_candidate(work, replica, c.dp, c.micro_batch, c.sharding, c.recompute)
            yield f"backward={other.backward}", other
    # Device and host share a memory on CPUs.
    hosts = work if work.cluster.device.backend == "cpu" else work.with_offloads()
    for offload in list_offloads(hosts, load, c.shape, c.sharding, pins):
        if offload != c.offload:
            replica = require_rank_load(work, load, c.shape._replace(offload=offload), c.ranks)
            other = price_candidate(work, replica, c.dp, c.micro_batch, c.sharding, c.recompute)
            yield f"offload={offload}", other
    counts = list(
        candidate_pruning.replica_counts(
            c.shape.ranks, ranks, work.cluster.per_node, work.active_sample_count(load)
        )
    )
    sharing = max(1, c.ep // c.tp)  # replicas among which experts are divided
    for dp in _adjacent_values([n for n in counts if n % sharing == 0], c.dp):
        larger = require_rank_load(work, load, c.shape, max(ranks, c.ranks))
        yield (
            f"dp={dp}",
            price_candidate(
                work,
                larger,
                dp,
                min(c.micro_batch, -(-work.active_sample_count(load) // dp)),
                c.sharding,
                c.recompute,
            ),
        )


def _with_shape(
    work: Workload, load: SectionLoad, c: Candidate, what: str, shape: ReplicaShape
) -> Iterator[tuple[str, Candidate]]:
    """Yields the candidate with another shape on as many ranks, if that is possible."""
    dp, rest = divmod(c.ranks, shape.ranks)
    if not rest and 0 < dp <= work.global_batch:
        size = min(c.micro_batch, -(-work.active_sample_count(load) // dp))
        yield (
            what,
            price_candidate(
                work, require_rank_load(work, load, shape, c.ranks), dp, size, c.sharding, c.recompute
            ),
        )


def _adjacent_values(values: Sequence[int], chosen: int) -> list[int]:
    """The values next to the chosen one."""
    ordered = sorted(set(values) | {chosen})
    at = bisect_left(ordered, chosen)
    return [*ordered[max(0, at - 1) : at], *ordered[at + 1 : at + 2]]
