"""`coarsen`: blocks to sections, the units of allocation.

Blocks of one component, one activation predicate and one mode form a group. Groups without a stack of layers
(a projector, a head, an embedding) join the neighbour of equal predicate and mode, a frozen head behind
adapters the section that trains them; groups whose share of the work is below `min-share` (ten times it for
one without a stack behind others) join the neighbour that loses least by it. Where a cluster is given, small
groups with a stack are not judged by their share: the sections are formed with and without them and both are
allocated; they stay sections if the step of the better plan is shorter for it, by more than a margin.
`max-sections` merges further. No merge may close a cycle of sections. The user can name sections by module
paths: `sections="vision=model.vision_tower+model.projector"`. Glue then goes to the section of its latest
producer (`secc.passes.sections.assign_ops`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.passes import ModulePass

from secc.cluster import parse_cluster
from secc.errors import UserError
from secc.ir.analysis.row_order import insert_unstacking
from secc.ir.dialect.ops import CaseOp, GraphOp, SectionOp, graph_of, strings_attr
from secc.ir.dialect.readable_names import make_unique, shortest_tail, to_identifier
from secc.passes.allocate import Allocate, SolvedAllocation
from secc.passes.dce import DeadCodeElimination
from secc.passes.sections.assign_ops import assign_sections
from secc.passes.sections.block_groups import (
    BlockGroup,
    BlockGrouping,
    BlockLinks,
    form_initial_groups,
    parse_section_pins,
)
from secc.passes.sections.merge_sections import add_section_notes
from secc.passes.sink_boundaries import SinkBoundaries

_GROUPINGS = ("component", "block")
_DEPENDENT_SHARE_FACTOR = (
    10  # times `min-share`: a projector or head behind other sections is seldom worth ranks of its own
)
_COMPARED_SHARE = 0.02  # of the work: what is above is worth ranks of its own, or shares them
_NEGLIGIBLE_SHARE = 1e-6  # of the work: what is below does nothing that ranks could be for
_CLOSED_FORM_DECIDES = 1 / 8  # plans that closed forms put further apart are not tried
_SEPARATION_GAIN = 1 / 128  # a section more must make the step shorter by this share


@dataclass(frozen=True)
class _StackThresholds:
    """What becomes of small groups with a stack: those below the share `limit` of the work join others. Those
    below `weighed` were weighed, with the outcome that is `told`."""

    limit: float
    compared_below: float = 0.0
    outcome: str = ""


@dataclass(frozen=True)
class Coarsen(ModulePass):
    """`by`: "component", or "block" for a section per block. `min_share`: of the model's work, below which a
    group is merged. `cluster` and `global_batch`: what small groups with a stack are weighed for, as
    `allocate` takes them; "" where `min_share` decides."""

    name = "coarsen"
    max_sections: int | None = None
    by: str = "component"
    min_share: float = 0.005
    sections: tuple[str, ...] = ()
    cluster: str = ""
    global_batch: int = 0

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        if self.by not in _GROUPINGS:
            raise UserError(
                f"coarsen cannot group by {self.by!r}", remedy=f"by= is one of {', '.join(_GROUPINGS)}"
            )
        if self.max_sections is not None and self.max_sections < 1:
            raise UserError("a model has at least one section", remedy="max-sections= is 1 or more")
        DeadCodeElimination().apply(ctx, op)  # dead glue would tie sections together
        weighed = self._compare_thresholds(ctx, op) if self.cluster and self.by == "component" else None
        self._form_sections(graph_of(op), weighed or _StackThresholds(self.min_share))

    def _form_sections(self, graph: GraphOp, stacks: _StackThresholds) -> None:
        _declare_sections(graph, self._group_blocks(graph, stacks))
        insert_unstacking(graph)
        assign_sections(graph)

    def _group_blocks(self, graph: GraphOp, stacks: _StackThresholds) -> BlockGrouping:
        groups, idle = form_initial_groups(
            graph, self.by == "block", parse_section_pins(graph, self.sections)
        )
        grouping = BlockGrouping(groups, BlockLinks.from_cases(graph.cases))
        _merge_cycles(grouping)
        if self.by == "component":
            _merge_stackless(grouping)
            _merge_small(grouping, self.min_share, stacks)
        if self.max_sections is not None:
            _merge_to_limit(grouping, self.max_sections)
        grouping.adopt_idle_blocks(idle)
        return grouping

    # -- small groups with a stack
    # ------------------------------------------------------------------------------------------------

    def _compare_thresholds(self, ctx: Context, op: ModuleOp) -> _StackThresholds | None:
        """Whether small groups join others, with the steps that say so; None where there is nothing to
        weigh."""
        most = max(self.min_share, min(_COMPARED_SHARE, 1 / parse_cluster(self.cluster).ranks))
        joined, apart = _StackThresholds(most, most), _StackThresholds(_NEGLIGIBLE_SHARE, most)
        if len({_partition_of(self._group_blocks(graph_of(op), way)) for way in (joined, apart)}) == 1:
            return None
        steps, how = self._step_times(ctx, op, joined, apart)
        if inf in steps:
            return None if steps == (inf, inf) else joined if steps[1] == inf else apart
        told = "a step of {:.4g} s {}, {:.4g} s {}"
        if steps[1] * (1 + _SEPARATION_GAIN) < steps[0]:
            return replace(apart, outcome=told.format(steps[1], how, steps[0], "in another section"))
        return replace(joined, outcome=told.format(steps[0], how, steps[1], "as a section of its own"))

    def _step_times(
        self, ctx: Context, op: ModuleOp, *ways: _StackThresholds
    ) -> tuple[tuple[float, ...], str]:
        """Seconds of a step for each way to form sections, infinite where nothing fits, and how they were
        found: closed forms decide where they are far apart, else the order that ranks run."""
        allocate = Allocate(cluster=self.cluster, global_batch=self.global_batch)
        solved = [self._solve_variant(ctx, op, way, allocate) for way in ways]
        closed = [inf if s is None else s.solution.time_ns / 10**9 for s in solved]
        if max(closed) > (1 + _CLOSED_FORM_DECIDES) * min(closed):
            return (*closed,), "by closed forms"
        tried = [allocate.refine_solution(s).evaluation for s in solved if s is not None]
        return tuple(t.time_ns / 10**9 if t.fits else inf for t in tried) or (inf, inf), "as simulated"

    def _solve_variant(
        self, ctx: Context, op: ModuleOp, stacks: _StackThresholds, allocate: Allocate
    ) -> SolvedAllocation | None:
        """The best plan for sections formed so, None where there is none."""
        tried = op.clone()
        try:
            self._form_sections(graph_of(tried), stacks)
            SinkBoundaries(cluster=self.cluster).apply(ctx, tried)
            return allocate.solve_closed_form(graph_of(tried))
        except UserError:
            return None


def _merge_cycles(grouping: BlockGrouping) -> None:
    """Groups that depend on each other both ways become one: data has to flow one way between sections."""
    for first, *others in grouping.find_cycles():
        for other in others:
            _refuse_pinned(first, other)
            grouping.merge_groups(first, other, "each needs values of the other")


def _refuse_pinned(a: BlockGroup, b: BlockGroup) -> None:
    pinned = a.pinned or b.pinned
    if pinned:
        raise UserError(
            f"section {pinned!r} would depend on blocks outside of it that depend on it: {', '.join((a if b.pinned else b).blocks)}",
            remedy="name sections such that data flows one way between them",
        )


def _merge_stackless(grouping: BlockGrouping) -> None:
    """A group without a stack of layers joins a neighbour of equal predicate and mode, or, frozen itself, one
    that trains."""
    for group in [g for g in grouping.groups if not g.has_stack and not g.pinned]:
        if group not in grouping.groups:
            continue
        modes = {group.mode, "train"} if group.mode == "dgrad" else {group.mode}
        alike = [
            n
            for n in grouping.find_neighbours(group)
            if n.when == group.when and n.mode in modes and not n.pinned
        ]
        _merge_into_best(
            grouping, group, alike, f"it has no stack of layers, {_format_share(grouping, group)} of the work"
        )


def _merge_small(grouping: BlockGrouping, share: float, stacks: _StackThresholds) -> None:
    """Groups below a share of the whole work join the neighbour that loses least by it, the smallest group
    first."""
    whole = sum(g.weight for g in grouping.groups)
    for group in sorted((g for g in grouping.groups if not g.pinned), key=lambda g: g.weight):
        if group not in grouping.groups:
            continue
        least = (
            stacks.limit
            if group.has_stack
            else share * (_DEPENDENT_SHARE_FACTOR if grouping.has_producers(group) else 1)
        )
        weighed = (
            stacks.outcome
            and group.has_stack
            and _NEGLIGIBLE_SHARE * whole <= group.weight < stacks.compared_below * whole
        )
        part, why = (
            f"{_format_share(grouping, group)} of the work",
            stacks.outcome
            if weighed
            else f"less than the {max(least, share):.2g} that is worth ranks of its own",
        )
        if group.weight < least * whole:
            _merge_into_best(grouping, group, grouping.find_neighbours(group), f"{part}, {why}")
        elif weighed:
            group.notes.append(f"{group.component} stays a section: {part}, {why}")


def _merge_to_limit(grouping: BlockGrouping, sections: int) -> None:
    """Merge the smallest group that can be merged until there are so many sections. Pinned sections stay."""
    while len(grouping.groups) > sections:
        free = sorted((g for g in grouping.groups if not g.pinned), key=lambda g: g.weight)
        why = f"at most {sections} sections were asked for"
        if not any(
            _merge_into_best(
                grouping, g, grouping.find_neighbours(g) or [n for n in grouping.groups if n is not g], why
            )
            for g in free
        ):
            names = ", ".join(g.pinned or g.component for g in grouping.groups)
            raise UserError(
                f"no two of the sections {names} can be merged",
                remedy="raise max-sections= or name fewer sections",
            )


def _partition_of(grouping: BlockGrouping) -> frozenset[frozenset[str]]:
    return frozenset(frozenset(g.blocks) for g in grouping.groups)


def _format_share(grouping: BlockGrouping, group: BlockGroup) -> str:
    """A group's part of the model's work."""
    whole = sum(g.weight for g in grouping.groups)
    return f"{group.weight / whole if whole else 0:.2g}"


def _merge_into_best(
    grouping: BlockGrouping, group: BlockGroup, candidates: list[BlockGroup], why: str
) -> bool:
    """Merge `group` into the candidate that loses least by it; False if there is none that closes no
    cycle."""

    def loss(candidate: BlockGroup) -> tuple[bool, bool, bool, bool, int, float]:
        owes_more = candidate.mode == "forward" and group.mode != "forward"
        return (
            owes_more, candidate.mode != group.mode, candidate.when != group.when, not candidate.has_stack,
            -_common_path_length(candidate.component, group.component), candidate.weight,
        )  # fmt: skip

    for candidate in sorted(candidates, key=loss):
        if grouping.may_merge(candidate, group):
            grouping.merge_groups(candidate, group, why)
            return True
    return False


def _common_path_length(a: str, b: str) -> int:
    """The number of path parts that two modules share."""
    pairs = list(zip(a.split("."), b.split("."), strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def _declare_sections(graph: GraphOp, grouping: BlockGrouping) -> None:
    """Put a `sec.section` for each group before the cases, producers first."""
    taken: list[str] = []
    components = {g.component for g in grouping.groups}
    for group in grouping.sort_groups():
        name = group.pinned or to_identifier(shortest_tail(group.component, components))
        if name in taken:
            name = make_unique(f"{name}_{group.mode}", taken)
        taken.append(name)
        when, blocks = (
            strings_attr(sorted(group.when)),
            strings_attr(sorted(group.blocks, key=list(graph.blocks).index)),
        )
        properties = {"sym": StringAttr(name), "mode": StringAttr(group.mode), "when": when, "blocks": blocks}
        section = SectionOp.create(properties=properties)
        add_section_notes(section, *group.notes)
        _insert_before_cases(graph, section)


def _insert_before_cases(graph: GraphOp, op: SectionOp) -> None:
    first = next((o for o in graph.body.block.ops if isinstance(o, CaseOp)), None)
    if first is None:
        graph.body.block.add_op(op)
    else:
        graph.body.block.insert_op_before(op, first)
