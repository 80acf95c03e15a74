"""Groups of blocks on their way to sections: how blocks are connected, and which groups may be merged without
a cycle.

Blocks are the nodes. A *flow* joins the block that makes a value to the block that takes it, directly or
through glue; blocks whose values only meet in glue (the loss of teacher and student) are *met*. Both hold
over all cases, so that all cases get the same sections.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from xdsl.ir import SSAValue

from secc.errors import UserError
from secc.ir.analysis.dataflow import MODES, Statistics, flops_of, mode_of, number_of, strongest, texts_of
from secc.ir.analysis.fusion_report import FUSED
from secc.ir.dialect import digraph
from secc.ir.dialect.ops import BlockOp, CallOp, CaseOp, GraphOp
from secc.ir.dialect.readable_names import identifier
from secc.ir.dialect.size_expr import Expr

_WORK = {"forward": 1, "dgrad": 2, "train": 3}  # a mode's work in forward passes
_SMALL = (
    0.1  # of the largest block's parameters: what counts as having no stack where the capture does not say
)


@dataclass
class Links:
    """How blocks, by module path, are connected."""

    flows: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    met: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    @staticmethod
    def of(cases: Iterable[CaseOp]) -> Links:
        """The connections in any of the cases."""
        links = Links()
        for case in cases:
            links._add(case)
        return links

    def _add(self, case: CaseOp) -> None:
        behind: dict[
            SSAValue, frozenset[str]
        ] = {}  # the blocks that a value comes from with nothing but glue in between
        for op in case.ops:
            sources = frozenset[str]().union(*(behind[o] for o in op.operands))
            if isinstance(op, CallOp):
                path = op.target.data
                self.flows |= {(s, path) for s in sources if s != path}
                sources = frozenset({path})
            else:
                self.met |= set(combinations(sorted(sources), 2))
            behind |= dict.fromkeys(op.results, sources)


@dataclass(eq=False)
class Group:
    """Blocks that will share a section. `when` holds optional keys, none for always; `weight` is the share of
    the model's work."""

    blocks: list[str]
    component: str
    when: frozenset[str]
    mode: str
    weight: float
    has_stack: bool
    pinned: str = ""  # the name that the user gave it
    notes: list[str] = field(default_factory=list[str])  # what joined it, and why

    def absorb(self, other: Group) -> None:
        """Take the blocks of `other`; the heavier of the two gives the component."""
        if other.weight > self.weight:
            self.component = other.component
        self.blocks += other.blocks
        self.when = self.when | other.when if self.when and other.when else frozenset()
        self.mode = strongest([self.mode, other.mode])
        self.weight += other.weight
        self.has_stack |= other.has_stack
        self.pinned = self.pinned or other.pinned
        self.notes += other.notes


class Grouping:
    """A partition of the blocks that stays free of cycles while groups are merged."""

    def __init__(self, groups: Iterable[Group], links: Links) -> None:
        self.groups = list(groups)
        self._links = links

    def flows(self) -> set[tuple[int, int]]:
        """Pairs (producer, consumer) of groups, by index into `groups`."""
        home = self._home()
        return {(home[a], home[b]) for a, b in self._links.flows if home[a] != home[b]}

    def neighbours(self, group: Group) -> list[Group]:
        """The groups that `group` exchanges values with; if there are none, those whose values meet its own
        in glue."""
        home, me = self._home(), self.groups.index(group)
        for links in (self._links.flows, self._links.met):
            pairs = [(home[a], home[b]) for a, b in links]
            near = {a if b == me else b for a, b in pairs if me in (a, b)} - {me}
            if near:
                return [self.groups[i] for i in sorted(near)]
        return []

    def has_producers(self, group: Group) -> bool:
        """Whether the group takes values of other groups."""
        return any(self.groups[b] is group for _, b in self.flows())

    def cycles(self) -> list[list[Group]]:
        """Groups that depend on each other both ways."""
        return [
            [self.groups[i] for i in sorted(c)] for c in digraph.cycles(range(len(self.groups)), self.flows())
        ]

    def may_merge(self, a: Group, b: Group) -> bool:
        """Whether the groups stay free of cycles when `a` and `b` become one."""
        one, two = self.groups.index(a), self.groups.index(b)
        merged = {(one if u == two else u, one if v == two else v) for u, v in self.flows()}
        return digraph.acyclic(range(len(self.groups)), merged)

    def merge(self, keep: Group, other: Group, why: str) -> None:
        """Make `other` a part of `keep`, and note why."""
        keep.notes.append(f"{other.component} joined {keep.component}: {why}")
        keep.absorb(other)
        self.groups.remove(other)

    def order(self) -> list[Group]:
        """Producers first; among free choices conditional groups before those that are always active, and
        those without backward first."""

        def key(i: int) -> tuple[bool, int, int]:
            group = self.groups[i]
            return not group.when, MODES.index(group.mode), i

        return [self.groups[i] for i in digraph.order(range(len(self.groups)), self.flows(), key)]

    def adopt(self, idle: Iterable[BlockOp]) -> None:
        """Give blocks that no case calls to the group of their component, or to the largest: their parameters
        need a home."""
        for block in idle:
            same = [g for g in self.groups if g.component == component_of(block)]
            max(same or self.groups, key=lambda g: g.weight).blocks.append(block.path.data)

    def _home(self) -> dict[str, int]:
        return {path: i for i, group in enumerate(self.groups) for path in group.blocks}


