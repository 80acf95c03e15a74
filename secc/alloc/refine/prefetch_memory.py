"""Memory for running ahead (`runtime/schedule/cross_step_prefetch.py`): how much of it a plan should give,
and what that costs.

A frozen section on ranks of its own has, when a step starts, the results that its consumers want first. They
must last until its next ones are there, so a replica keeps `LEAD` micro-batches for each consumer's replica
that it feeds, and one more for each stage of those, which all take a micro-batch before the first backward;
more would only level the ranks worse. That was measured: a teacher as loaded as its student, in
`tools/bench_schedules.py quality`, gets no faster with more.

`auto` takes no more than what the ranks have left, so it decides no layout; memory that the user asks for is
counted with the messages that a section holds, which the allocation has to find room for.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from secc.alloc.problem.candidates import Workload
from secc.alloc.problem.closed_form import PlanValue
from secc.alloc.problem.types import AllocEdge, Assignment, Candidate, Problem
from secc.cost.model.patterns_and_transfers import micro_batch_sizes
from secc.errors import UserError
from secc.runtime.plan.expr_eval import evaluate_expr

RUN_AHEAD_AUTO = "auto"
PREFETCHED_PER_CONSUMER = 4


def parse_run_ahead(text: str, work: Workload, gib: int) -> int | None:
    """Bytes on a rank, None for `auto`. Raises UserError for what is neither, or for a model without a
    section that could use them."""
    if text == RUN_AHEAD_AUTO:
        return None
    try:
        size = int(float(text) * gib)
    except (ValueError, OverflowError):
        size = -1
    if size < 0:
        raise UserError(
            f"{text!r} is no memory to run ahead with", remedy="give --run-ahead GIB, 0 for none, or auto"
        )
    if size and not prefetchable_sections(work):
        message = "no section can run ahead: each has a backward, or needs what trains"
        raise UserError(message, remedy="leave --run-ahead out")
    return size


def prefetchable_sections(work: Workload) -> set[str]:
    """The sections that may run ahead if they get ranks of their own: forward only, without trained
    parameters, as is all upstream."""
    found: set[str] = set()
    for name, load in work.loads.items():  # producers first
        if (
            load.mode == "forward"
            and not load.cost.trainable
            and {c.src for c in work.crossings if c.dst == name} <= found
        ):
            found.add(name)
    return found


def with_prefetch_buffers(asked: Problem, work: Workload, size: int | None) -> Problem:
    """The problem in which sections that run ahead hold `size` bytes more, and nothing waits for their first
    micro-batch."""
    if size == 0:
        return asked
    ahead = prefetchable_sections(work)
    return replace(
        asked,
        edges=tuple(
            _edge_with_buffer(e, asked.sections[e.src], size or 0) if e.src in ahead else e
            for e in asked.edges
        ),
    )


def _edge_with_buffer(edge: AllocEdge, candidates: tuple[Candidate, ...], size: int) -> AllocEdge:
    latency = (ns - c.fill_ns for ns, c in zip(edge.latency_ns, candidates, strict=True))
    return replace(edge, sent_bytes=tuple(b + size for b in edge.sent_bytes), latency_ns=tuple(latency))


def choose_prefetch_memory(
    work: Workload, asked: Problem, assignment: Assignment, value: PlanValue, size: int | None
) -> tuple[int, set[str]]:
    """Bytes on a rank, given (`size`) or chosen, and the sections that run ahead with them under an
    assignment: (0, none) where none does.

    Raises UserError where bytes are given and none can.
    """
    group, ahead = assignment.group, prefetchable_sections(work)
    shared = {group[s] for s in group if s not in ahead}
    chosen = {s: cs[assignment.choice[s]] for s, cs in asked.sections.items()}
    shared |= {group[s] for s in ahead if chosen[s].sharding != "none"}  # replicas gather parameters together
    running = {
        s
        for s in ahead
        if group[s] not in shared and any(e.src == s and group[e.dst] != group[s] for e in asked.edges)
    }
    if not running and size:
        message = "no frozen section can run ahead: each shares ranks with one that trains, or gathers its parameters (zero3)"
        raise UserError(
            message, remedy="leave --run-ahead out, or give them ranks of their own (--strategy apart)"
        )
    if not running:
        return 0, set()
    if size is None:
        left = min(
            work.for_kind(chosen[s].kind).cluster.device.usable_memory - value.memory[group[s]]
            for s in running
        )
        size = max(0, min(left, max(_useful_prefetch_bytes(work, asked, assignment, s) for s in running)))
    return size, running if size else set()


def _useful_prefetch_bytes(work: Workload, asked: Problem, assignment: Assignment, section: str) -> int:
    """Bytes of the micro-batches that a replica of `section` should have ready for all its consumers
    elsewhere."""
    chosen = {s: cs[assignment.choice[s]] for s, cs in asked.sections.items()}
    own, group, total = chosen[section], assignment.group, 0
    for c in work.crossings:
        if c.src == section and group[c.dst] != group[section]:
            dst = chosen[c.dst]
            samples = (PREFETCHED_PER_CONSUMER + dst.pp) * max(
                own.micro_batch, ceil(dst.dp * dst.micro_batch / own.dp)
            )
            total += max(
                evaluate_expr(c.size, micro_batch_sizes(work.graph, p.sizes, samples))
                for p in work.loads[section].active_patterns
            )
    return total
