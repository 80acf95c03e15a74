"""`coarsen`: blocks to sections, the units of allocation.

Blocks of one component, one activation predicate and one mode form a group. Groups without a stack of layers (a projector, a head, an
embedding) join the neighbour of equal predicate and mode, a frozen head behind adapters the section that trains them; groups whose share
of the work is below `min-share` (ten times it for one without a stack behind others) join the neighbour that loses least by it;
`max-sections` merges further. No merge may close a cycle of sections. The user can name sections by module paths:
`sections="vision=model.vision_tower+model.projector"`. Glue then goes to the section of its latest producer (`secc.ir.placement`).
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.passes import ModulePass

from secc.errors import UserError
from secc.ir.dialect import CaseOp, GraphOp, SectionOp, graph_of, texts
from secc.ir.groups import Group, Grouping, Links, initial_groups, pins
from secc.ir.merging import note
from secc.ir.naming import identifier, tail, unique
from secc.ir.order import take_apart
from secc.ir.placement import place
from secc.passes.dce import DeadCodeElimination

_BY = ("component", "block")
_BEHIND = 10  # times `min-share`: a projector or head behind other sections is seldom worth ranks of its own


@dataclass(frozen=True)
class Coarsen(ModulePass):
    """`by`: "component", or "block" for a section per block. `min_share`: of the model's work, below which a group is merged."""

    name = "coarsen"
    max_sections: int | None = None
    by: str = "component"
    min_share: float = 0.005
    sections: tuple[str, ...] = ()

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        if self.by not in _BY:
            raise UserError(f"coarsen cannot group by {self.by!r}", remedy=f"by= is one of {', '.join(_BY)}")
        if self.max_sections is not None and self.max_sections < 1:
            raise UserError("a model has at least one section", remedy="max-sections= is 1 or more")
        DeadCodeElimination().apply(ctx, op)  # dead glue would tie sections together
        graph = graph_of(op)
        _declare(graph, self._grouping(graph))
        take_apart(graph)
        place(graph)

    def _grouping(self, graph: GraphOp) -> Grouping:
        groups, idle = initial_groups(graph, self.by == "block", pins(graph, self.sections))
        grouping = Grouping(groups, Links.of(graph.cases))
        _merge_cycles(grouping)
        if self.by == "component":
            _merge_stackless(grouping)
            _merge_small(grouping, self.min_share)
        if self.max_sections is not None:
            _merge_to(grouping, self.max_sections)
        grouping.adopt(idle)
        return grouping


def _merge_cycles(grouping: Grouping) -> None:
    """Groups that depend on each other both ways become one: data has to flow one way between sections."""
    for first, *others in grouping.cycles():
        for other in others:
            _refuse_pinned(first, other)
            grouping.merge(first, other, "each needs values of the other")


def _refuse_pinned(a: Group, b: Group) -> None:
    pinned = a.pinned or b.pinned
    if pinned:
        raise UserError(
            f"section {pinned!r} would depend on blocks outside of it that depend on it: {', '.join((a if b.pinned else b).blocks)}",
            remedy="name sections such that data flows one way between them",
        )


def _merge_stackless(grouping: Grouping) -> None:
    """A group without a stack of layers joins a neighbour of equal predicate and mode, or, frozen itself, one that trains."""
    for group in [g for g in grouping.groups if not g.has_stack and not g.pinned]:
        if group not in grouping.groups:
            continue
        modes = {group.mode, "train"} if group.mode == "dgrad" else {group.mode}
        alike = [n for n in grouping.neighbours(group) if n.when == group.when and n.mode in modes and not n.pinned]
        _merge_into_best(grouping, group, alike, f"it has no stack of layers, {_share(grouping, group)} of the work")


def _merge_small(grouping: Grouping, share: float) -> None:
    """Groups below a share of the whole work join the neighbour that loses least by it, the smallest group first."""
    whole = sum(g.weight for g in grouping.groups)
    for group in sorted((g for g in grouping.groups if not g.pinned), key=lambda g: g.weight):
        if group in grouping.groups:
            factor = _BEHIND if not group.has_stack and grouping.has_producers(group) else 1
            if group.weight < factor * share * whole:
                why = f"{_share(grouping, group)} of the work, less than the {factor * share:.2g} that is worth ranks of its own"
                _merge_into_best(grouping, group, grouping.neighbours(group), why)


def _merge_to(grouping: Grouping, sections: int) -> None:
    """Merge the smallest group that can be merged until there are so many sections. Pinned sections stay."""
    while len(grouping.groups) > sections:
        free = sorted((g for g in grouping.groups if not g.pinned), key=lambda g: g.weight)
        why = f"at most {sections} sections were asked for"
        if not any(_merge_into_best(grouping, g, grouping.neighbours(g) or [n for n in grouping.groups if n is not g], why) for g in free):
            names = ", ".join(g.pinned or g.component for g in grouping.groups)
            raise UserError(f"no two of the sections {names} can be merged", remedy="raise max-sections= or name fewer sections")


def _share(grouping: Grouping, group: Group) -> str:
    """A group's part of the model's work."""
    whole = sum(g.weight for g in grouping.groups)
    return f"{group.weight / whole if whole else 0:.2g}"


def _merge_into_best(grouping: Grouping, group: Group, candidates: list[Group], why: str) -> bool:
    """Merge `group` into the candidate that loses least by it; False if there is none that closes no cycle."""

    def loss(candidate: Group) -> tuple[bool, bool, bool, bool, int, float]:
        owes_more = candidate.mode == "forward" and group.mode != "forward"
        return (
            owes_more, candidate.mode != group.mode, candidate.when != group.when, not candidate.has_stack,
            -_common(candidate.component, group.component), candidate.weight,
        )  # fmt: skip

    for candidate in sorted(candidates, key=loss):
        if grouping.may_merge(candidate, group):
            grouping.merge(candidate, group, why)
            return True
    return False


def _common(a: str, b: str) -> int:
    """The number of path parts that two modules share."""
    pairs = list(zip(a.split("."), b.split("."), strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def _declare(graph: GraphOp, grouping: Grouping) -> None:
    """Put a `sec.section` for each group before the cases, producers first."""
    taken: list[str] = []
    components = {g.component for g in grouping.groups}
    for group in grouping.order():
        name = group.pinned or identifier(tail(group.component, components))
        if name in taken:
            name = unique(f"{name}_{group.mode}", taken)
        taken.append(name)
        when, blocks = texts(sorted(group.when)), texts(sorted(group.blocks, key=list(graph.blocks).index))
        properties = {"sym": StringAttr(name), "mode": StringAttr(group.mode), "when": when, "blocks": blocks}
        section = SectionOp.create(properties=properties)
        note(section, *group.notes)
        _before_cases(graph, section)


def _before_cases(graph: GraphOp, op: SectionOp) -> None:
    first = next((o for o in graph.body.block.ops if isinstance(o, CaseOp)), None)
    if first is None:
        graph.body.block.add_op(op)
    else:
        graph.body.block.insert_op_before(op, first)
