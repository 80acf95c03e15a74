"""The sections of a plan as a graph: what is upstream of what, and along which edges gradients come back."""

from __future__ import annotations

from dataclasses import dataclass, field

from secc.runtime.plan import Plan, Section
from secc.runtime.program import returns_gradient


@dataclass
class Graph:
    """The sections as a graph: producers first, and for each the sections upstream of it."""

    plan: Plan
    order: list[Section] = field(init=False)
    depth: dict[str, int] = field(init=False)
    ancestors: dict[str, set[str]] = field(init=False)  # over all edges
    creditors: dict[str, set[str]] = field(init=False)  # over edges that return a gradient: whose backward waits for this section's

    def __post_init__(self) -> None:
        sections = {s.name: s for s in self.plan.sections}
        self.ancestors = {name: set() for name in sections}
        self.creditors = {name: set() for name in sections}
        self.depth = dict.fromkeys(sections, 0)
        self.order, left = [], list(self.plan.sections)
        while left:
            unplaced = {s.name for s in left}
            ready = [s for s in left if not any(e.dst == s.name and e.src in unplaced for e in self.plan.edges)]
            if not ready:
                raise ValueError(f"the edges between sections {', '.join(sorted(unplaced))} form a cycle")
            self.order += ready
            left = [s for s in left if s not in ready]
        for section in self.order:
            for edge in self.plan.edges:
                if edge.src == section.name:
                    self._connect(edge.src, edge.dst, returns_gradient(edge, sections))

    def _connect(self, src: str, dst: str, gradient: bool) -> None:
        self.depth[dst] = max(self.depth[dst], self.depth[src] + 1)
        self.ancestors[dst] |= {src, *self.ancestors[src]}
        if gradient:
            self.creditors[dst] |= {src, *self.creditors[src]}
