"""`coarsen`: groups blocks into sections, the units of allocation.

Blocks of one component, one activation predicate and one mode form a group. A group without a stack of layers
(a projector, a head, an embedding) joins the neighbour of equal predicate and mode; a frozen head behind
adapters joins the section that trains them. A group with less than the share `min-share` of the work (ten
times that share if it has no stack and takes values of other groups) joins the neighbour that loses least by
it. `max-sections` merges further. No merge may close a cycle of sections. The user can name sections by
module paths: `sections="vision=model.vision_tower+model.projector"`. Glue then goes to the section of its
latest producer (`secc.passes.sections.assign_ops`).

Whether a small group with a stack is worth ranks of its own is a question of step time, which this pass
cannot answer: `secc.driver.section_variants` allocates both variants and hands the answer in as
`small-stacks`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.passes import ModulePass

from secc.cluster import parse_cluster
from secc.errors import UserError
from secc.ir.analysis.dataflow import get_string
from secc.ir.analysis.row_order import insert_unstacking
from secc.ir.analysis.whole_batch import ALONE
from secc.ir.dialect.ops import (
    WHOLE_ATTRIBUTE,
    CaseOp,
    GraphOp,
    SectionOp,
    graph_of,
    strings_attr,
    strings_of,
)
from secc.ir.dialect.readable_names import make_unique, shortest_tail, to_identifier
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

_GROUPINGS = ("component", "block")
BY_SHARE, MERGE, KEEP = "share", "merge", "keep"  # what becomes of small groups with a stack
# Times `min-share`: a projector or head that takes values of other groups is seldom worth ranks of its own.
_DEPENDENT_SHARE_FACTOR = 10
_COMPARED_SHARE = 0.02  # of the work: a group with more is a section without a comparison
_NEGLIGIBLE_SHARE = 1e-6  # of the work: a group with less is merged without a comparison


@dataclass(frozen=True)
class _StackThresholds:
    """Shares of the work that decide about groups with a stack of layers.

    limit: a group below it is merged. compared_below: a group below it (and not negligible) was in the
    comparison of step times; `outcome` words the result of that comparison for the section's notes.
    """

    limit: float
    compared_below: float = 0.0
    outcome: str = ""


@dataclass(frozen=True)
class Coarsen(ModulePass):
    """Groups blocks into sections.

    by: "component", or "block" for a section per block. min_share: share of the model's work below which a
    group is merged. sections: sections that the user named, "NAME=PATH+PATH". small_stacks: "share" judges
    groups with a stack by `min_share` too; "merge" and "keep" merge or keep groups with a stack that are
    small for `cluster`, after a comparison of the step times `step_ns` (chosen variant, other variant; empty
    if only one of them fits), found by closed forms or, if `simulated`, by simulated steps.
    """

    name = "coarsen"
    max_sections: int | None = None
    by: str = "component"
    min_share: float = 0.005
    sections: tuple[str, ...] = ()
    cluster: str = ""
    small_stacks: str = BY_SHARE
    step_ns: tuple[int, ...] = ()
    simulated: bool = False

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        self._check_options()
        DeadCodeElimination().apply(ctx, op)  # dead glue would tie sections together
        graph = graph_of(op)
        _declare_sections(graph, self._group_blocks(graph))
        insert_unstacking(graph)
        assign_sections(graph)

    def partition_blocks(self, ctx: Context, op: ModuleOp) -> frozenset[frozenset[str]]:
        """Returns the sets of block paths that would become sections; `op` is not changed."""
        clone = op.clone()
        DeadCodeElimination().apply(ctx, clone)
        return frozenset(frozenset(group.blocks) for group in self._group_blocks(graph_of(clone)).groups)

    def _check_options(self) -> None:
        choices = (BY_SHARE, MERGE, KEEP)
        for option, value, known in (
            ("by", self.by, _GROUPINGS),
            ("small-stacks", self.small_stacks, choices),
        ):
            if value not in known:
                raise UserError(
                    f"coarsen: unknown value {value!r} for {option}=",
                    remedy=f"{option}= is one of {', '.join(known)}",
                )
        if self.small_stacks != BY_SHARE and not self.cluster:
            raise UserError(
                f"coarsen: small-stacks={self.small_stacks} needs a cluster to tell which groups are small",
                remedy="give cluster=",
            )
        if self.max_sections is not None and self.max_sections < 1:
            raise UserError(
                f"coarsen: expected max-sections= of 1 or more, got {self.max_sections}",
                remedy="max-sections= is 1 or more",
            )

    def _group_blocks(self, graph: GraphOp) -> BlockGrouping:
        groups, idle = form_initial_groups(
            graph, self.by == "block", parse_section_pins(graph, self.sections)
        )
        grouping = BlockGrouping(groups, BlockLinks.from_cases(graph.cases))
        _merge_cycles(grouping)
        if self.by == "component":
            _merge_stackless(grouping)
            _merge_small(grouping, self.min_share, self._stack_thresholds())
        if self.max_sections is not None:
            _merge_to_limit(grouping, self.max_sections)
        grouping.adopt_idle_blocks(idle)
        return grouping

    def _stack_thresholds(self) -> _StackThresholds:
        if self.small_stacks == BY_SHARE:
            return _StackThresholds(self.min_share)
        # A section with a rank's share of the work can fill a rank: only smaller ones are in question.
        compared_below = max(self.min_share, min(_COMPARED_SHARE, 1 / parse_cluster(self.cluster).ranks))
        limit = compared_below if self.small_stacks == MERGE else _NEGLIGIBLE_SHARE
        return _StackThresholds(limit, compared_below, self._format_outcome())

    def _format_outcome(self) -> str:
        if not self.step_ns:
            return ""
        chosen, other = (ns / 10**9 for ns in self.step_ns)
        how = "as simulated" if self.simulated else "by closed forms"
        rejected = "as a section of its own" if self.small_stacks == MERGE else "in another section"
        return f"a step of {chosen:.4g} s {how}, {other:.4g} s {rejected}"


def _merge_cycles(grouping: BlockGrouping) -> None:
    """Merges groups that depend on each other both ways: data has to flow one way between sections."""
    for first, *others in grouping.find_cycles():
        for other in others:
            _refuse_pinned(first, other)
            grouping.merge_groups(first, other, "each needs values of the other")


def _refuse_pinned(a: BlockGroup, b: BlockGroup) -> None:
    pinned = a.pinned or b.pinned
    if pinned:
        outside = ", ".join((a if b.pinned else b).blocks)
        raise UserError(
            f"section {pinned!r} would depend on blocks outside of it that depend on it: {outside}",
            remedy="name sections such that data flows one way between them",
        )


def _merge_stackless(grouping: BlockGrouping) -> None:
    """Merges each group without a stack of layers into a neighbour of equal predicate and mode; a frozen one
    that only passes gradients on may also join a neighbour that trains."""
    for group in [g for g in grouping.groups if not g.has_stack and not g.pinned]:
        if group not in grouping.groups:
            continue
        modes = {group.mode, "train"} if group.mode == "dgrad" else {group.mode}
        candidates = [
            n
            for n in grouping.find_neighbours(group)
            if n.when == group.when and n.mode in modes and not n.pinned and not _enlarges_batch(n, group)
        ]
        _merge_into_best(
            grouping,
            group,
            candidates,
            f"it has no stack of layers, {_format_share(grouping, group)} of the work",
        )


def _merge_small(grouping: BlockGrouping, min_share: float, stacks: _StackThresholds) -> None:
    """Merges groups below their share of the work, the smallest first, each with the neighbour that loses
    least by it. Groups with a stack have the share `stacks.limit`."""
    total = sum(g.weight for g in grouping.groups)
    for group in sorted((g for g in grouping.groups if not g.pinned), key=lambda g: g.weight):
        if group not in grouping.groups:
            continue
        dependent = grouping.has_producers(group)
        stackless_limit = min_share * (_DEPENDENT_SHARE_FACTOR if dependent else 1)
        limit = stacks.limit if group.has_stack else stackless_limit
        was_compared = bool(stacks.outcome) and group.has_stack
        was_compared &= _NEGLIGIBLE_SHARE * total <= group.weight < stacks.compared_below * total
        share = f"{_format_share(grouping, group)} of the work"
        less = f"less than the {max(limit, min_share):.2g} that is worth ranks of its own"
        why = stacks.outcome if was_compared else less
        if group.weight < limit * total:
            near = [n for n in grouping.find_neighbours(group) if not _enlarges_batch(n, group)]
            _merge_into_best(grouping, group, near, f"{share}, {why}")
        elif was_compared:
            group.notes.append(f"{group.component} stays a section: {share}, {why}")


def _enlarges_batch(a: BlockGroup, b: BlockGroup) -> bool:
    """Whether a merge would let blocks that could work in micro-batches take all samples of a step at once:
    a stack of layers, or any blocks that would lose all replicas but one."""
    return any(
        x.whole_batch and not y.whole_batch and (y.has_stack or x.whole_batch == ALONE)
        for x, y in ((a, b), (b, a))
    )


def _merge_to_limit(grouping: BlockGrouping, sections: int) -> None:
    """Merges the smallest group that can be merged until `sections` are left. Pinned sections stay.

    Raises UserError if no two of the sections can be merged.
    """
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


def _format_share(grouping: BlockGrouping, group: BlockGroup) -> str:
    """The group's share of the model's work, to two digits."""
    total = sum(g.weight for g in grouping.groups)
    return f"{group.weight / total if total else 0:.2g}"


def _merge_into_best(
    grouping: BlockGrouping, group: BlockGroup, candidates: list[BlockGroup], why: str
) -> bool:
    """Merges `group` into the candidate that loses least by it; False if each candidate closes a cycle."""

    def loss(candidate: BlockGroup) -> tuple[bool, bool, bool, bool, bool, int, float]:
        owes_more = candidate.mode == "forward" and group.mode != "forward"
        return (
            owes_more,
            bool(candidate.whole_batch) != bool(group.whole_batch),
            candidate.mode != group.mode,
            candidate.when != group.when,
            not candidate.has_stack,
            -_common_path_length(candidate.component, group.component),
            candidate.weight,
        )

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
    """Inserts a `sec.section` for each group before the cases, producers first."""
    taken: list[str] = []
    modules = _modules_of_groups(graph, grouping.groups)
    for group in grouping.sort_groups():
        # `target.model` is not the model.
        others = {*modules.values(), *(("model",) if len(modules) > 1 else ())}
        name = group.pinned or to_identifier(shortest_tail(modules[group], others))
        if name in taken:
            name = make_unique(f"{name}_{group.mode}", taken)
        taken.append(name)
        when, blocks = (
            strings_attr(sorted(group.when)),
            strings_attr(sorted(group.blocks, key=list(graph.blocks).index)),
        )
        properties = {"sym": StringAttr(name), "mode": StringAttr(group.mode), "when": when, "blocks": blocks}
        section = SectionOp.create(properties=properties)
        whole = ((path, get_string(graph.blocks[path], WHOLE_ATTRIBUTE)) for path in strings_of(blocks))
        stages = (f"its layers cannot be stages: {path} is {reason}" for path, reason in whole if reason)
        add_section_notes(section, *group.notes, *stages)
        _insert_before_cases(graph, section)


def _modules_of_groups(graph: GraphOp, groups: Sequence[BlockGroup]) -> dict[BlockGroup, str]:
    """Returns the module that each group is named after: its component, or where several groups share that,
    the innermost module around the blocks of each. Where that is the model for several groups, or another one
    is a module called `model`, each is named after its largest block or list of blocks."""
    components = [g.component for g in groups]
    found = {
        g: (_common_module(g.blocks) if components.count(g.component) > 1 else "") or g.component
        for g in groups
    }
    if [*found.values()].count("") > 1 or any(f".{m}".endswith(".model") for m in found.values()):
        found |= {g: _largest_module(graph, g.blocks) for g, module in found.items() if not module}
    return found


def _largest_module(graph: GraphOp, blocks: Sequence[str]) -> str:
    """The block, or list of blocks, with the most parameters."""
    sizes = Counter[str]()
    for path in blocks:
        sizes[re.sub(r"(\.\d+)+$", "", path)] += graph.blocks[path].params.data
    return max(sizes, key=sizes.__getitem__)


def _common_module(blocks: Sequence[str]) -> str:
    """The innermost module that holds all blocks, "" for the whole model."""
    parts = zip(*(b.split(".") for b in blocks), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, parts))


def _insert_before_cases(graph: GraphOp, op: SectionOp) -> None:
    first = next((o for o in graph.body.block.ops if isinstance(o, CaseOp)), None)
    if first is None:
        graph.body.block.add_op(op)
    else:
        graph.body.block.insert_op_before(op, first)
