"""Decides how much memory ranks reserve for cross-step prefetch (`runtime/schedule/cross_step_prefetch.py`).

A frozen section on ranks of its own can compute, before a step starts, the results that its consumers need
first. They must last until its next results are ready, so a replica keeps `PREFETCHED_PER_CONSUMER`
micro-batches for each replica of a consumer that it feeds, and one more for each of that replica's pipeline
stages, which all take a micro-batch before the first backward. Each of its own stages keeps more than the
next one, by the longest micro-batch. More does not help: with a teacher as loaded as its student
(`tools/bench_schedules.py quality`), steps get no faster.

`auto` uses only memory that the plan leaves free. Closed forms count the wait for the first micro-batch in
layouts that leave less than `LEAST_PREFETCHED` micro-batches need. Memory that the user asks for counts as
messages of the section, so the allocation has to find room for it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import ceil

from secc.alloc.problem.closed_form import PlanValue, groups_that_run_ahead
from secc.alloc.problem.size_spread import PERMILLE
from secc.alloc.problem.types import AllocEdge, Assignment, Candidate, Problem
from secc.alloc.problem.workload import Workload
from secc.cluster import GIB
from secc.cost.model.patterns_and_transfers import SectionTransfer, micro_batch_sizes
from secc.errors import UserError
from secc.runtime.plan.expr_eval import evaluate_expr

RUN_AHEAD_AUTO = "auto"
PREFETCHED_PER_CONSUMER = 4
# Micro-batches of mean samples that a rank must have memory for so that its consumers do not wait. Where one
# fits, many of the first ones do not fit, because samples differ.
LEAST_PREFETCHED = 2


def parse_run_ahead(text: str) -> int | None:
    """Parses `--run-ahead`: bytes on a rank, None for `auto`. Raises UserError for other text."""
    if text == RUN_AHEAD_AUTO:
        return None
    try:
        size_bytes = int(float(text) * GIB)
    except (ValueError, OverflowError):
        size_bytes = -1
    if size_bytes < 0:
        raise UserError(
            f'--run-ahead: expected a number of GiB or "auto", got {text!r}',
            remedy="give --run-ahead GIB, 0 for none, or auto",
        )
    return size_bytes


def check_can_prefetch(work: Workload) -> None:
    """Raises UserError for a model without a section that can compute for the next step."""
    if not prefetchable_sections(work):
        message = "no section can run ahead: each has a backward, or needs results of a section that trains"
        raise UserError(message, remedy="leave --run-ahead out")


def prefetchable_sections(work: Workload) -> set[str]:
    """Sections that may prefetch if they have ranks of their own: forward only, nothing trained, and the
    same upstream."""
    prefetchable: set[str] = set()
    for name, load in work.loads.items():  # producers first
        if (
            load.mode == "forward"
            and not load.cost.trainable
            and {c.src for c in work.crossings if c.dst == name} <= prefetchable
        ):
            prefetchable.add(name)
    return prefetchable


def with_prefetch_buffers(asked: Problem, work: Workload, size: int | None) -> Problem:
    """Problem in which prefetching sections hold `size` more bytes and consumers do not wait for their
    first micro-batch, with a `size` of None where ranks have memory left for some. Stages of other sections
    stand idle, and `idle_ns` is 0 for them."""
    ahead = prefetchable_sections(work) if size != 0 else set[str]()

    def mark_candidate(section: str, c: Candidate) -> Candidate:
        runs_ahead = section in ahead and c.sharding != "zero3"
        return c.with_fields(runs_ahead=runs_ahead, idle_ns=c.idle_ns if runs_ahead else 0)

    sections = {s: tuple(mark_candidate(s, c) for c in cs) for s, cs in asked.sections.items()}
    asked = replace(asked, sections=sections)
    return replace(
        asked,
        edges=tuple(_edge_with_buffer(work, asked, e, size) if e.src in ahead else e for e in asked.edges),
    )


def _edge_with_buffer(work: Workload, asked: Problem, edge: AllocEdge, size: int | None) -> AllocEdge:
    crossings = [c for c in work.crossings if (c.src, c.dst) == (edge.src, edge.dst)]

    @cache
    def least_bytes(micro_batch: int) -> int:
        return sum(_message_bytes(work, c, LEAST_PREFETCHED * micro_batch) for c in crossings)

    def latency_ns(c: Candidate, ns: int, sent: int) -> int:
        has_room = size is not None or asked.usable_bytes(c) - c.memory_ahead - sent >= least_bytes(
            c.micro_batch
        )
        return ns - c.fill_ns if c.runs_ahead and has_room else ns

    columns = zip(asked.sections[edge.src], edge.latency_ns, edge.sent_bytes, strict=True)
    return replace(
        edge,
        sent_bytes=tuple(b + (size or 0) for b in edge.sent_bytes),
        latency_ns=tuple(latency_ns(*column) for column in columns),
    )


def _message_bytes(work: Workload, crossing: SectionTransfer, samples: int) -> int:
    """Bytes of the results of `samples` mean samples, of the pattern with the largest results."""
    sizes = (
        micro_batch_sizes(work.graph, p.sizes, samples) for p in work.loads[crossing.src].active_patterns
    )
    return max(evaluate_expr(crossing.size, own) for own in sizes)


def choose_prefetch_memory(
    work: Workload, asked: Problem, assignment: Assignment, value: PlanValue, size: int | None
) -> tuple[int, set[str]]:
    """Returns (bytes on a rank, sections that prefetch) under an assignment; (0, empty) if none can.

    `size` is what the user asked for, None for `auto`. Raises UserError if bytes are asked for and no section
    can prefetch.
    """
    group = assignment.group
    chosen = {s: cs[assignment.choice[s]] for s, cs in asked.sections.items()}
    usable_groups = groups_that_run_ahead(chosen, group)
    prefetching = {
        s
        for s in chosen
        if group[s] in usable_groups and any(e.src == s and group[e.dst] != group[s] for e in asked.edges)
    }
    if not prefetching and size:
        message = (
            "no frozen section can run ahead: "
            "each shares ranks with a section that trains, or gathers its parameters (zero3)"
        )
        raise UserError(
            message, remedy="leave --run-ahead out, or give them ranks of their own (--strategy apart)"
        )
    if not prefetching:
        return 0, set()
    if size is None:
        free_bytes = min(
            work.for_kind(chosen[s].kind).cluster.device.usable_memory - value.memory[group[s]]
            for s in prefetching
        )
        size = max(
            0, min(free_bytes, max(_useful_prefetch_bytes(work, asked, assignment, s) for s in prefetching))
        )
    return size, prefetching if size else set()


def _useful_prefetch_bytes(work: Workload, asked: Problem, assignment: Assignment, section: str) -> int:
    """Bytes of the micro-batches that a replica of `section` should have ready for consumers on other
    ranks."""
    chosen = {s: cs[assignment.choice[s]] for s, cs in asked.sections.items()}
    producer, group, total = chosen[section], assignment.group, 0
    for c in work.crossings:
        if c.src == section and group[c.dst] != group[section]:
            dst = chosen[c.dst]
            longest = work.loads[section].spread.longest_micro_batch(
                producer.micro_batch
            )  # permille of the mean
            samples = (PREFETCHED_PER_CONSUMER + dst.pp) * max(
                producer.micro_batch, ceil(dst.dp * dst.micro_batch / producer.dp)
            ) + (producer.pp - 1) * producer.micro_batch * -(-longest // PERMILLE)
            total += _message_bytes(work, c, samples)
    return total
