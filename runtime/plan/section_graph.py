"""The sections of a plan as a graph: what is upstream of what, along which edges gradients come back, and
what is dealt alike.

A pipeline's stages are sections here as anywhere; a *team* is what must get the same samples on the same
replica: the stages of a pipeline, and sections on the same ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.step_program import owes_backward, replica_ranks, returns_gradient


@dataclass
class Graph:
    """The sections as a graph: producers first, and for each the sections upstream of it.

    `ahead` names the sections that do all their forwards first; None: those that feed sections on other
    ranks, or with a backward of their own in replicas of other widths.
    """

    plan: Plan
    ahead: frozenset[str] | None = None
    order: list[Section] = field(init=False)
    depth: dict[str, int] = field(init=False)
    ancestors: dict[str, set[str]] = field(init=False)  # over all edges
    creditors: dict[str, set[str]] = field(
        init=False
    )  # over edges that return a gradient: whose backward waits for this section's

    stages: dict[str, tuple[Section, ...]] = field(
        init=False
    )  # of the pipeline that a section is a stage of; else itself alone

    def __post_init__(self) -> None:
        self.stages = {s.name: stages for stages in self.plan.pipelines.values() for s in stages}
        sections = {s.name: s for s in self.plan.sections}
        self.ancestors = {name: set() for name in sections}
        self.creditors = {name: set() for name in sections}
        self.depth = dict.fromkeys(sections, 0)
        self.order, left = [], list(self.plan.sections)
        while left:
            unplaced = {s.name for s in left}
            ready = [
                s for s in left if not any(e.dst == s.name and e.src in unplaced for e in self.plan.edges)
            ]
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

    def outside(self, name: str, others: set[str]) -> set[str]:
        """Those of `others` that are no stages of the same pipeline."""
        return others.difference(s.name for s in self.stages[name])

    def runs_ahead(self, section: Section) -> bool:
        """Whether a section does all its forwards first: it, or its pipeline, feeds sections on other ranks.

        Or on the same ranks in replicas of other widths: whenever one rank of a wide replica does something
        alone, the others wait. Not where nothing bounds what it would hold for them, because it has no
        backward.
        """
        held = owes_backward(section)
        if self.ahead is not None:
            return section.whole in self.ahead
        fed = (s for s in self.order if section.name in self.outside(s.name, self.ancestors[s.name]))
        return any(
            (held and s.mesh.tp != section.mesh.tp) or self._ranks(s) != self._ranks(section) for s in fed
        )

    def is_owed(self, section: Section) -> bool:
        """Whether other sections, beside stages of its pipeline, return gradients to a section."""
        return any(section.name in self.outside(s.name, self.creditors[s.name]) for s in self.order)

    def _ranks(self, section: Section) -> set[int]:
        """The ranks of a section's pipeline, whose stages list them in another order than a section beside it
        does."""
        return {rank for s in self.stages[section.name] for rank in s.mesh.ranks}

    def teams(self) -> list[list[Section]]:
        """The sections that are dealt alike, in the plan's order."""
        home = {s.name: i for i, s in enumerate(self.plan.sections)}
        for a in self.plan.sections:
            for b in self.plan.sections:
                if a.whole == b.whole or replica_ranks(a) == replica_ranks(b):
                    old, new = home[b.name], home[a.name]
                    home = {name: new if team == old else team for name, team in home.items()}
        return [
            [s for s in self.plan.sections if home[s.name] == team] for team in sorted(set(home.values()))
        ]