def initial_groups(
    graph: GraphOp, each_block: bool, pinned: Mapping[str, str]
) -> tuple[list[Group], list[BlockOp]]:
    """The blocks by the section they are pinned to, else by component, predicate and mode (or one by one);
    and those that no case calls."""
    calls: dict[str, list[CallOp]] = {}
    for case in graph.cases:
        for op in case.ops:
            if isinstance(op, CallOp):
                calls.setdefault(op.target.data, []).append(op)
    blocks = [b for path, b in graph.blocks.items() if path in calls]
    work = _work(graph, calls)
    groups: dict[object, Group] = {}
    for block in blocks:
        path, when = block.path.data, frozenset(texts_of(block, "when"))
        mode = strongest([mode_of(c) for c in calls[path]])
        component = path if each_block else component_of(block)
        name = pinned.get(path, "")
        group = Group([path], component, when, mode, work[path], _has_stack(block, blocks), name)
        known = groups.setdefault(name or (component, when, mode), group)
        if known is not group:
            known.absorb(group)
    idle = [b for path, b in graph.blocks.items() if path not in calls and FUSED not in b.attributes]
    return list(groups.values()) or [Group([], "", frozenset(), "train", 0.0, False)], idle


def pins(graph: GraphOp, sections: Iterable[str]) -> dict[str, str]:
    """The user's choices "name=path+path", as the section's name for each block at or below the module paths.

    Raises UserError for a choice that cannot be read, that finds no block or that takes another's.
    """
    chosen: dict[str, str] = {}
    for text in sections:
        name, _, paths = text.partition("=")
        if identifier(name) != name or not paths:
            raise UserError(
                f"cannot read the section {text!r}",
                remedy="write name=module.path or name=module.path+other.path",
            )
        for path in paths.split("+"):
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
    """The component of a block; a block is its own where none is declared."""
    return block.component.data if block.component is not None else block.path.data


def _work(graph: GraphOp, calls: dict[str, list[CallOp]]) -> dict[str, float]:
    """The expected work of each block for a sample: FLOPs, or parameters where FLOPs are not known for every
    call, times its passes."""
    if any(flops_of(c) is None for found in calls.values() for c in found):
        return {
            path: graph.blocks[path].params.data * _WORK[strongest([mode_of(c) for c in found])]
            for path, found in calls.items()
        }
    statistics = Statistics(graph)
    work = dict.fromkeys(calls, 0.0)
    for path, found in calls.items():
        for call in found:
            work[path] += statistics.mean_in(_case(call), _flops(call)) * _WORK[mode_of(call)]
    return work


def _flops(call: CallOp) -> Expr:
    flops = flops_of(call)
    assert flops is not None
    return flops


def _case(op: CallOp) -> CaseOp:
    case = op.parent_op()
    assert isinstance(case, CaseOp)
    return case


def _has_stack(block: BlockOp, blocks: Iterable[BlockOp]) -> bool:
    """Whether the block's component has a stack of layers."""
    layers = number_of(block, "layers")
    if layers is not None:
        return layers > 0
    numbered = any(part.isdecimal() for part in block.path.data.split("."))
    return numbered or block.params.data >= _SMALL * max(b.params.data for b in blocks)
