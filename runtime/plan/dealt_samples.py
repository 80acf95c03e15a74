"""Deals the samples of a micro-batch to subgroups of the ranks of cp: each computes its part.

A long sample is divided over all ranks of cp. Short ones need no such exchange, and those between need fewer
ranks; parameters are whole on each of these ranks anyway. So a micro-batch of several samples is dealt where
that takes less time and fits (FlexSP, ByteScale and DCP, 2025, choose a degree for each sample). All parts of
a micro-batch have equally many neighbouring ranks, one or several, which then share the rows of its samples.
To the order of a step, a dealt micro-batch is one like any other: its time is that of its slowest part.

Parts follow from the plan and the samples' sizes alone (`PredictedCosts.deal_samples`), so every rank knows
all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from secc.runtime.plan.predicted_costs import PredictedCosts, SampleParts
from secc.runtime.plan.replica_routes import ranks_by_replica
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import MicroBatch, SampleMeta


class DealtMicroBatches:
    """The parts of the micro-batches of a step that are dealt."""

    def __init__(self, plan: Plan, samples: Sequence[SampleMeta], own_samples: int | None) -> None:
        self._dealing = {s.name: s for s in plan.sections if s.may_deal}
        self._costs = PredictedCosts(plan, samples, own_samples) if self._dealing else None
        self._parts: dict[tuple[str, tuple[int, ...]], SampleParts] = {}

    def parts(self, micro: MicroBatch) -> SampleParts:
        """Returns the samples of each subgroup of the ranks of cp, () if all ranks share the rows of every
        sample."""
        section = self._dealing.get(micro.section)
        if section is None or self._costs is None:
            return ()
        key = micro.section, micro.samples
        if key not in self._parts:
            (self._parts[key],) = self._costs.deal_samples(section, [micro.samples])
        return self._parts[key]

    def own_part(self, micro: MicroBatch, rank: int) -> MicroBatch:
        """Returns what `rank` computes of a micro-batch of its replica, or its stage of a pipeline: the
        micro-batch itself if it is not dealt, else one of the samples of the rank's subgroup, which may be
        none."""
        if not (parts := self.parts(micro)):
            return micro
        section = self._dealing[micro.section]
        name = section.user_section_name
        stages = [section, *(s for s in self._dealing.values() if s.user_section_name == name)]
        replicas = [ranks_by_replica(s)[micro.replica] for s in stages]
        place = next(ranks.index(rank) for ranks in replicas if rank in ranks) // section.mesh.tp
        return micro._replace(samples=parts[place * len(parts) // section.mesh.cp])

    def subgroup_size(self, micro: MicroBatch) -> int:
        """Returns how many ranks of cp share the rows of a dealt micro-batch's samples."""
        return self._dealing[micro.section].mesh.cp // len(self.parts(micro))
