"""The sections of a plan as a graph: what is upstream of what, along which edges gradients come back, and
what is dealt alike.

A pipeline's stages are sections here as anywhere; a *team* is what must get the same samples on the same
replica: the stages of a pipeline, and sections on the same ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.step_program import owes_backward, replica_first_ranks, returns_gradient


@dataclass
class SectionGraph:
    """The sections as a graph: producers first, and for each the sections upstream of it.

    `ahead` names the sections that do all their forwards first; None: those that feed sections on other
    ranks, or with a backward of their own in replicas of other widths.
    """

    plan: Plan
    forwards_first: frozenset[str] | None = None
    topological_order: list[Section] = field(init=False)
    depth: dict[str, int] = field(init=False)
    ancestors: dict[str, set[str]] = field(init=False)  # over all edges
    gradient_ancestors: dict[str, set[str]] = field(
        init=False
    )  # over edges that return a gradient: whose backward waits for this section's

    pipeline_stages: dict[str, tuple[Section, ...]] = field(
        init=False
    )  # of the pipeline that a section is a stage of; else itself alone

    def __post_init__(self) -> None:
        self.pipeline_stages = {s.name: stages for stages in self.plan.pipelines.values() for s in stages}
        sections = {s.name: s for s in self.plan.sections}
        self.ancestors = {name: set() for name in sections}
        self.gradient_ancestors = {name: set() for name in sections}
        self.depth = dict.fromkeys(sections, 0)
        self.topological_order, left = [], list(self.plan.sections)
        while left:
            unplaced = {s.name for s in left}
            ready = [
                s for s in left if not any(e.dst == s.name and e.src in unplaced for e in self.plan.edges)
            ]
            if not ready:
                raise ValueError(f"the edges between sections {', '.join(sorted(unplaced))} form a cycle")
            self.topological_order += ready
            left = [s for s in left if s not in ready]
        for section in self.topological_order:
            for edge in self.plan.edges:
                if edge.src == section.name:
                    self._add_edge(edge.src, edge.dst, returns_gradient(edge, sections))

    def _add_edge(self, src: str, dst: str, gradient: bool) -> None:
        self.depth[dst] = max(self.depth[dst], self.depth[src] + 1)
        self.ancestors[dst] |= {src, *self.ancestors[src]}
        if gradient:
            self.gradient_ancestors[dst] |= {src, *self.gradient_ancestors[src]}

    def exclude_own_stages(self, name: str, others: set[str]) -> set[str]:
        """Those of `others` that are no stages of the same pipeline."""
        return others.difference(s.name for s in self.pipeline_stages[name])

    def runs_forwards_first(self, section: Section) -> bool:
        """Whether a section does all its forwards first: it, or its pipeline, feeds sections on other ranks.

        Or on the same ranks in replicas of other widths: whenever one rank of a wide replica does something
        alone, the others wait. Not where nothing bounds what it would hold for them, because it has no
        backward.
        """
        held = owes_backward(section)
        if self.forwards_first is not None:
            return section.user_section_name in self.forwards_first
        fed = (
            s
            for s in self.topological_order
            if section.name in self.exclude_own_stages(s.name, self.ancestors[s.name])
        )
        return any(
            (held and s.mesh.tp != section.mesh.tp)
            or self._pipeline_ranks(s) != self._pipeline_ranks(section)
            for s in fed
        )

    def receives_gradients(self, section: Section) -> bool:
        """Whether other sections, beside stages of its pipeline, return gradients to a section."""
        return any(
            section.name in self.exclude_own_stages(s.name, self.gradient_ancestors[s.name])
            for s in self.topological_order
        )

    def _pipeline_ranks(self, section: Section) -> set[int]:
        """The ranks of a section's pipeline, whose stages list them in another order than a section beside it
        does."""
        return {rank for s in self.pipeline_stages[section.name] for rank in s.mesh.ranks}

    def co_scheduled_sections(self) -> list[list[Section]]:
        """The sections that are dealt alike, in the plan's order."""
        home = {s.name: i for i, s in enumerate(self.plan.sections)}
        for a in self.plan.sections:
            for b in self.plan.sections:
                if a.user_section_name == b.user_section_name or replica_first_ranks(
                    a
                ) == replica_first_ranks(b):
                    old, new = home[b.name], home[a.name]
                    home = {name: new if team == old else team for name, team in home.items()}
        return [
            [s for s in self.plan.sections if home[s.name] == team] for team in sorted(set(home.values()))
        ]
