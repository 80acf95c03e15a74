"""Tables of the reasons that `allocate` and the passes that form sections left in `plan.reasons`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from secc.cluster.presets import FIGURE_SOURCES
from secc.report.text_table import TextTable, amount_text, bytes_text
from secc.runtime.plan.schema import Plan

SAME_STEP_TOLERANCE = 1e-4  # relative changes of the step below this count as none
IN_FLIGHT_BUDGET_TEXT = "in-flight budget: activations kept from forward to backward"
MEMORY_NOTE = (
    "Per rank as allocated, for the largest stage before layers are split into stages, which may hold more "
    "micro-batches; shares are of the memory available to tensors. Gradients count as far "
    "as they exist before the "
    "backward that computes them has freed as many activations. The in-flight budget limits all activations "
    "together, whichever samples come: a forward that exceeds it waits for a backward."
)
COST_ORIGIN_DESCRIPTIONS = {
    "measured": "measured on this hardware (secc profile)",
    "counted": "counted: FLOPs and bytes of each operation",
    "sampled": "counted on dataset samples",
    "default": "assumed: two FLOPs per parameter and row",
}


def decision_tables(plan: Plan) -> list[TextTable]:
    """Alternatives, bottlenecks, memory, cost origins and formation of sections; empty tables for plans
    without reasons."""
    return [
        _alternatives_table(plan),
        _bounds_table(plan),
        _memory_table(plan),
        _cost_origins_table(plan),
        _formation_table(plan),
    ]


def _alternatives_table(plan: Plan) -> TextTable:
    rows = [
        row
        for name, reasons in plan.reasons.items()
        for row in _alternative_rows(plan, name, reasons.get("alternatives", ()))
    ]
    note = (
        "One choice changed and all others kept, fastest first; the change of the step is predicted in closed"
        " form, for the plan as well; memory of the section's fullest rank."
    )
    if tried := plan.solver.get("tried"):
        note += f" The plan is the fastest of {tried} evaluated with the schedule that ranks run."
    return TextTable(
        "Alternatives",
        ("section", "choice", "layout", "step", "GiB per rank"),
        tuple(rows),
        note,
    )


def _alternative_rows(plan: Plan, name: str, alternatives: Any) -> Iterator[tuple[str, ...]]:
    """Alternatives that fit, fastest first, then the others."""
    step = float(plan.prediction.get("step_time_s", 0.0))
    for a in sorted(alternatives, key=lambda a: (not a["fits"], _waits_for_replicas(a), a["step_time_s"])):
        layout, step_time = a["layout"], float(a["step_time_s"])
        degrees = [
            f"{key} {layout[key]}" for key in ("dp", "pp", "tp", "cp", "ep") if layout.get(key, 1) != 1
        ]
        shape = ", ".join([*degrees, f"micro-batch {layout['micro_batch']}"])
        memory = f"{a['memory'] / 2**30:.3g}" + ("" if a["fits"] else ", does not fit")
        yield (
            name,
            a["choice"],
            shape,
            _change_text(step_time, step) + (", plus waits" if _waits_for_replicas(a) else ""),
            memory,
        )


def _waits_for_replicas(alternative: Any) -> bool:
    """Whether replicas wait for each other in every micro-batch, which the closed form does not include."""
    return alternative["layout"]["sharding"] == "zero3"


def _change_text(step_time: float, step: float) -> str:
    if not step or abs(step_time / step - 1) < SAME_STEP_TOLERANCE:
        return "the same"
    return f"{step_time / step - 1:+.1%}"


def _bounds_table(plan: Plan) -> TextTable:
    rows = tuple(
        (name, _bound_text(plan, name, reasons), _shares_text(reasons["time_s"]))
        for name, reasons in plan.reasons.items()
        if "time_s" in reasons
    )
    note = "Of the busiest rank's time in a step by the cost model, without waits for other sections."
    return TextTable("Bottlenecks", ("section", "bound by", "shares"), rows, note)


def _bound_text(plan: Plan, name: str, reasons: Any) -> str:
    """The largest part of a section's time, and the memory that a faster choice would need."""
    largest = next(iter(reasons["time_s"]), "nothing")
    step = float(plan.prediction.get("step_time_s", 0.0))
    faster = [
        a
        for a in reasons["alternatives"]
        if not a["fits"]
        and not _waits_for_replicas(a)
        and float(a["step_time_s"]) < step * (1 - SAME_STEP_TOLERANCE)
    ]
    if not faster:
        return largest
    best = min(faster, key=lambda a: a["step_time_s"])

    needed, available = bytes_text(best["memory"]), bytes_text(reasons["memory"]["usable"])
    return f"{largest}; memory: {best['choice']} would be faster, but needs {needed} of {available}"


def _shares_text(parts: Any) -> str:
    total = sum(parts.values()) or 1.0
    return ", ".join(f"{name} {float(s) / total:.0%}" for name, s in parts.items() if s / total >= 0.005)


def _memory_table(plan: Plan) -> TextTable:
    rows: list[tuple[str, ...]] = []
    for name, reasons in plan.reasons.items():
        if "memory" not in reasons:
            continue
        memory = reasons["memory"]
        used, usable = memory["used"], memory["usable"]
        rows += [
            (name, part, bytes_text(size), f"{size / usable:.1%}") for part, size in memory["parts"].items()
        ]
        rows.append((name, "total", bytes_text(used), f"{used / usable:.1%}"))
        rows.append((name, "free", bytes_text(max(0, usable - used)), f"{(usable - used) / usable:.1%}"))
        rows.append((name, "reserved for driver and fragmentation", bytes_text(memory["margin"]), ""))
        if memory["largest_tensor"]["bytes"]:
            largest = memory["largest_tensor"]
            part = f"largest tensor between blocks: {largest['tensor']}"
            rows.append((name, part, bytes_text(largest["bytes"]), ""))
        rows += [
            (s.name, IN_FLIGHT_BUDGET_TEXT, bytes_text(s.room_bytes), "")
            for s in plan.sections
            if s.user_section_name == name and s.room_bytes
        ]
    return TextTable("Memory", ("section", "part", "size", "share"), tuple(rows), MEMORY_NOTE)


def _cost_origins_table(plan: Plan) -> TextTable:
    """Origin of costs: blocks by kind of cost, then figures of devices and links."""
    rows: list[tuple[str, ...]] = []
    for name, reasons in plan.reasons.items():
        counts = reasons.get("costs", {}).items()
        rows += [
            (
                name,
                amount_text(count, "block"),
                COST_ORIGIN_DESCRIPTIONS.get(str(kind), str(kind)),
            )
            for kind, count in counts
        ]
    if not rows:
        return TextTable("Cost origins", (), ())
    for kind in str(plan.cluster.get("device", {}).get("kind", "")).split("+"):
        rows += [
            (kind, what, source)
            for what, source in FIGURE_SOURCES.get(kind.lower(), {"figures": "cluster file"}).items()
        ]
    return TextTable("Cost origins", ("section or device", "figure", "origin"), tuple(rows))


def _formation_table(plan: Plan) -> TextTable:
    rows = tuple((name, note) for name, reasons in plan.reasons.items() for note in reasons.get("formed", ()))
    return TextTable("How sections were formed", ("section", "decision"), rows)
