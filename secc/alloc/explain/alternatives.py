"""Why a plan is as it is: for each section what else it could be and what that would come to, and what its
time and memory consist of.

An alternative changes one choice of one section and leaves everything else: another tp or pp on as many
ranks, a micro-batch of twice or half the size, another way to shard or to recompute, the next number of
replicas. It is priced as the chosen plan is (`secc.alloc.problem.closed_form`), so its step time and memory
stand beside the plan's own. The best alternative that fits is the runner-up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from secc.alloc.explain.cost_breakdown import largest_tensor, memory_parts, time_parts
from secc.alloc.problem import candidate_pruning
from secc.alloc.problem.build_problem import edges, shapes
from secc.alloc.problem.candidates import Load, Workload, candidate, held, replica_of, ways_to_run
from secc.alloc.problem.closed_form import evaluate
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.types import Assignment, Candidate, Problem, Solution
from secc.alloc.refine import prefetch_memory
from secc.cost.model.section_cost import origins

UNLIMITED = 1 << 62


def reasons(
    work: Workload,
    asked: Problem,
    solution: Solution,
    refused: frozenset[str],
    results: Mapping[str, int],
    size: int | None,
) -> dict[str, Any]:
    """For each section its alternatives, time and memory as plain data for plan.json; times in seconds,
    memory in bytes.

    `results`: bytes on the ranks of groups that keep results for the next step, `size` those that were asked
    for (`secc.alloc.refine.prefetch_memory`).
    """
    assignment = solution.assignment
    chosen = {s: cs[assignment.choice[s]] for s, cs in asked.sections.items()}
    value = evaluate(asked, assignment)
    return {
        name: {
            "alternatives": list(
                _alternatives(work, asked, assignment, chosen, name, Pins(refused=refused), size)
            ),
            "time_s": {
                what: ns / 10**9 for what, ns in time_parts(own, own.loads[name], chosen[name]).items()
            },
            "memory": _memory(
                own,
                asked,
                assignment,
                own.loads[name],
                chosen[name],
                value.memory[group],
                results.get(group, 0),
            ),
            "costs": origins(work.graph, load.section),
        }
        for name, load in work.loads.items()
        for own, group in [(work.on(chosen[name].kind), assignment.group[name])]
    }


def _memory(
    work: Workload, asked: Problem, assignment: Assignment, load: Load, c: Candidate, group: int, results: int
) -> dict[str, Any]:
    parts = parts_of(work, asked, assignment, load, c)
    shared = group - sum(parts.values())
    parts |= {"results for the next step": results} if results else {}
    device = work.cluster.device
    tensor, size = largest_tensor(work, load, c)
    return {
        "parts": parts | ({"other sections on these ranks": shared} if shared > 0 else {}),
        "used": group + results,
        "usable": asked.usable(c),
        "margin": device.memory - device.usable,
        "largest_tensor": {"tensor": tensor, "bytes": size},
    }


def parts_of(
    work: Workload, asked: Problem, assignment: Assignment, load: Load, c: Candidate
) -> dict[str, int]:
    """What a section holds on a rank under an assignment, part by part."""
    name, own, group = load.name, assignment.choice[load.name], assignment.group
    apart = [e for e in asked.edges if group[e.src] != group[e.dst]]
    messages = sum(e.sent[own] for e in apart if e.src == name) + sum(
        e.returned[own] for e in apart if e.dst == name
    )
    return memory_parts(work, load, c, any(e.src == name for e in apart), messages)


def _alternatives(
    work: Workload, asked: Problem, assignment: Assignment, chosen: Mapping[str, Candidate], name: str, pins: Pins,
    size: int | None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    own, load = work.on(chosen[name].kind), work.on(chosen[name].kind).loads[name]
    others = [
        *_others(own, min(asked.ranks, own.cluster.ranks), chosen[name], load, pins),
        *_other_kinds(work, chosen[name], name),
    ]
    found = [(what, c) for what, other in others for c in held(work.on(other.kind), load, other)]
    tried = {s: (c, *(other for _, other in found)) if s == name else (c,) for s, c in chosen.items()}
    pools = tuple(replace(pool, capacity=UNLIMITED) for pool in asked.pools)
    problem = replace(
        asked, sections=tried, edges=edges(work, tried), capacity=UNLIMITED, pools=pools, deadline=None
    )
    problem = prefetch_memory.priced(problem, work, size)
    best: dict[str, dict[str, Any]] = {}
    for i, (what, other) in enumerate(found, 1):
        choice = {s: i if s == name else 0 for s in tried}
        try:
            value = evaluate(problem, Assignment(choice, assignment.group))
        except ValueError:  # on another number of ranks than its group has, say
            continue
        priced = {
            "choice": what,
            "layout": {
                key: getattr(other, key) for key in ("dp", "tp", "pp", "micro_batch", "sharding", "recompute")
            },
            "step_time_s": value.time_ns / 10**9,
            "memory": value.memory[assignment.group[name]],
            "fits": value.memory[assignment.group[name]] <= asked.usable(other),
        }
        best[what] = min(best.get(what, priced), priced, key=_rank)
    yield from best.values()


def _rank(priced: Mapping[str, Any]) -> tuple[bool, float]:
    """Of the ways to hold micro-batches in flight the fastest that fits, else the smallest."""
    return not priced["fits"], priced["step_time_s"] if priced["fits"] else priced["memory"]


def _other_kinds(work: Workload, c: Candidate, name: str) -> Iterator[tuple[str, Candidate]]:
    """The candidate on as many devices of another kind."""
    for kind, other in enumerate(work.kinds):
        if kind != c.kind and c.ranks <= other.cluster.ranks:
            replica = replica_of(other, other.loads[name], c.tp, c.pp, c.ranks)
            found = candidate(other, replica, c.dp, c.micro_batch, c.sharding, c.recompute)
            yield f"on {other.cluster.device.kind}", replace(found, kind=kind)


def _others(
    work: Workload, ranks: int, c: Candidate, load: Load, pins: Pins
) -> Iterator[tuple[str, Candidate]]:
    """Candidates on up to `ranks` devices of the same kind that differ from `c` in one choice, each with what
    it is called."""
    return ((what, replace(other, kind=c.kind)) for what, other in _changed(work, ranks, c, load, pins))


def _changed(
    work: Workload, ranks: int, c: Candidate, load: Load, pins: Pins
) -> Iterator[tuple[str, Candidate]]:
    samples = -(-work.samples(load) // c.dp)
    allowed = shapes(work, load, pins, ranks)
    for tp in _near([tp for tp, pp in allowed if pp == c.pp], c.tp):
        yield from _on(work, load, c, f"tp={tp}", tp, c.pp)
    for pp in _near([pp for tp, pp in allowed if tp == c.tp], c.pp):
        yield from _on(work, load, c, f"pp={pp}", c.tp, pp)
    replica = replica_of(work, load, c.tp, c.pp, c.ranks)
    for size in (c.micro_batch // 2, min(2 * c.micro_batch, samples)):
        if 0 < size != c.micro_batch:
            yield f"micro_batch={size}", candidate(work, replica, c.dp, size, c.sharding, c.recompute)
    for sharding, recompute in ways_to_run(work, load, pins):
        if (sharding == c.sharding) != (recompute == c.recompute):
            what = f"recompute={recompute}" if sharding == c.sharding else f"sharding={sharding}"
            yield what, candidate(work, replica, c.dp, c.micro_batch, sharding, recompute)
    counts = list(candidate_pruning.replicas(c.tp * c.pp, ranks, work.cluster.per_node, work.samples(load)))
    for dp in _near(counts, c.dp):
        larger = replica_of(work, load, c.tp, c.pp, max(ranks, c.ranks))
        yield (
            f"dp={dp}",
            candidate(
                work, larger, dp, min(c.micro_batch, -(-work.samples(load) // dp)), c.sharding, c.recompute
            ),
        )


def _on(
    work: Workload, load: Load, c: Candidate, what: str, tp: int, pp: int
) -> Iterator[tuple[str, Candidate]]:
    """The candidate with another shape on as many ranks, where there is one."""
    dp, rest = divmod(c.ranks, tp * pp)
    if not rest and 0 < dp <= work.global_batch:
        size = min(c.micro_batch, -(-work.samples(load) // dp))
        yield (
            what,
            candidate(work, replica_of(work, load, tp, pp, c.ranks), dp, size, c.sharding, c.recompute),
        )


def _near(values: Sequence[int], chosen: int) -> list[int]:
    """The values next to the chosen one."""
    found = sorted(set(values) | {chosen})
    at = bisect_left(found, chosen)
    return [*found[max(0, at - 1) : at], *found[at + 1 : at + 2]]
