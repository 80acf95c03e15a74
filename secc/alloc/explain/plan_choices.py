"""A plan as a list of choices, NAME.KEY=VALUE, and back: so a model's second allocation, with its layers,
knows what the first one found.

What blocks cost in all is the same cut or whole, so nothing is to be gained by looking for the best plan
twice. What the solver had proven of it and how many plans were tried comes along as KEY=VALUE.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product

from xdsl.dialects.builtin import StringAttr

from secc.alloc.problem import pins
from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.types import Assignment, Candidate, Problem
from secc.ir.analysis.dataflow import get_number
from secc.ir.dialect.ops import GraphOp, SectionOp

DEFAULT_SOLVER_STATUS = {
    "status": "FEASIBLE",
    "gap": "1.0",
    "tried": "1",
}  # of a plan of which nothing is told
NUMBER_KEYS, WORD_KEYS = ("dp", "tp", "pp", "micro_batch"), ("sharding", "recompute")


def list_plan_choices(graph: GraphOp) -> tuple[str, ...]:
    """What `allocate` has chosen for each section; `with` names the first one on the same ranks."""
    first: dict[str, str] = {}
    found: list[str] = []
    for section in graph.sections:
        name, ranks = section.sym.data, str(section.attributes.get("ranks"))
        found += [
            f"{name}.{key}={value}"
            for key in (*NUMBER_KEYS, *WORD_KEYS)
            if (value := _choice_text(section, key))
        ]
        found += [f"{name}.with={first[ranks]}"] if ranks in first else []
        first.setdefault(ranks, name)
    return tuple(found)


def format_solver_status(graph: GraphOp) -> tuple[str, ...]:
    """What is told of these choices."""
    solver = graph.attributes.get("solver")
    told = json.loads(solver.data) if isinstance(solver, StringAttr) else {}
    return tuple(f"{key}={told[key]}" for key in DEFAULT_SOLVER_STATUS if key in told)


def parse_solver_status(texts: Sequence[str]) -> tuple[str, float, int]:
    """Status, gap and the number of plans that were tried."""
    told = DEFAULT_SOLVER_STATUS | dict(text.split("=", 1) for text in texts)
    return told["status"], float(told["gap"]), int(told["tried"])


def _choice_text(section: SectionOp, key: str) -> str:
    word = section.attributes.get(key)
    return word.data if isinstance(word, StringAttr) else str(get_number(section, key) or "")


def assignment_from_choices(problem: Problem, texts: Sequence[str]) -> Assignment | None:
    """The assignment with these choices; of several, which differ in what is in flight, the fastest by closed
    forms.

    None where there is none, or kinds of devices are mixed, of which choices do not tell.
    """
    if not texts or problem.pools:
        return None
    asked = pins.parse_pins(texts, problem.sections)
    wanted = {
        s: {key: value for section, key, value in asked.pinned_choices if section == s}
        for s in problem.sections
    }
    alike = [
        [i for i, c in enumerate(cs) if _matches_choices(c, wanted[s])] for s, cs in problem.sections.items()
    ]
    group = {s: s for s in problem.sections} | _groups_by_leader(asked.together, list(problem.sections))
    timed: list[tuple[int, tuple[int, ...], Assignment]] = []
    for places in product(*alike):
        found = Assignment(dict(zip(problem.sections, places, strict=True)), group)
        try:
            timed.append((evaluate_assignment(problem, found).time_ns, places, found))
        except ValueError:
            continue
    return min(timed, key=lambda t: t[:2])[2] if timed else None


def _groups_by_leader(pairs: Sequence[tuple[str, str]], order: list[str]) -> dict[str, str]:
    """The first section, in the problem's order, of those that share ranks with the same one."""
    shared: dict[str, list[str]] = {}
    for section, leader in pairs:
        shared.setdefault(leader, [leader]).append(section)
    return {s: min(some, key=order.index) for some in shared.values() for s in some}


def _matches_choices(c: Candidate, wanted: dict[str, int | str]) -> bool:
    return all(getattr(c, key) == value for key, value in wanted.items())
