"""The sections of a plan as a graph: ancestors, the edges that return gradients, and which sections must be
scheduled together.

Pipeline stages are sections like any other. *Co-scheduled* sections get the same samples on the same replica:
the stages of a pipeline, and sections on the same ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.step_program import owes_backward, replica_first_ranks, returns_gradient


@dataclass
class SectionGraph:
    """The graph of a plan's sections. All dicts are by section name.

    `forwards_first` names the user's sections that run all forwards before their first backward; None derives
    them: sections that feed sections on other ranks, and sections with a backward that feed replicas of
    another tp size. `topological_order` has producers first, and `depth` is the longest distance from a
    source. `gradient_ancestors` are the ancestors over edges that return a gradient: their backwards wait for
    this section's. `pipeline_stages` are all stages of the section's pipeline, or the section alone.
    """

    plan: Plan
    forwards_first: frozenset[str] | None = None
    topological_order: list[Section] = field(init=False)
    depth: dict[str, int] = field(init=False)
    ancestors: dict[str, set[str]] = field(init=False)
    gradient_ancestors: dict[str, set[str]] = field(init=False)
    pipeline_stages: dict[str, tuple[Section, ...]] = field(init=False)

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
        """Returns `others` without the stages of section `name`'s own pipeline."""
        return others.difference(s.name for s in self.pipeline_stages[name])

    def runs_forwards_first(self, section: Section) -> bool:
        """Returns whether a section runs all its forwards before its first backward.

        It does if it, or its pipeline, feeds sections on other ranks, which otherwise wait for its outputs.
        It also does if it feeds replicas of another tp size on the same ranks: whenever one rank of a wide
        replica computes alone, the replica's other ranks wait. The second rule does not hold without a
        backward, because then nothing bounds the number of outputs that the section would hold.
        """
        has_backward = owes_backward(section)
        if self.forwards_first is not None:
            return section.user_section_name in self.forwards_first
        consumers = (
            s
            for s in self.topological_order
            if section.name in self.exclude_own_stages(s.name, self.ancestors[s.name])
        )
        return any(
            (has_backward and s.mesh.replica_size != section.mesh.replica_size)
            or self._pipeline_ranks(s) != self._pipeline_ranks(section)
            for s in consumers
        )

    def receives_gradients(self, section: Section) -> bool:
        """Returns whether sections outside its own pipeline return gradients to a section."""
        return any(
            section.name in self.exclude_own_stages(s.name, self.gradient_ancestors[s.name])
            for s in self.topological_order
        )

    def _pipeline_ranks(self, section: Section) -> set[int]:
        """Returns the ranks of a section's pipeline as a set: stages and co-located sections list them in
        different orders.
        """
        return {rank for s in self.pipeline_stages[section.name] for rank in s.mesh.ranks}

    def co_scheduled_sections(self) -> list[list[Section]]:
        """Returns the groups of sections with the same samples on the same replica, in the plan's order."""
        group_of = {s.name: i for i, s in enumerate(self.plan.sections)}
        for a in self.plan.sections:
            for b in self.plan.sections:
                if a.user_section_name == b.user_section_name or replica_first_ranks(
                    a
                ) == replica_first_ranks(b):
                    old, new = group_of[b.name], group_of[a.name]
                    group_of = {name: new if group == old else group for name, group in group_of.items()}
        return [
            [s for s in self.plan.sections if group_of[s.name] == group]
            for group in sorted(set(group_of.values()))
        ]
