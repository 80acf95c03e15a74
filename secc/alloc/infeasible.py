"""Why nothing fits, and the smallest change that would: what a user reads when the solver finds no plan."""

from __future__ import annotations

from dataclasses import replace

from secc.alloc.candidates import Workload
from secc.alloc.model import least_memory, least_time, solve
from secc.alloc.pins import Pins
from secc.alloc.problem import problem, usable_ranks
from secc.alloc.types import Problem
from secc.cluster import GIB
from secc.errors import UserError


def explain(work: Workload, asked: Problem, pins: Pins) -> UserError:
    """The error for a problem without a solution."""
    if asked.deadline is not None and (reached := least_time(asked)) is not None:
        return _too_soon(work, asked, reached)
    need = least_memory(asked)
    if need is None:
        return _no_ranks(work, asked, pins)
    section, device = _largest(replace(asked, capacity=need)), work.cluster.device
    cause = (
        f"section {section} does not fit: its ranks need {need / GIB:.2f} GiB, and of the {device.memory / GIB:.2f} GiB of a "
        f"{device.kind} {asked.capacity / GIB:.2f} GiB can be used"
    )
    return UserError(cause, f"cluster {work.cluster.name}", _remedy(work, asked, pins, section, need))


def _too_soon(work: Workload, asked: Problem, reached: int) -> UserError:
    """The deadline is shorter than any step."""
    least = -(-reached // 10**5) / 10**4  # seconds that are sure to suffice, as nobody wants to type nanoseconds
    cause = (
        f"no step takes at most {(asked.deadline or 0) / 10**9:g} s: the fastest on up to {asked.ranks} ranks takes {reached / 10**9:.4g} s"
    )
    return UserError(cause, f"cluster {work.cluster.name}", f"ask for a step time of at least {least:g} s, or give more or faster devices")


def _no_ranks(work: Workload, asked: Problem, pins: Pins) -> UserError:
    names = ", ".join(asked.sections)
    if pins.text and least_memory(problem(work, asked.ranks, asked.strategy, Pins())) is not None:
        return UserError(f"the choices {pins.text} cannot be met together on {asked.ranks} ranks", remedy="change or drop one of them")
    if asked.strategy == "apart":
        return UserError(
            f"{len(asked.sections)} sections cannot be apart on {asked.ranks} ranks: {names}",
            remedy=f"give at least {len(asked.sections)} ranks, or use the strategy auto",
        )
    most = usable_ranks(work, asked.strategy, pins, asked.ranks)
    fewer = f"give at most {most} ranks, or a larger global batch"
    remedy = fewer if most < asked.ranks else "give more ranks or devices with more memory, or use another strategy"
    return UserError(f"the strategy {asked.strategy} cannot put {names} on {asked.ranks} ranks", remedy=remedy)


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
        if ranks <= usable_ranks(work, asked.strategy, pins, ranks) and solve(problem(work, ranks, asked.strategy, pins)) is not None:
            return f"give {ranks} ranks"
    gib = -(-need * 100 // 95 + work.cluster.device.reserved) / GIB
    smaller = f"make {section} smaller: fewer parameters, shorter samples, or a dtype of fewer bytes"
    return f"use devices with at least {gib:.1f} GiB, or {smaller}"
