"""Why a plan is as it is: the tables of `plan.reasons`, which `allocate` and the passes that form sections
leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from secc.cluster.presets import FIGURE_SOURCES
from secc.report.text_table import TextTable, bytes_text, seconds_text
from secc.runtime.plan.schema import Plan

SAME_STEP_TOLERANCE = 1e-4  # changes of the step by a smaller share are none
IN_FLIGHT_BUDGET_TEXT = "room for what micro-batches keep from forward to backward"
MEMORY_NOTE = (
    "Of a rank as allocated: the largest stage's, before layers are cut into stages, which may hold more micro-batches; shares "
    "are of what tensors can have. Gradients count as far as they come before the backward that makes them has freed as many activations. "
    "Room is what activations may take together, whatever samples come: a forward without room waits for a backward."
)
COST_ORIGIN_DESCRIPTIONS = {
    "measured": "measured on such hardware (secc profile)",
    "counted": "counted: FLOPs and bytes of each operation",
    "sampled": "counted on samples of the dataset",
    "default": "assumed: two FLOPs for each parameter and row",
}


def decision_tables(plan: Plan) -> list[TextTable]:
    """Alternatives, times, memory, costs and how sections were formed; [] of each for plans that were not
    allocated."""
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
        for name, found in plan.reasons.items()
        for row in _alternative_rows(plan, name, found.get("alternatives", ()))
    ]
    note = "One choice changed and all else left, by the closed forms, the runner-up first; memory is that of the section's fullest rank."
    if tried := plan.solver.get("tried"):
        note += f" The plan is the shortest of {tried} that were tried in the order in which ranks run."
    return TextTable(
        "What else could be",
        ("section", "instead", "then", "step", "change", "GiB a rank"),
        tuple(rows),
        note,
    )


def _alternative_rows(plan: Plan, name: str, found: Any) -> Iterator[tuple[str, ...]]:
    """Those that fit, the fastest first, then those that do not."""
    step = float(plan.prediction.get("step_time_s", 0.0))
    for a in sorted(found, key=lambda a: (not a["fits"], _waits_for_replicas(a), a["step_time_s"])):
        layout, then = a["layout"], float(a["step_time_s"])
        shape = (
            f"dp {layout['dp']}, pp {layout['pp']}, tp {layout['tp']}, micro-batch {layout['micro_batch']}"
        )
        memory = f"{a['memory'] / 2**30:.3g}" + ("" if a["fits"] else " too much")
        yield (
            name,
            a["choice"],
            shape,
            seconds_text(then),
            _change_text(then, step) + (", but for waits" if _waits_for_replicas(a) else ""),
            memory,
        )


def _waits_for_replicas(alternative: Any) -> bool:
    """Whether replicas wait for each other in every micro-batch, which no closed form prices."""
    return alternative["layout"]["sharding"] == "zero3"


def _change_text(then: float, step: float) -> str:
    if not step or abs(then / step - 1) < SAME_STEP_TOLERANCE:
        return "none"
    return f"{then / step - 1:+.1%}"


def _bounds_table(plan: Plan) -> TextTable:
    rows = tuple(
        (name, _bound_text(plan, name, found), _shares_text(found["time_s"]))
        for name, found in plan.reasons.items()
        if "time_s" in found
    )
    note = "Of the busiest rank's time in a step, by the cost model; waits for other sections come besides."
    return TextTable("What bounds sections", ("section", "bound by", "shares"), rows, note)


def _bound_text(plan: Plan, name: str, found: Any) -> str:
    """The largest part, and the memory that a faster choice would need."""
    largest = next(iter(found["time_s"]), "nothing")
    step = float(plan.prediction.get("step_time_s", 0.0))
    faster = [
        a
        for a in found["alternatives"]
        if not a["fits"]
        and not _waits_for_replicas(a)
        and float(a["step_time_s"]) < step * (1 - SAME_STEP_TOLERANCE)
    ]
    if not faster:
        return largest
    best = min(faster, key=lambda a: a["step_time_s"])
    usable = found["memory"]["usable"]
    return f"{largest}; memory: {best['choice']} would be faster, with {bytes_text(best['memory'])} of the {bytes_text(usable)} there are"


def _shares_text(parts: Any) -> str:
    whole = sum(parts.values()) or 1.0
    return ", ".join(f"{name} {float(s) / whole:.0%}" for name, s in parts.items() if s / whole >= 0.005)


def _memory_table(plan: Plan) -> TextTable:
    rows: list[tuple[str, ...]] = []
    for name, memory in ((n, found["memory"]) for n, found in plan.reasons.items() if "memory" in found):
        rows += [
            (name, part, bytes_text(size), f"{size / memory['usable']:.1%}")
            for part, size in memory["parts"].items()
        ]
        rows.append(
            (name, "together", bytes_text(memory["used"]), f"{memory['used'] / memory['usable']:.1%}")
        )
        free = memory["usable"] - memory["used"]
        rows.append((name, "left", bytes_text(max(0, free)), f"{free / memory['usable']:.1%}"))
        rows.append((name, "kept for the driver and fragments", bytes_text(memory["margin"]), ""))
        if memory["largest_tensor"]["bytes"]:
            largest = memory["largest_tensor"]
            rows.append(
                (
                    name,
                    f"largest tensor between blocks: {largest['tensor']}",
                    bytes_text(largest["bytes"]),
                    "",
                )
            )
        rows += [
            (s.name, IN_FLIGHT_BUDGET_TEXT, bytes_text(s.room_bytes), "")
            for s in plan.sections
            if s.user_section_name == name and s.room_bytes
        ]
    return TextTable("Where memory goes", ("section", "part", "size", "share"), tuple(rows), MEMORY_NOTE)


def _cost_origins_table(plan: Plan) -> TextTable:
    """Each number's origin: blocks by kind of cost, then the devices' and links' figures."""
    rows: list[tuple[str, ...]] = []
    for name, found in plan.reasons.items():
        counts = found.get("costs", {}).items()
        rows += [
            (
                name,
                f"{count} block{'s' if count != 1 else ''}",
                COST_ORIGIN_DESCRIPTIONS.get(str(kind), str(kind)),
            )
            for kind, count in counts
        ]
    if not rows:
        return TextTable("Where costs come from", (), ())
    for kind in str(plan.cluster.get("device", {}).get("kind", "")).split("+"):
        rows += [
            (kind, what, source)
            for what, source in FIGURE_SOURCES.get(kind.lower(), {"figures": "the cluster's file"}).items()
        ]
    return TextTable("Where costs come from", ("section or device", "what", "from"), tuple(rows))


def _formation_table(plan: Plan) -> TextTable:
    rows = tuple((name, note) for name, found in plan.reasons.items() for note in found.get("formed", ()))
    return TextTable("How sections were formed", ("section", "what was done and why"), rows)
