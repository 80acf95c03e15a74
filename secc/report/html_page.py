"""The page `report.html` of a plan, without scripts or external resources."""

from __future__ import annotations

from collections import defaultdict

from secc.codegen.render import render_template
from secc.report.plan_tables import plan_summary, plan_tables
from secc.report.text_table import ranks_text
from secc.runtime.plan.schema import Plan


def report_page(plan: Plan, drawing: str = "") -> str:
    """Render the page. drawing: HTML of a simulated step, or ""."""
    return render_template(
        "report.html.j2",
        plan=plan,
        summary=plan_summary(plan),
        tables=plan_tables(plan),
        lanes=_rank_cards(plan),
        drawing=drawing,
    )


def _rank_cards(plan: Plan) -> list[tuple[str, str]]:
    """(ranks, names of their sections) for the drawing of the layout: one card for all ranks with the same
    sections, in the order of the sections."""
    ranks_by_sections: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    sections_of_rank: defaultdict[int, list[str]] = defaultdict(list)
    for s in plan.sections:
        for rank in s.mesh.ranks:
            sections_of_rank[rank].append(s.name)
    for rank in range(plan.world_size):
        ranks_by_sections[tuple(sections_of_rank[rank])].append(rank)
    order = {s.name: i for i, s in enumerate(plan.sections)}
    cards = sorted(
        ranks_by_sections.items(), key=lambda card: [order[name] for name in card[0]] or [len(order)]
    )
    return [(_card_title(ranks), ", ".join(names) or "idle") for names, ranks in cards]


def _card_title(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks: {ranks_text(ranks)}"
