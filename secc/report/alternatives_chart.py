"""The chart of what else was considered: step over memory, with the chosen plan."""

from __future__ import annotations

from typing import Any

from secc.report.bar_rows import section_colours
from secc.runtime.plan.schema import Plan


def alternatives_chart(plan: Plan) -> dict[str, Any] | None:
    """Returns the chart as JSON values, None for a plan without alternatives.

    step: predicted seconds of the plan in closed form, as the alternatives' are. sections: for each section
    its colour class, the bytes of its fullest rank (`memory`), of those that tensors may have (`usable`), and
    alternatives with `choice, layout, memory, step, fits`.
    """
    step = float(plan.prediction.get("step_time_s", 0.0))
    colours = section_colours(plan)
    sections = [
        {
            "name": name,
            "colour": colours.get(name, "s0"),
            "memory": reasons["memory"]["used"],
            "usable": reasons["memory"]["usable"],
            "points": [_point(a) for a in reasons["alternatives"]],
        }
        for name, reasons in plan.reasons.items()
        if reasons.get("alternatives") and "memory" in reasons
    ]
    return {"step": step, "sections": sections} if sections and step else None


def _point(alternative: dict[str, Any]) -> dict[str, Any]:
    layout = alternative["layout"]
    degrees = " · ".join(
        f"{key} {layout[key]}" for key in ("dp", "pp", "tp", "ep") if key in layout and layout[key] > 1
    )
    return {
        "choice": alternative["choice"],
        "layout": " · ".join(filter(None, (degrees, f"micro-batch {layout['micro_batch']}"))),
        "memory": alternative["memory"],
        "step": alternative["step_time_s"],
        "fits": alternative["fits"],
    }
