"""The page `report.html` of a plan, without scripts or external resources; all names in it are escaped."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from secc.codegen.render import render_template
from secc.errors import printable_text
from secc.report.html_policy import content_policy
from secc.report.plan_tables import plan_summary, plan_tables
from secc.report.text_table import TextTable, ranks_text
from secc.runtime.plan.schema import Plan

_STYLE = """
  body { font: 15px/1.5 system-ui, sans-serif; color: #1c2330;
    margin: 2rem auto; max-width: 78rem; padding: 0 1rem; }
  h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
  table { border-collapse: collapse; width: 100%; }
  th, td { text-align: left; padding: .35rem .7rem; vertical-align: top; }
  th { font-weight: 600; border-bottom: 2px solid #c8d0dc; }
  td { border-bottom: 1px solid #e6eaf0; font-variant-numeric: tabular-nums; }
  .note { color: #5a6678; margin: .2rem 0 .6rem; } .summary td:first-child { color: #5a6678; width: 10rem; }
  .lanes { display: flex; flex-wrap: wrap; gap: .4rem; }
  .lane { border: 1px solid #c8d0dc; border-radius: .4rem; padding: .3rem .6rem; }
  .lane b { display: block; font-size: .8rem; color: #5a6678; } code { font-size: .9em; }
"""


def report_page(plan: Plan, drawing: str = "") -> str:
    """Render the page. drawing: HTML of a simulated step, or ""."""
    return render_template(
        "report.html.j2",
        plan=plan,
        style=_STYLE,
        policy=content_policy(_STYLE),
        summary=[(name, printable_text(value)) for name, value in plan_summary(plan)],
        tables=[_printable_table(table) for table in plan_tables(plan)],
        lanes=_rank_cards(plan),
        drawing=drawing,
    )


def _printable_table(table: TextTable) -> TextTable:
    return dataclasses.replace(
        table, rows=tuple(tuple(printable_text(cell, newlines=True) for cell in row) for row in table.rows)
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
