"""Differences between two plans as tables, to judge one before it replaces the other.

Only differences are listed. Predictions are compared with their ratio. Sections are compared as a whole: how
they are split into stages does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from secc.report.plan_tables import micro_batch_text
from secc.report.text_table import TextTable, bytes_text, ranks_text
from secc.runtime.plan.sample_predicates import describe_predicate
from secc.runtime.plan.schema import Edge, LossTerm, Plan, Section

T = TypeVar("T")
FieldReaders = Mapping[str, Callable[[T], str]]
PRESENT, ABSENT = "present", "—"


def plan_differences(a: Plan, b: Plan) -> list[TextTable]:
    """Tables of the differences from plan `a` to plan `b`; [] for equal plans."""
    tables = [
        TextTable("Plan", ("", "first", "second", "ratio"), tuple(_headline_rows(a, b))),
        _difference_table(
            "Sections", "section", _by_name(a.user_sections), _by_name(b.user_sections), SECTION_FIELDS
        ),
        _difference_table(
            "Edges", "edge", _by_name(section_edges(a)), _by_name(section_edges(b)), EDGE_FIELDS
        ),
        _difference_table(
            "Loss", "term", _by_name(_section_terms(a)), _by_name(_section_terms(b)), TERM_FIELDS
        ),
        TextTable(
            "Parameters",
            ("parameter", "first", "second"),
            tuple(_mapping_rows(a.model.parameters, b.model.parameters)),
        ),
    ]
    return [t for t in tables if t.rows]


def section_edges(plan: Plan) -> tuple[Edge, ...]:
    """The edges between sections, without those between stages of one section."""
    section_of_stage = {s.name: s.user_section_name for s in plan.sections}
    edges = (replace(e, src=section_of_stage[e.src], dst=section_of_stage[e.dst]) for e in plan.edges)
    return tuple(e for e in edges if e.src != e.dst)


def _section_terms(plan: Plan) -> tuple[LossTerm, ...]:
    """The loss terms, with sections instead of stages."""
    section_of_stage = {s.name: s.user_section_name for s in plan.sections}
    return tuple(replace(t, section=section_of_stage.get(t.section, t.section)) for t in plan.terms)


def _headline_rows(a: Plan, b: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    values = {name: (read(a), read(b)) for name, read in HEADLINE_FIELDS.items()}
    for name, (first, second) in ({"predicted step, s": comparable_steps(a, b)} | values).items():
        if first != second:
            rows.append((name, _value_text(first), _value_text(second), _ratio_text(first, second)))
    return rows


def comparable_steps(a: Plan, b: Plan) -> tuple[float | None, float | None]:
    """The predicted seconds of a step of both plans, from the best source that both have: a simulated step,
    the solver's search, or closed forms."""

    def read(plan: Plan) -> list[Any]:
        simulated = plan.prediction.get("simulated", {}).get("step_time_s")
        return [simulated, plan.solver.get("simulated_s"), plan.prediction.get("step_time_s")]

    pairs = list(zip(read(a), read(b), strict=True))
    return next((pair for pair in pairs if None not in pair), pairs[-1])


def _ratio_text(first: Any, second: Any) -> str:
    numbers = isinstance(first, int | float) and isinstance(second, int | float)
    return f"{second / first:.3f}" if numbers and first else ""


def _value_text(value: Any) -> str:
    if value is None:
        return ABSENT
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _by_name(items: tuple[Any, ...]) -> dict[str, Any]:
    return {item.name: item for item in items}


def _difference_table(
    title: str, what: str, first: Mapping[str, T], second: Mapping[str, T], fields: FieldReaders[T]
) -> TextTable:
    """One row for each field that differs, and one for each item that only one plan has."""
    rows: list[tuple[str, ...]] = []
    for name in [*first, *(n for n in second if n not in first)]:
        x, y = first.get(name), second.get(name)
        if x is None or y is None:
            rows.append(
                (name, "", PRESENT if x is not None else ABSENT, PRESENT if y is not None else ABSENT)
            )
            continue
        rows += [(name, field, read(x), read(y)) for field, read in fields.items() if read(x) != read(y)]
    return TextTable(title, (what, "", "first", "second"), tuple(rows))


def _mapping_rows(first: Mapping[str, str], second: Mapping[str, str]) -> list[tuple[str, ...]]:
    names = [*first, *(n for n in second if n not in first)]
    return [(n, first.get(n, ABSENT), second.get(n, ABSENT)) for n in names if first.get(n) != second.get(n)]


HEADLINE_FIELDS: Mapping[str, Callable[[Plan], Any]] = {
    "predictions based on": lambda p: p.prediction.get("label"),
    "ranks": lambda p: p.world_size,
    "cluster": lambda p: p.cluster.get("name"),
    "global batch": lambda p: p.global_batch,
    "widths": lambda p: p.widths,
    "allocation": lambda p: p.solver.get("status"),
    "model file": lambda p: p.model.sha256[:16],
}
SECTION_FIELDS: FieldReaders[Section] = {
    "mode": lambda s: s.mode,
    "active for": lambda s: describe_predicate(s.when),
    "ranks": lambda s: ranks_text(s.mesh.ranks),
    "dp": lambda s: str(s.mesh.dp),
    "pp": lambda s: str(s.mesh.pp),
    "tp": lambda s: str(s.mesh.tp),
    "cp": lambda s: str(s.mesh.cp),
    "norms": lambda s: s.norms,
    "sums behind products": lambda s: s.overlap,
    "attention over cp": lambda s: s.row_attention,
    "cp per": lambda s: s.cp_per,
    "ranks of cp for a sample": lambda s: s.cp_degrees if s.may_deal else "",
    "ep": lambda s: str(s.mesh.ep),
    "micro-batch": micro_batch_text,
    "recompute": lambda s: s.recompute,
    "chunks on a rank": lambda s: str(s.chunks),
    "placement of chunks": lambda s: s.placement if s.chunks > 1 else "",
    "backward": lambda s: "split" if s.weight_permille else "whole",
    "sharding": lambda s: s.sharding,
    "offload": lambda s: s.offload,
    "GiB per rank": lambda s: f"{s.memory_gib:.3g}",
    "GiB of host memory per rank": lambda s: f"{s.host_gib:.3g}",
    "blocks": lambda s: ", ".join(s.blocks),
    "costs based on": lambda s: s.cost.label,
}
EDGE_FIELDS: FieldReaders[Edge] = {
    "from → to": lambda e: f"{e.src} → {e.dst}",
    "tensor": lambda e: f"{e.dtype}[{', '.join(e.dims)}]",
    "bytes per sample": lambda e: bytes_text(e.bytes_per_sample),
    "gradient": lambda e: "sent back" if e.grad else "none",
}
TERM_FIELDS: FieldReaders[LossTerm] = {"section": lambda t: t.section, "coefficient": lambda t: t.coefficient}
