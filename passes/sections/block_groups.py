"""Groups of blocks on their way to sections: how blocks are connected, and which groups may be merged without
a cycle.

Blocks are the nodes. A *flow* joins the block that makes a value to the block that takes it, directly or
through glue; blocks with values that only meet in glue (the loss of teacher and student) are *met*. Both hold
over all cases, so that all cases get the same sections.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from xdsl.ir import SSAValue

from secc.errors import UserError
from secc.ir.analysis.dataflow import (
    SECTION_MODES,
    SampleStatistics,
    call_flops,
    call_mode,
    get_number,
    get_strings,
    strongest_mode,
)
from secc.ir.analysis.fusion_report import FUSED_ATTRIBUTE
from secc.ir.analysis.whole_batch import ALONE, whole_batch_of_block
from secc.ir.dialect import digraph
from secc.ir.dialect.ops import OUTSIDE_STACK_ATTRIBUTE, BlockOp, CallOp, CaseOp, GraphOp
from secc.ir.dialect.readable_names import to_identifier
from secc.ir.dialect.size_expr import Expr

_PASSES_OF_MODE = {"forward": 1, "dgrad": 2, "train": 3}  # a mode's work in forward passes
_SMALL_BLOCK_SHARE = (
    0.1  # of the largest block's parameters: what counts as having no stack where the capture does not say
)


@dataclass
class BlockLinks:
    """How blocks, by module path, are connected."""

    flows: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    met_in_glue: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    @staticmethod
    def from_cases(cases: Iterable[CaseOp]) -> BlockLinks:
        """The connections in any of the cases."""
        links = BlockLinks()
        for case in cases:
            links._add_case(case)
        return links

    def _add_case(self, case: CaseOp) -> None:
        behind: dict[
            SSAValue, frozenset[str]
        ] = {}  # the blocks that a value comes from with nothing but glue in between
        for op in case.ops:
            # A block hides what is behind it: links are between blocks with nothing but glue in between.
            sources = frozenset[str]().union(*(behind[o] for o in op.operands))
            if isinstance(op, CallOp):
                path = op.target.data
                self.flows |= {(s, path) for s in sources if s != path}
                sources = frozenset({path})
            else:
                self.met_in_glue |= set(combinations(sorted(sources), 2))
            behind |= dict.fromkeys(op.results, sources)


@dataclass(eq=False)
class BlockGroup:
    """Blocks that will share a section. `when` holds optional keys, none for always; `weight` is the share of
    the model's work."""

    blocks: list[str]
    component: str
    when: frozenset[str]
    mode: str
    weight: float
    has_stack: bool
    pinned: str = ""  # the name that the user gave it
    whole_batch: str = ""  # how it takes all samples of a step at once, "" if it works in micro-batches
    notes: list[str] = field(default_factory=list[str])  # what joined it, and why

    def absorb(self, other: BlockGroup) -> None:
        """Takes the blocks of `other`; the component is that of the heavier group."""
        if other.weight > self.weight:
            self.component = other.component
        self.blocks += other.blocks
        self.when = self.when | other.when if self.when and other.when else frozenset()
        self.mode = strongest_mode([self.mode, other.mode])
        self.weight += other.weight
        self.has_stack |= other.has_stack
        self.whole_batch = min(filter(None, (self.whole_batch, other.whole_batch)), default="")  # ALONE first
        self.pinned = self.pinned or other.pinned
        self.notes += other.notes


