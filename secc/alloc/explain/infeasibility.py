"""Explains why no plan fits, and finds the smallest change that makes one fit: the error that users read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from secc.alloc.explain.alternatives import section_memory_parts
from secc.alloc.problem.build_problem import build_problem, count_usable_ranks
from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.types import Candidate, Problem, Solution
from secc.alloc.problem.workload import Workload, build_workload
from secc.alloc.solver.allocation_solver import solve_allocation, solve_least_memory, solve_least_time
from secc.cluster import GIB, Cluster
from secc.cluster.presets import DEVICE_PRESETS
from secc.errors import UserError

SMALLEST_PART = 1000  # of the needed memory, or 1 MiB: smaller parts are not named
MAX_SUGGESTED_PER_NODE = 8  # devices that a node has at most, where more of them are asked for


def explain_infeasibility(work: Workload, asked: Problem, pins: Pins) -> UserError:
    """Returns the error for a problem without a solution."""
    if asked.deadline is not None and (reached := solve_least_time(asked)) is not None:
        return _deadline_error(work, asked, reached)
    for name, candidates in asked.sections.items():
        if (least := min(c.host_memory for c in candidates)) > asked.host_capacity:
            return _host_memory_error(work, name, least, asked.host_capacity)
    need = solve_least_memory(asked)
    if need is None:
        return _rank_error(work, asked, pins)
    relaxed = replace(asked, capacity=need)
    section, parts = _find_binding_section(work, relaxed)
    device = work.cluster.device
    cause = (
        f"section {section} does not fit: its ranks need {_gib(need)} GiB ({parts}), "
        f"and of the {_gib(device.memory)} GiB of each {device.kind} "
        f"{_gib(asked.capacity)} GiB can be used"
    )
    return UserError(cause, f"cluster {work.cluster.name}", _suggest_remedy(work, asked, pins, section, need))


def _host_memory_error(work: Workload, name: str, least: int, capacity: int) -> UserError:
    return UserError(
        f"section {name} does not fit: each rank would keep {_gib(least)} GiB in host memory,"
        f" and it can use {_gib(capacity)} GiB",
        f"cluster {work.cluster.name}",
        f"leave {name}.offload out, cut the section over more ranks (tp, pp), or give the nodes' memory in a"
        " cluster file (host: {memory_gib: ...}, for each device)",
    )


def _gib(size: int) -> str:
    """Bytes in GiB, with two digits where that would be 0.00: small devices of tests have a few MiB."""
    return f"{size / GIB:.2f}" if 200 * size >= GIB or not size else f"{size / GIB:.2g}"


def _deadline_error(work: Workload, asked: Problem, shortest_ns: int) -> UserError:
    """Error for a deadline that is shorter than the shortest step, `reached` ns."""
    seconds = -(-shortest_ns // 10**5) / 10**4  # rounded up to four digits, so that it is sure to suffice
    cause = (
        f"no step takes at most {(asked.deadline or 0) / 10**9:g} s: "
        f"the fastest on up to {asked.ranks} ranks takes {shortest_ns / 10**9:.4g} s"
    )
    return UserError(
        cause,
        f"cluster {work.cluster.name}",
        f"ask for a step time of at least {seconds:g} s, or give more or faster devices",
    )


def _rank_error(work: Workload, asked: Problem, pins: Pins) -> UserError:
    """Error for choices or a strategy that cannot be met whatever the memory."""
    names = ", ".join(asked.sections)
    if (
        pins.as_text
        and solve_least_memory(build_problem(work, asked.ranks, asked.strategy, Pins())) is not None
    ):
        on = f"on {asked.ranks} ranks with the strategy {asked.strategy}"
        if "," not in pins.as_text:
            remedy = "give more ranks, or another value, or another strategy"
            return UserError(f"{pins.as_text} is impossible {on}", remedy=remedy)
        return UserError(
            f"the choices {pins.as_text} cannot be met together {on}", remedy="change or drop one of them"
        )
    if asked.strategy == "apart" and work.sharing_sections:
        trained = ", ".join(dict.fromkeys(chain.from_iterable(work.sharing_sections)))
        message = f"the trained sections {trained} cannot be apart: {work.coupled}"
        return UserError(message, remedy="use the strategy auto, or another optimizer")
    if asked.strategy == "apart":
        return UserError(
            f"{len(asked.sections)} sections cannot be apart on {asked.ranks} ranks: {names}",
            remedy=f"give at least {len(asked.sections)} ranks, or use the strategy auto",
        )
    most = count_usable_ranks(work, asked.strategy, pins, asked.ranks)
    fewer = f"give at most {most} ranks, or a larger global batch"
    remedy = (
        fewer
        if most < asked.ranks
        else "give more ranks or devices with more memory, or use another strategy"
    )
    return UserError(
        f"the strategy {asked.strategy} cannot put {names} on {asked.ranks} ranks", remedy=remedy
    )


def _find_binding_section(work: Workload, relaxed: Problem) -> tuple[str, str]:
    """(section that needs most memory where all need as little as they can, what its ranks hold as text)."""
    solution = solve_allocation(relaxed)
    assert solution is not None
    assignment = solution.assignment
    chosen = {s: cs[assignment.choice[s]] for s, cs in relaxed.sections.items()}
    parts = {s: section_memory_parts(work, relaxed, assignment, work.loads[s], c) for s, c in chosen.items()}
    section = max(parts, key=lambda s: sum(parts[s].values()))
    other_sections = evaluate_assignment(relaxed, assignment).memory[assignment.group[section]] - sum(
        parts[section].values()
    )
    held_bytes = parts[section] | ({"other sections": other_sections} if other_sections else {})
    least = min(1 << 20, sum(held_bytes.values()) // SMALLEST_PART)
    shown = {what: size for what, size in held_bytes.items() if size > least}
    return section, ", ".join(f"{what} {_gib(size)}" for what, size in shown.items())


# -- what would make it fit, tried out


def _suggest_remedy(work: Workload, asked: Problem, pins: Pins, section: str, need: int) -> str:
    """Finds the smallest change that gives the solver a plan: of a choice, else the strategy, else the
    devices. If none of those suffices, how large devices must be."""
    suggestion = _suggest_choice(work, asked, pins) or _suggest_strategy(work, asked, pins)
    if suggestion:
        return suggestion
    devices = [
        text
        for text in (_suggest_more_devices(work, asked, pins), _suggest_larger_devices(work, asked, pins))
        if text
    ]
    if devices:
        return ", or ".join(devices)
    gib = -(-need * 100 // 95 + work.cluster.device.reserved) / GIB
    smaller = f"make {section} smaller: fewer parameters, shorter samples, or a dtype of fewer bytes"
    least = f"{gib:.1f}" if gib >= 1 else f"{gib + 0.0005:.3f}"
    return f"use devices with at least {least} GiB, or {smaller}"


def _suggest_choice(work: Workload, asked: Problem, pins: Pins) -> str:
    """Another value for one pinned choice, trying those first that keep the layout; else dropping all of
    them; else ""."""
    for section, key, value in sorted(pins.pinned_choices, key=lambda pin: pin[1] in {"dp", "tp", "pp"}):
        solution, sections = _solve_with(work, asked.ranks, asked.strategy, pins.without_pin(section, key))
        if solution is not None:
            chosen = sections[section][solution.assignment.choice[section]]
            return f"set {section}.{key}={getattr(chosen, key)} in place of {value}"
    if (
        pins.as_text
        and _solve_with(
            work, asked.ranks, asked.strategy, Pins(together=pins.together, refused=pins.refused)
        )[0]
        is not None
    ):
        return f"drop the choices {pins.as_text}"
    return ""


def _suggest_strategy(work: Workload, asked: Problem, pins: Pins) -> str:
    fits = asked.strategy != "auto" and _solve_with(work, asked.ranks, "auto", pins)[0] is not None
    return "use the strategy auto" if fits else ""


def _suggest_more_devices(work: Workload, asked: Problem, pins: Pins) -> str:
    """The fewest devices of a few larger counts: some ranks more, then two, four and eight times as many."""
    cluster = work.cluster
    counts = [asked.ranks + n for n in range(1, len(asked.sections) + 1)] + [
        asked.ranks * n for n in (2, 4, 8)
    ]
    for ranks in sorted(set(counts)):
        larger = _cluster_with_ranks(cluster, ranks)
        if larger is None:
            continue
        larger_work = work if larger == cluster else build_workload(work.graph, larger, work.global_batch)
        if (
            ranks <= count_usable_ranks(larger_work, asked.strategy, pins, ranks)
            and _solve_with(larger_work, ranks, asked.strategy, pins)[0] is not None
        ):
            shape = f"{larger.nodes}x{larger.per_node}x{cluster.device.kind}"
            return f"give {ranks} ranks" if larger == cluster else f"give {ranks} devices ({shape})"
    return ""


def _cluster_with_ranks(cluster: Cluster, ranks: int) -> Cluster | None:
    """Cluster with at least `ranks` ranks: the same one, one with a larger node, or with more nodes; None
    if they are not whole nodes."""
    if ranks <= cluster.per_node or (ranks <= cluster.ranks and ranks % cluster.per_node == 0):
        return cluster
    if cluster.nodes == 1 and ranks <= max(MAX_SUGGESTED_PER_NODE, cluster.per_node):
        return replace(cluster, per_node=ranks)
    return replace(cluster, nodes=ranks // cluster.per_node) if ranks % cluster.per_node == 0 else None


def _suggest_larger_devices(work: Workload, asked: Problem, pins: Pins) -> str:
    """The device kind with the least memory on which the same number suffices."""
    device = work.cluster.device
    kinds = (d for d in DEVICE_PRESETS.values() if d.backend == device.backend and d.memory > device.memory)
    for kind in sorted(kinds, key=lambda d: d.memory):
        larger_work = build_workload(
            work.graph, replace(work.cluster, device=kind, groups=()), work.global_batch
        )
        if _solve_with(larger_work, asked.ranks, asked.strategy, pins)[0] is not None:
            return f"use {kind.kind} devices ({kind.memory / GIB:.0f} GiB)"
    return ""


def _solve_with(
    work: Workload, ranks: int, strategy: str, pins: Pins
) -> tuple[Solution | None, Mapping[str, tuple[Candidate, ...]]]:
    """(solution under other conditions or None, candidates by section)."""
    try:
        asked = build_problem(work, ranks, strategy, pins)
    except UserError:
        return None, {}
    return solve_allocation(asked), asked.sections
