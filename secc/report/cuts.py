"""What tensor parallelism cuts and what it leaves whole, for people: alike modules of a stack in one line."""

from __future__ import annotations

import re
from collections import Counter

from secc.runtime.plan import Plan

WORDS = {
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


def rows(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """(section, modules, how many, what happens to them)."""
    found: list[tuple[str, ...]] = []
    for section in plan.sections:
        cut = Counter((_alike(s.module), WORDS[s.kind]) for s in section.styles)
        cut |= Counter((_alike(n), "whole, its gradient summed over tp") for n in section.partial)
        whole = (w.partition(": ") for w in plan.checks.get("whole", {}).get(section.name, ()))
        cut |= Counter((_alike(path), f"whole: {reason}") for path, _, reason in whole)
        found += [(section.name, modules, str(count), what) for (modules, what), count in cut.items()]
    return tuple(found)


def _alike(path: str) -> str:
    """A path with its numbers left open: `layers.*.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
