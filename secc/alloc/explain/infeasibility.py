"""Why nothing fits, and the smallest change that would: what a user reads when the solver finds no plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from secc.alloc.explain.alternatives import section_memory_parts
from secc.alloc.problem.build_problem import build_problem, count_usable_ranks
from secc.alloc.problem.candidates import Workload, build_workload
from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.types import Candidate, Problem, Solution
from secc.alloc.solver.cpsat_model import solve_allocation, solve_least_memory, solve_least_time
from secc.cluster import GIB, Cluster
from secc.cluster.presets import DEVICE_PRESETS
from secc.errors import UserError

MAX_SUGGESTED_PER_NODE = 8  # devices that a node has at most, where more of them are asked for


def explain_infeasibility(work: Workload, asked: Problem, pins: Pins) -> UserError:
    """The error for a problem without a solution."""
    if asked.deadline is not None and (reached := solve_least_time(asked)) is not None:
        return _deadline_error(work, asked, reached)
    need = solve_least_memory(asked)
    if need is None:
        return _rank_error(work, asked, pins)
    least = replace(asked, capacity=need)
    section, parts = _find_binding_section(work, least)
    device = work.cluster.device
    cause = (
        f"section {section} does not fit: its ranks need {need / GIB:.2f} GiB ({parts}), and of the {device.memory / GIB:.2f} GiB of each "
        f"{device.kind} {asked.capacity / GIB:.2f} GiB can be used"
    )
    return UserError(cause, f"cluster {work.cluster.name}", _suggest_remedy(work, asked, pins, section, need))


def _deadline_error(work: Workload, asked: Problem, reached: int) -> UserError:
    """The deadline is shorter than any step."""
    least = (
        -(-reached // 10**5) / 10**4
    )  # seconds that are sure to suffice, as nobody wants to type nanoseconds
    cause = f"no step takes at most {(asked.deadline or 0) / 10**9:g} s: the fastest on up to {asked.ranks} ranks takes {reached / 10**9:.4g} s"
    return UserError(
        cause,
        f"cluster {work.cluster.name}",
        f"ask for a step time of at least {least:g} s, or give more or faster devices",
    )


def _rank_error(work: Workload, asked: Problem, pins: Pins) -> UserError:
    names = ", ".join(asked.sections)
    if (
        pins.as_text
        and solve_least_memory(build_problem(work, asked.ranks, asked.strategy, Pins())) is not None
    ):
        return UserError(
            f"the choices {pins.as_text} cannot be met together on {asked.ranks} ranks",
            remedy="change or drop one of them",
        )
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


def _find_binding_section(work: Workload, least: Problem) -> tuple[str, str]:
    """The section that needs most where all need as little as they can, and what its ranks hold, as text."""
    solution = solve_allocation(least)
    assert solution is not None
    assignment = solution.assignment
    chosen = {s: cs[assignment.choice[s]] for s, cs in least.sections.items()}
    parts = {s: section_memory_parts(work, least, assignment, work.loads[s], c) for s, c in chosen.items()}
    section = max(parts, key=lambda s: sum(parts[s].values()))
    others = evaluate_assignment(least, assignment).memory[assignment.group[section]] - sum(
        parts[section].values()
    )
    held = parts[section] | ({"other sections": others} if others >> 20 else {})
    return section, ", ".join(f"{what} {size / GIB:.2f}" for what, size in held.items() if size >> 20)


# -- what would make it fit, tried out
# ---------------------------------------------------------------------------------------------------


def _suggest_remedy(work: Workload, asked: Problem, pins: Pins, section: str, need: int) -> str:
    """The smallest changes with which the solver finds a plan: of a choice, the strategy, else the devices;
    or how large those must be."""
    found = _suggest_choice(work, asked, pins) or _suggest_strategy(work, asked, pins)
    if found:
        return found
    devices = [
        text
        for text in (_suggest_more_devices(work, asked, pins), _suggest_larger_devices(work, asked, pins))
        if text
    ]
    if devices:
        return ", or ".join(devices)
    gib = -(-need * 100 // 95 + work.cluster.device.reserved) / GIB
    smaller = f"make {section} smaller: fewer parameters, shorter samples, or a dtype of fewer bytes"
    return f"use devices with at least {gib:.1f} GiB, or {smaller}"


def _suggest_choice(work: Workload, asked: Problem, pins: Pins) -> str:
    """One pinned choice made otherwise, those first that leave the layout as it is; else none of them."""
    for section, key, value in sorted(pins.pinned_choices, key=lambda pin: pin[1] in {"dp", "tp", "pp"}):
        solution, sections = _solve_with(work, asked.ranks, asked.strategy, pins.without_pin(section, key))
        if solution is not None:
            taken = sections[section][solution.assignment.choice[section]]
            return f"set {section}.{key}={getattr(taken, key)} in place of {value}"
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
    """The fewest of a few larger counts: some ranks more, then twice, four and eight times as many."""
    cluster = work.cluster
    counts = [asked.ranks + n for n in range(1, len(asked.sections) + 1)] + [
        asked.ranks * n for n in (2, 4, 8)
    ]
    for ranks in sorted(set(counts)):
        larger = _cluster_with_ranks(cluster, ranks)
        if larger is None:
            continue
        grown = work if larger == cluster else build_workload(work.graph, larger, work.global_batch)
        if (
            ranks <= count_usable_ranks(grown, asked.strategy, pins, ranks)
            and _solve_with(grown, ranks, asked.strategy, pins)[0] is not None
        ):
            shape = f"{larger.nodes}x{larger.per_node}x{cluster.device.kind}"
            return f"give {ranks} ranks" if larger == cluster else f"give {ranks} devices ({shape})"
    return ""


def _cluster_with_ranks(cluster: Cluster, ranks: int) -> Cluster | None:
    """A cluster with so many ranks: the same, one with a larger node, or with more nodes; None if they are no
    whole nodes."""
    if ranks <= cluster.per_node or (ranks <= cluster.ranks and ranks % cluster.per_node == 0):
        return cluster
    if cluster.nodes == 1 and ranks <= max(MAX_SUGGESTED_PER_NODE, cluster.per_node):
        return replace(cluster, per_node=ranks)
    return replace(cluster, nodes=ranks // cluster.per_node) if ranks % cluster.per_node == 0 else None


def _suggest_larger_devices(work: Workload, asked: Problem, pins: Pins) -> str:
    """The kind with the least memory with which as many devices suffice."""
    device = work.cluster.device
    kinds = (d for d in DEVICE_PRESETS.values() if d.backend == device.backend and d.memory > device.memory)
    for kind in sorted(kinds, key=lambda d: d.memory):
        other = build_workload(work.graph, replace(work.cluster, device=kind, groups=()), work.global_batch)
        if _solve_with(other, asked.ranks, asked.strategy, pins)[0] is not None:
            return f"use {kind.kind} devices ({kind.memory / GIB:.0f} GiB)"
    return ""


def _solve_with(
    work: Workload, ranks: int, strategy: str, pins: Pins
) -> tuple[Solution | None, Mapping[str, tuple[Candidate, ...]]]:
    """What the solver finds under other conditions, and the candidates it chose from."""
    try:
        asked = build_problem(work, ranks, strategy, pins)
    except UserError:
        return None, {}
    return solve_allocation(asked), asked.sections