class BlockGrouping:
    """A partition of the blocks that stays free of cycles while groups are merged."""

    def __init__(self, groups: Iterable[BlockGroup], links: BlockLinks) -> None:
        self.groups = list(groups)
        self._links = links

    def group_flows(self) -> set[tuple[int, int]]:
        """Pairs (producer, consumer) of groups, by index into `groups`."""
        home = self._group_of_block()
        return {(home[a], home[b]) for a, b in self._links.flows if home[a] != home[b]}

    def find_neighbours(self, group: BlockGroup) -> list[BlockGroup]:
        """The groups that exchange values with `group`; if there are none, those with values that meet its
        own in glue."""
        home, me = self._group_of_block(), self.groups.index(group)
        for links in (self._links.flows, self._links.met_in_glue):
            pairs = [(home[a], home[b]) for a, b in links]
            near = {a if b == me else b for a, b in pairs if me in (a, b)} - {me}
            if near:
                return [self.groups[i] for i in sorted(near)]
        return []

    def has_producers(self, group: BlockGroup) -> bool:
        """Whether the group takes values of other groups."""
        return any(self.groups[b] is group for _, b in self.group_flows())

    def find_cycles(self) -> list[list[BlockGroup]]:
        """Sets of groups that depend on each other both ways."""
        return [
            [self.groups[i] for i in sorted(c)]
            for c in digraph.find_cycles(range(len(self.groups)), self.group_flows())
        ]

    def may_merge(self, a: BlockGroup, b: BlockGroup) -> bool:
        """Whether the groups stay free of cycles when `a` and `b` become one."""
        one, two = self.groups.index(a), self.groups.index(b)
        # Flows between the two become arcs from the merged group to itself, which are no cycles.
        merged = {(one if u == two else u, one if v == two else v) for u, v in self.group_flows()}
        return digraph.is_acyclic(range(len(self.groups)), merged)

    def merge_groups(self, keep: BlockGroup, other: BlockGroup, why: str) -> None:
        """Merges `other` into `keep`, and notes why."""
        same = other.component == keep.component
        what = ", ".join(other.blocks) if same or not other.component else other.component
        keep.notes.append(f"{what} joined {keep.component or ', '.join(keep.blocks)}: {why}")
        keep.absorb(other)
        self.groups.remove(other)

    def sort_groups(self) -> list[BlockGroup]:
        """Returns the groups with producers first; ties: conditional groups before groups that are always
        active, then groups without backward."""

        def key(i: int) -> tuple[bool, int, int]:
            group = self.groups[i]
            return not group.when, SECTION_MODES.index(group.mode), i

        return [
            self.groups[i]
            for i in digraph.topological_order(range(len(self.groups)), self.group_flows(), key)
        ]

    def adopt_idle_blocks(self, idle: Iterable[BlockOp]) -> None:
        """Adds blocks that no case calls to the group of their component, or to the largest: some section
        must hold their parameters."""
        for block in idle:
            same = [g for g in self.groups if g.component == component_of(block)]
            max(same or self.groups, key=lambda g: g.weight).blocks.append(block.path.data)

    def _group_of_block(self) -> dict[str, int]:
        return {path: i for i, group in enumerate(self.groups) for path in group.blocks}


def form_initial_groups(
    graph: GraphOp, each_block: bool, pinned: Mapping[str, str]
) -> tuple[list[BlockGroup], list[BlockOp]]:
    """Groups the blocks by the section they are pinned to, else by component, predicate and mode (or one by
    one). Returns the groups, and the blocks that no case calls."""
    calls: dict[str, list[CallOp]] = {}
    for case in graph.cases:
        for op in case.ops:
            if isinstance(op, CallOp):
                calls.setdefault(op.target.data, []).append(op)
    blocks = [b for path, b in graph.blocks.items() if path in calls]
    work = _expected_work(graph, calls)
    groups: dict[object, BlockGroup] = {}
    behind = _blocks_behind_whole(graph)
    for block in blocks:
        path, when = block.path.data, frozenset(get_strings(block, "when"))
        mode = strongest_mode([call_mode(c) for c in calls[path]])
        component = path if each_block else component_of(block)
        name = pinned.get(path, "")
        whole = whole_batch_of_block(block)
        group = BlockGroup([path], component, when, mode, work[path], _has_stack(block, blocks), name, whole)
        # Blocks of a component before and behind one that takes the whole batch alone work in micro-batches.
        known = groups.setdefault(name or (component, when, mode, whole, path in behind), group)
        if known is not group:
            known.absorb(group)
    _mark_groups_outside_stacks(graph, groups.values())
    idle = [
        b for path, b in graph.blocks.items() if path not in calls and FUSED_ATTRIBUTE not in b.attributes
    ]
    return list(groups.values()) or [BlockGroup([], "", frozenset(), "train", 0.0, False)], idle


