"""Evaluates one assignment with the same formulas as the solver's model, without a solver.

A plan's predicted step time comes from here, and so does the brute force that the solver is tested against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from secc.alloc.problem.types import Assignment, Candidate, Problem


@dataclass(frozen=True)
class PlanValue:
    """Step time in ns, number of ranks used, and bytes on a rank of each group."""

    time_ns: int
    ranks: int
    memory: dict[str, int]


def evaluate_assignment(problem: Problem, assignment: Assignment) -> PlanValue:
    """Computes step time, ranks and memory of an assignment.

    Raises ValueError if it violates a constraint: excluded candidates, ranks, whole nodes, memory, deadline,
    or the strategy.
    """
    choice, group = assignment.choice, assignment.group
    chosen = {s: candidates[choice[s]] for s, candidates in problem.sections.items()}
    if any(c.excluded for c in chosen.values()):
        raise ValueError("the assignment has an excluded candidate")
    ranks_of = {s: c.ranks for s, c in chosen.items()}
    _check_rules(problem, assignment, chosen, ranks_of)
    work = dict.fromkeys(group.values(), 0)
    memory, host = work.copy(), work.copy()
    ahead = groups_that_run_ahead(chosen, group)
    crossing = [e for e in problem.edges if group[e.src] != group[e.dst]]
    sending = {e.src for e in crossing}
    for s, c in chosen.items():
        own = group[s]
        work[own] += c.busy_ns if own in ahead else c.time_ns
        memory[own] += c.memory_ahead if s in sending else c.memory
        host[own] += c.host_memory
    for e in crossing:
        memory[group[e.src]] += e.sent_bytes[choice[e.src]]
        memory[group[e.dst]] += e.returned_bytes[choice[e.dst]]
    if max(host.values()) > problem.host_capacity:
        raise ValueError("the assignment needs more host memory than there is")
    ranks_used = sum(ranks_of[g] for g in work)
    if ranks_used > problem.per_node and ranks_used % problem.per_node:
        raise ValueError(f"{ranks_used} ranks are not whole nodes of {problem.per_node}")
    if ranks_used > problem.ranks or max(memory.values()) > problem.capacity:
        raise ValueError("the assignment needs more ranks or memory than there is")
    _check_pools(problem, {g: chosen[g] for g in group.values()}, memory)
    time_ns = _step_time(problem, assignment, work)
    if problem.deadline is not None and time_ns > problem.deadline:
        raise ValueError("a step takes longer than the deadline")
    return PlanValue(time_ns, ranks_used, memory)


def groups_that_run_ahead(chosen: Mapping[str, Candidate], group: Mapping[str, str]) -> set[str]:
    """Groups with work for the next step at the end of each step: all their sections run ahead."""
    return {*group.values()} - {group[s] for s, c in chosen.items() if not c.runs_ahead}


def _check_pools(problem: Problem, groups: dict[str, Candidate], memory: dict[str, int]) -> None:
    """Checks ranks and memory of each device kind, and that several nodes of a kind are used as whole
    nodes."""
    ranks_by_pool = [
        sum(problem.ranks_in_pool(c, k) for c in groups.values()) for k in range(len(problem.pools))
    ]
    for k, pool in enumerate(problem.pools):
        if ranks_by_pool[k] > pool.ranks or any(
            problem.ranks_in_pool(c, k) and memory[g] > pool.capacity for g, c in groups.items()
        ):
            raise ValueError("the assignment needs more ranks or memory of a kind than there is")
    if any(n % problem.per_node for n in ranks_by_pool) and (
        sum(ranks_by_pool) > problem.per_node or sum(n > 0 for n in ranks_by_pool) > 1
    ):
        raise ValueError(f"ranks of a kind are not whole nodes of {problem.per_node}")


def _step_time(problem: Problem, assignment: Assignment, work: dict[str, int]) -> int:
    """Step time in ns: the work of each group plus what its sections wait for sections elsewhere."""
    group, choice = assignment.group, assignment.choice
    delay = dict.fromkeys(problem.sections, 0)
    total = max(work.values())
    for s in problem.sections:
        for e in (e for e in problem.edges if e.dst == s):
            delay_of_source = delay[e.src]
            if group[e.src] != group[s]:
                delay_of_source += (
                    e.latency_ns[choice[e.src]] - e.independent_ns[choice[s]] + e.message_ns[choice[s]]
                )
                exposed = e.round_trip_ns[choice[s]] - e.slack_ns[choice[e.src]]
                total = max(total, work[group[e.src]] + delay[e.src] + exposed)
                if (rounds := problem.sections[e.src][choice[e.src]].rounds) > 1:
                    total = max(
                        total,
                        delay[e.src]
                        + rounds * (e.latency_ns[choice[e.src]] + e.gradient_return_ns[choice[s]]),
                    )
            delay[s] = max(delay[s], delay_of_source)
        total = max(total, work[group[s]] + delay[s])
    return total


def _check_rules(
    problem: Problem, assignment: Assignment, chosen: dict[str, Candidate], ranks_of: dict[str, int]
) -> None:
    """Checks the rules that do not depend on ranks or memory in total."""
    group = assignment.group
    for s, c in chosen.items():
        if (ranks_of[s], c.kind) != (ranks_of[group[s]], chosen[group[s]].kind):
            raise ValueError(f"{s} shares the devices of {group[s]} but has another number or kind of ranks")
    if any(group[a] != group[b] for a, b in problem.together):
        raise ValueError("sections that must share devices do not")
    groups = len(set(group.values()))
    if problem.strategy == "apart" and groups != len(group):
        raise ValueError("sections share devices, but the strategy is apart")
    everywhere = problem.deadline is not None or next(iter(ranks_of.values())) == problem.ranks
    if problem.strategy in {"colocate", "uniform"} and not (groups == 1 and everywhere):
        raise ValueError("not all sections are on all ranks")
    if problem.strategy == "uniform" and len({c.micro_batch for c in chosen.values()}) != 1:
        raise ValueError("micro-batches differ, but the strategy is uniform")
