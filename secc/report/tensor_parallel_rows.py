"""What tensor parallelism cuts and what it leaves whole, for people: alike modules of a stack in one line."""

from __future__ import annotations

import re
from collections import Counter

from secc.report.text_table import paths_text
from secc.runtime.plan.schema import Plan, Section

STYLE_DESCRIPTIONS = {
    "colwise": "cut by outputs",
    "rowwise": "cut by inputs",
    "gather": "cut by outputs, which are gathered",
    "experts": "experts cut by their inner width",
    "vocab": "cut by rows",
    "shapes": "code sees whole sizes",
    "sequence": "works on positions",
    "join": "positions gathered",
    "columns": "cut by outputs",
    "scatter": "cut by inputs, positions scattered",
}


def tensor_parallel_rows(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """(section, modules, how many of each, what happens to them); the stages of a pipeline count as the
    section that they are of."""
    counts: dict[str, Counter[tuple[str, str]]] = {}  # by section: of (modules, what happens to them)
    for section in plan.sections:
        counts[section.user_section_name] = counts.get(section.user_section_name, Counter()) + _count_modules(
            plan, section
        )
    lines: dict[tuple[str, int, str], list[str]] = {}
    for name, found in counts.items():
        for (modules, what), count in found.items():
            lines.setdefault((name, count, what), []).append(modules)
    return tuple(
        (name, paths_text(modules), str(count), what) for (name, count, what), modules in lines.items()
    )


def _count_modules(plan: Plan, section: Section) -> Counter[tuple[str, str]]:
    """How many alike modules of a section or stage have each fate."""
    cut = Counter((_wildcard_path(s.module), STYLE_DESCRIPTIONS[s.kind]) for s in section.styles)
    cut |= Counter((_wildcard_path(n), "whole, its gradient summed over tp") for n in section.partial)
    whole = (w.partition(": ") for w in plan.checks.get("whole", {}).get(section.name, ()))
    return cut | Counter((_wildcard_path(path), f"whole: {reason}") for path, _, reason in whole)


def _wildcard_path(path: str) -> str:
    """A path with its numbers left open: `layers.*.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