def _mark_groups_outside_stacks(graph: GraphOp, groups: Iterable[BlockGroup]) -> None:
    """Clears `has_stack` of groups such as a frozen head, if another group that is active for the same
    samples has the layers of their component."""
    outside = {p for p, block in graph.blocks.items() if OUTSIDE_STACK_ATTRIBUTE in block.attributes}
    holders = {(g.component, g.when) for g in groups if not outside.issuperset(g.blocks)}
    for group in groups:
        group.has_stack &= not (outside.issuperset(group.blocks) and (group.component, group.when) in holders)


def _blocks_behind_whole(graph: GraphOp) -> set[str]:
    """The blocks that depend on one that takes all samples of a step on one rank."""
    found = {path for path, block in graph.blocks.items() if whole_batch_of_block(block) == ALONE}
    flows, first = BlockLinks.from_cases(graph.cases).flows if found else (), set(found)
    while more := {b for a, b in flows if a in found and b not in found}:
        found |= more
    return found - first


def split_section_pin(text: str) -> tuple[str, list[str]]:
    """Splits "name=path+path" into the name of a section and module paths. Raises UserError for any other
    form."""
    name, _, paths = text.partition("=")
    if to_identifier(name) != name or not paths:
        raise UserError(
            f"cannot read the section {text!r}",
            remedy="write name=module.path or name=module.path+other.path",
        )
    return name, paths.split("+")


def parse_section_pins(graph: GraphOp, sections: Iterable[str]) -> dict[str, str]:
    """Parses the user's sections "name=path+path" into the section of each block at or below the module
    paths.

    Raises UserError for a text that cannot be read, that matches no block or a block of another section.
    """
    chosen: dict[str, str] = {}
    for text in sections:
        name, paths = split_section_pin(text)
        for path in paths:
            inside = [b for b in graph.blocks if b == path or b.startswith(f"{path}.")]
            taken = [b for b in inside if chosen.get(b, name) != name]
            if not inside or taken:
                cause = (
                    f"{taken[0]} is in section {chosen[taken[0]]!r} already"
                    if taken
                    else f"no block at or below {path!r}"
                )
                raise UserError(f"section {name!r}: {cause}", remedy=f"blocks are {', '.join(graph.blocks)}")
            chosen |= dict.fromkeys(inside, name)
    return chosen


def component_of(block: BlockOp) -> str:
    """The component of a block, or the block's own path where none is declared."""
    return block.component.data if block.component is not None else block.path.data


def _expected_work(graph: GraphOp, calls: dict[str, list[CallOp]]) -> dict[str, float]:
    """The expected work of each block for a sample: FLOPs, or parameters where FLOPs are not known for every
    call, times its passes."""
    if any(call_flops(c) is None for found in calls.values() for c in found):
        return {
            path: graph.blocks[path].params.data
            * _PASSES_OF_MODE[strongest_mode([call_mode(c) for c in found])]
            for path, found in calls.items()
        }
    statistics = SampleStatistics(graph)
    work = dict.fromkeys(calls, 0.0)
    for path, found in calls.items():
        for call in found:
            work[path] += (
                statistics.mean_in_case(_case_of(call), _required_flops(call))
                * _PASSES_OF_MODE[call_mode(call)]
            )
    return work


def _required_flops(call: CallOp) -> Expr:
    flops = call_flops(call)
    assert flops is not None
    return flops


def _case_of(op: CallOp) -> CaseOp:
    case = op.parent_op()
    assert isinstance(case, CaseOp)
    return case


def _has_stack(block: BlockOp, blocks: Iterable[BlockOp]) -> bool:
    """Whether the block's component has a stack of layers."""
    layers = get_number(block, "layers")
    if layers is not None:
        return layers > 0
    numbered = any(part.isdecimal() for part in block.path.data.split("."))
    return numbered or block.params.data >= _SMALL_BLOCK_SHARE * max(b.params.data for b in blocks)
