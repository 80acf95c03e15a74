"""`report.html`: the facts of a plan as one page without scripts or outside resources."""

from __future__ import annotations

from secc.codegen.render import render
from secc.report.facts import summary, tables
from secc.runtime.plan import Plan


def page(plan: Plan, drawing: str = "") -> str:
    """The text of the page, with the drawing of a simulated step (HTML) if there is one."""
    return render("report.html.j2", plan=plan, summary=summary(plan), tables=tables(plan), lanes=_lanes(plan), drawing=drawing)


def _lanes(plan: Plan) -> list[tuple[int, list[str]]]:
    """For each rank (the first 64) the sections it holds, for the drawing of the layout."""
    return [(rank, [s.name for s in plan.sections if rank in s.mesh.ranks]) for rank in range(min(plan.world_size, 64))]
