"""What tensor parallelism divides and what stays whole, with equal modules of a stack in one row."""

from __future__ import annotations

import re
from collections import Counter

from secc.report.text_table import paths_text
from secc.runtime.plan.schema import Plan, Section

STYLE_DESCRIPTIONS = {
    "colwise": "split by outputs",
    "rowwise": "split by inputs",
    "gather": "split by outputs, which are gathered",
    "experts": "experts split by their inner width",
    "routed": "each rank has some of the experts",
    "listed": "each rank has some of the experts, which are modules in a list",
    "vocab": "split by rows",
    "shapes": "code sees full sizes",
    "sequence": "works on a part of the positions",
    "join": "gathers positions",
    "columns": "split by outputs",
    "scatter": "split by inputs, positions scattered",
}


def tensor_parallel_rows(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Rows (section, modules, number of modules, what happens to them). Stages of a pipeline count as one
    section."""
    counts: dict[str, Counter[tuple[str, str]]] = {}  # of (modules, what happens to them), by section
    for section in plan.sections:
        name = section.user_section_name
        counts[name] = counts.get(name, Counter()) + _count_modules(plan, section)
    lines: dict[tuple[str, int, str], list[str]] = {}
    for name, section_counts in counts.items():
        for (modules, fate), count in section_counts.items():
            lines.setdefault((name, count, fate), []).append(modules)
    return tuple(
        (name, paths_text(modules), str(count), fate) for (name, count, fate), modules in lines.items()
    )


def _count_modules(plan: Plan, section: Section) -> Counter[tuple[str, str]]:
    """Count the modules of a section or stage by (path pattern, what happens to them)."""
    fates = Counter((_wildcard_path(s.module), STYLE_DESCRIPTIONS[s.kind]) for s in section.styles)
    fates |= Counter((_wildcard_path(n), "whole, gradient summed over tp") for n in section.partial)
    unsplit = (line.partition(": ") for line in plan.checks.get("whole", {}).get(section.name, ()))
    return fates | Counter((_wildcard_path(path), f"whole: {reason}") for path, _, reason in unsplit)


def _wildcard_path(path: str) -> str:
    """A path with its numbers replaced: `layers.*.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
