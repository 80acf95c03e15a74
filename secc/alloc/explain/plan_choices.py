"""Writes a plan as a list of choices, NAME.KEY=VALUE, and rebuilds the assignment from them.

A model's second allocation, with its layers captured one by one, takes the first one's plan over in this way:
the blocks cost the same in total, so searching again would find nothing better; where the step gets clearly
longer all the same, `allocate` searches again. Solver status, gap, the number of evaluated plans, their step
and the steps that the search compared travel along as KEY=VALUE.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from xdsl.dialects.builtin import StringAttr

from secc.alloc.problem import pins
from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.types import Assignment, Candidate, Problem
from secc.ir.analysis.dataflow import get_number
from secc.ir.dialect.ops import GraphOp, SectionOp

# Assumed where nothing is known of how a plan was found.
DEFAULT_SOLVER_STATUS = {"status": "FEASIBLE", "gap": "1.0", "tried": "1", "least_step_s": "0.0"}
SIMULATED_STEP = "simulated_s"
DROPPED_WAYS = "dropped"  # by section and way, its step over that of the plan on the first batch
# Tables within tables of seconds and ratios.
COMPARED_STEPS = ("dynamic_cp", "micro_batches", "interleaved", "sample_limits", DROPPED_WAYS)
NUMBER_KEYS = ("dp", "tp", "pp", "chunks", "cp", "ep", "micro_batch", "most_samples")
WORD_KEYS = ("sharding", "recompute", "backward", "cp_per", "cp_degrees", "offload", "placement", "norms")
UNWRITTEN_DEGREES = ("cp", "ep", "chunks")  # 1 where a section has no such attribute
UNWRITTEN_WORDS = {"norms": "whole"}  # where a section has no such attribute


def list_plan_choices(graph: GraphOp) -> tuple[str, ...]:
    """The choices of `allocate` for each section; `with` names the first section on the same ranks."""
    first: dict[str, str] = {}
    choices: list[str] = []
    for section in graph.sections:
        name, ranks = section.sym.data, str(section.attributes.get("ranks"))
        choices += [
            f"{name}.{key}={value}"
            for key in (*NUMBER_KEYS, *WORD_KEYS)
            if (value := _choice_text(section, key))
        ]
        choices += [f"{name}.with={first[ranks]}"] if ranks in first else []
        first.setdefault(ranks, name)
    return tuple(choices)


def format_solver_status(graph: GraphOp) -> tuple[str, ...]:
    """Solver status, gap, number of evaluated plans, least step of any plan and simulated step, as KEY=VALUE,
    and each compared step as TABLE/.../KEY=SECONDS."""
    solver = graph.attributes.get("solver")
    status = json.loads(solver.data) if isinstance(solver, StringAttr) else {}
    keys = (*DEFAULT_SOLVER_STATUS, SIMULATED_STEP, *COMPARED_STEPS)
    return tuple(text for key in keys if key in status for text in _flatten_table(key, status[key]))


def _flatten_table(path: str, value: Any) -> Iterator[str]:
    """Yields PATH=VALUE for each value in a table, with the keys on the way to it in the path."""
    if not isinstance(value, Mapping):
        yield f"{path}={value}"
        return
    table: Mapping[str, Any] = value
    for key, inner in table.items():
        yield from _flatten_table(f"{path}/{key}", inner)


def parse_compared_steps(texts: Sequence[str]) -> dict[str, Any]:
    """Returns the tables of compared steps from the texts of `format_solver_status`."""
    tables: dict[str, Any] = {}
    for text in texts:
        path, _, seconds = text.partition("=")
        *outer, key = path.split("/")
        table = tables
        for name in outer:
            table = table.setdefault(name, {})
        if outer:
            table[key] = float(seconds)
    return tables


def parse_solver_status(texts: Sequence[str]) -> tuple[str, float, int, float]:
    """Returns (status, gap, number of evaluated plans, least step of any plan in s) from KEY=VALUE texts;
    defaults for missing ones."""
    status = DEFAULT_SOLVER_STATUS | dict(text.split("=", 1) for text in texts)
    return status["status"], float(status["gap"]), int(status["tried"]), float(status["least_step_s"])


def parse_simulated_step(texts: Sequence[str]) -> float:
    """Returns the simulated step in s from the texts of `format_solver_status`, 0 if they do not have it."""
    return float(dict(text.split("=", 1) for text in texts).get(SIMULATED_STEP, 0))


def _choice_text(section: SectionOp, key: str) -> str:
    """An attribute of a section as text, "" if it is missing, or follows from a pinned token budget."""
    if key in ("micro_batch", "most_samples") and "micro_batch_tokens" in section.attributes:
        return ""
    word = section.attributes.get(key)
    absent = 1 if key in UNWRITTEN_DEGREES and "dp" in section.attributes else ""
    absent = UNWRITTEN_WORDS.get(key, absent) if "dp" in section.attributes else absent
    return word.data if isinstance(word, StringAttr) else str(get_number(section, key) or absent)


def assignment_from_choices(problem: Problem, texts: Sequence[str]) -> Assignment | None:
    """Rebuilds the assignment with these choices, None if there is none.

    Choices do not say how many micro-batches are in flight; of several matching assignments the fastest by
    closed forms is returned. Device kinds are not part of choices either, so None where kinds are mixed.
    """
    if not texts or problem.pools:
        return None
    pins_of_plan = pins.parse_pins(texts, problem.sections)
    wanted = {
        s: {key: value for section, key, value in pins_of_plan.pinned_choices if section == s}
        for s in problem.sections
    }
    matching = [
        [i for i, c in enumerate(cs) if _matches_choices(c, wanted[s])] for s, cs in problem.sections.items()
    ]
    group = {s: s for s in problem.sections} | _groups_by_leader(
        pins_of_plan.together, list(problem.sections)
    )
    by_time: list[tuple[int, tuple[int, ...], Assignment]] = []
    for places in product(*matching):
        candidate_assignment = Assignment(dict(zip(problem.sections, places, strict=True)), group)
        try:
            by_time.append(
                (evaluate_assignment(problem, candidate_assignment).time_ns, places, candidate_assignment)
            )
        except ValueError:
            continue
    return min(by_time, key=lambda t: t[:2])[2] if by_time else None


def _groups_by_leader(pairs: Sequence[tuple[str, str]], order: list[str]) -> dict[str, str]:
    """The first section, in the problem's order, of each set of sections that share ranks; by section."""
    shared: dict[str, list[str]] = {}
    for section, leader in pairs:
        shared.setdefault(leader, [leader]).append(section)
    return {s: min(members, key=order.index) for members in shared.values() for s in members}


def _matches_choices(c: Candidate, wanted: dict[str, int | str]) -> bool:
    """Whether a candidate has the chosen values."""
    return all(getattr(c, key) == value for key, value in wanted.items())
