"""Why nothing fits, and the smallest change that would: what a user reads when the solver finds no plan."""

from __future__ import annotations

from dataclasses import replace

from secc.alloc.candidates import Workload, problem
from secc.alloc.model import solve
from secc.alloc.pins import Pins
from secc.alloc.types import Problem
from secc.cluster import GIB
from secc.errors import UserError


def explain(work: Workload, asked: Problem, pins: Pins) -> UserError:
    """The error for a problem without a solution."""
    unlimited = replace(asked, capacity=1 << 60)
    if solve(unlimited) is None:
        return _no_ranks(work, asked, pins)
    need, section = _least_memory(asked)
    cluster = work.cluster
    cause = (
        f"section {section} does not fit: its devices need {need / GIB:.2f} GiB, and of the {cluster.device.memory / GIB:.2f} GiB of a "
        f"{cluster.device.kind} {asked.capacity / GIB:.2f} GiB can be used"
    )
    return UserError(cause, f"cluster {cluster.name}", _remedy(work, asked, pins, section, need))


def _no_ranks(work: Workload, asked: Problem, pins: Pins) -> UserError:
    names = ", ".join(asked.sections)
    if pins.text and solve(replace(problem(work, asked.ranks, asked.strategy, Pins()), capacity=1 << 60)) is not None:
        return UserError(f"the choices {pins.text} cannot be met together on {asked.ranks} ranks", remedy="change or drop one of them")
    if asked.strategy == "apart":
        return UserError(
            f"{len(asked.sections)} sections cannot be apart on {asked.ranks} ranks: {names}",
            remedy=f"give at least {len(asked.sections)} ranks, or use the strategy auto",
        )
    return UserError(
        f"the strategy {asked.strategy} cannot put {names} on {asked.ranks} ranks",
        remedy=f"give at most {work.usable_ranks(asked.strategy)} ranks, or a larger global batch",
    )


def _least_memory(asked: Problem) -> tuple[int, str]:
    """The least memory of a device with which there is a plan, and the section that needs most of it."""
    low, high = asked.capacity, asked.capacity
    while solve(replace(asked, capacity=high)) is None:
        low, high = high, 2 * high
    while high - low > max(low // 100, 1 << 20):
        middle = (low + high) // 2
        low, high = (middle, high) if solve(replace(asked, capacity=middle)) is None else (low, middle)
    return high, _largest(replace(asked, capacity=high))


def _largest(fitting: Problem) -> str:
    solution = solve(fitting)
    assert solution is not None
    chosen = {s: cs[solution.assignment.choice[s]] for s, cs in fitting.sections.items()}
    return max(chosen, key=lambda s: chosen[s].memory_ahead)


def _remedy(work: Workload, asked: Problem, pins: Pins, section: str, need: int) -> str:
    """The first of these that makes it fit: without the pins, on a few more ranks, apart, else larger devices."""
    if pins.text and solve(problem(work, asked.ranks, asked.strategy, Pins(together=pins.together))) is not None:
        return f"drop the choice {pins.text}"
    if asked.strategy != "auto" and solve(problem(work, asked.ranks, "auto", pins)) is not None:
        return "use the strategy auto"
    for ranks in range(asked.ranks + 1, asked.ranks + len(asked.sections) + 1):
        if ranks <= work.usable_ranks(asked.strategy) and solve(problem(work, ranks, asked.strategy, pins)) is not None:
            return f"give {ranks} ranks"
    gib = -(-need * 100 // 95 + work.cluster.device.reserved) / GIB
    return f"use devices with at least {gib:.1f} GiB, or make {section} smaller: fewer parameters, shorter samples, or a dtype of fewer bytes"
