"""A certified lower bound on the step of every allocation with a plan's layouts: any numbers of replicas, and
sections that share all of their ranks with some others or none.

Let a section take u ranks a replica (tp, cp and its stages together). An allocation puts the sections into
groups; a group has q ranks of its own, and each of its sections q / u replicas there. The groups have at most
N ranks together. In a step of time T:

*Replicas.* A stage with D replicas is D machines, on which its visits must be done. *Sets* and *packing* of
`secc/bounds/bounds.py` bound T from below by a function f(D), whoever else uses these ranks, as they speak of
the stage's own work. Heads and tails are those that hold in every allocation: messages may stay on a rank,
gradient sums count as nothing in them, and a section that no update changes may have worked ahead, so for it
only its work over D counts. Stages are cut alike. f falls with D, since idle machines are allowed.

*Sums.* What D replicas take at least with the sums of their gradients and the gathers of their parameters
(`secc/bounds/gradient_sums.py`), with the ranks of a sum as near each other as can be, bounds T as well.

*Even.* The ranks of a group do all its work: T is at least that over q.

*Held bytes.* What stages hold for the backward limits the size of micro-batches, and so how often time is
taken once in each (`secc/bounds/held_bytes.py`): the work of a group, and of each place in a pipeline's
replicas, is at least that of the micro-batches that this limit makes.

*Memory.* A rank of a group holds a stage of each of its sections: the weights (unless they are divided over
replicas, or in host memory), and with a backward, at some time, what its largest sample keeps. Groups in
which this exceeds the memory that tensors may take do not occur.

So for given T each group needs at least the least q, a multiple of its sections' u, that these bounds allow.
T is impossible if for every partition of the sections into allowed groups that is more than N ranks together.
The bound is the largest T that is shown to be impossible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import lcm

from secc.bounds.gradient_sums import StageWork, stage_works
from secc.bounds.held_bytes import PipelineHolds, pipeline_holds
from secc.bounds.machine_bounds import MachinePool, job_families
from secc.bounds.work import BatchWork, SampleVisit
from secc.runtime.plan.schema import Plan, Section, rank_position
from secc.runtime.plan.step_program import owes_backward

MOST_SECTIONS = 6  # with 203 partitions into groups
STEPS_OF_SEARCH = 2048  # parts of the bound to which it is found

Partition = tuple[tuple[str, ...], ...]


def allocation_bound(work: BatchWork, least: int, own_sizes: bool) -> int:
    """Ns that a step takes at least in every allocation with the plan's layouts, or `least` if that is more.

    own_sizes: micro-batches have at most as many samples as in the plan; else any number. `least` is a bound
    already. Of a plan with sections that share some of their ranks, or with many sections,
    nothing more is known.
    """
    sections = stages_of_sections(work.plan)
    if len(sections) > MOST_SECTIONS or not _is_grouped(sections):
        return least
    return _Allocations(work, sections, own_sizes).bound_step(least)


def stages_of_sections(plan: Plan) -> dict[str, list[Section]]:
    """The user's sections, each with its stages in their order."""
    found: dict[str, list[Section]] = {}
    for s in sorted(plan.sections, key=lambda s: s.stage):
        found.setdefault(s.user_section_name, []).append(s)
    return found


def _places(stages: Sequence[Section]) -> int:
    """The number of ranks' places in a replica of a pipeline."""
    return len(stages) // stages[0].chunks


def _is_grouped(sections: dict[str, list[Section]]) -> bool:
    """Whether sections share all of their ranks or none, and stages in different places none."""
    groups = set[frozenset[int]]()
    for stages in sections.values():
        places: dict[int, frozenset[int]] = {}
        for s in stages:
            place = rank_position(s.stage, _places(stages), s.placement)
            if places.setdefault(place, frozenset(s.mesh.ranks)) != frozenset(s.mesh.ranks):
                return False
        ranks = frozenset[int]().union(*places.values())
        if len(ranks) != sum(map(len, places.values())):
            return False
        groups.add(ranks)
    return len(frozenset[int]().union(*groups)) == sum(map(len, groups))


class _Allocations:
    """What sections of one global batch need, in any numbers of replicas."""

    def __init__(self, work: BatchWork, sections: dict[str, list[Section]], own_sizes: bool) -> None:
        self.work, self.sections, self.ranks = work, sections, work.plan.world_size
        self.own_sizes = own_sizes
        self.unit = {name: stages[0].mesh.replica_size * _places(stages) for name, stages in sections.items()}
        self.work_ns = {
            name: sum(sum(work.least_work(s.name, own_sizes)) * s.mesh.replica_size for s in stages)
            for name, stages in sections.items()
        }
        held = ((name, pipeline_holds(work, stages, own_sizes)) for name, stages in sections.items())
        self._holds: dict[str, PipelineHolds] = {name: holds for name, holds in held if holds is not None}
        self._replica_bounds: dict[tuple[str, int], int] = {}

    def bound_step(self, least: int) -> int:
        """The largest time that is shown to be impossible, or `least`."""
        partitions = [
            p
            for p in _partitions(tuple(self.sections))
            if sum(map(self._unit_of_group, p)) <= self.ranks and all(map(self._fits_memory, p))
        ]
        if not partitions or any(self._is_possible(p, least) for p in partitions):
            return least
        low, high = least, 2 * max(1, least)
        while not any(self._is_possible(p, high) for p in partitions):
            low, high = high, 2 * high
            if high > 1 << 62:
                return least
        while high - low > max(1, low // STEPS_OF_SEARCH):
            middle = (low + high) // 2
            possible = any(self._is_possible(p, middle) for p in partitions)
            low, high = (low, middle) if possible else (middle, high)
        return low + 1

    def _unit_of_group(self, group: Sequence[str]) -> int:
        return lcm(*(self.unit[name] for name in group))

    def _is_possible(self, partition: Partition, time: int) -> bool:
        """Whether the ranks suffice for these groups, as far as the bounds say, in a step of `time` ns."""
        left = self.ranks
        for group in partition:
            unit = self._unit_of_group(group)
            most = left // unit
            if not most or not self._suffices(group, most * unit, time):
                return False
            low, high = 0, most  # times `unit`: not enough, enough
            while high - low > 1:
                middle = (low + high) // 2
                enough = self._suffices(group, middle * unit, time)
                low, high = (low, middle) if enough else (middle, high)
            left -= high * unit
        return True

    def _suffices(self, group: Sequence[str], ranks: int, time: int) -> bool:
        """Whether a group may do its work on `ranks` ranks, as far as the bounds say."""
        total = 0
        for name in group:
            replicas, work = ranks // self.unit[name], self.work_ns[name]
            if (holds := self._holds.get(name)) is not None:
                least = holds.least_work(replicas * time)
                if least is None or least[1] > replicas * time:
                    return False
                work = max(work, least[0])
            total += work
        if total > time * ranks:
            return False
        return all(self._replica_bound(name, ranks // self.unit[name]) <= time for name in group)

    def _replica_bound(self, name: str, replicas: int) -> int:
        """f of the module's docstring."""
        key = name, replicas
        if key not in self._replica_bounds:
            if name in self._ahead:
                stages = (self._visits[s.name] for s in self.sections[name])
                found = max(-(-sum(u.forward_weight for u in own) // replicas) for own in stages)
            else:
                found = max((pool.bound_time(replicas) for pool in self._pools[name]), default=0)
                for stage, stage_work in self._stage_works[name]:
                    closing = self.work.traffic.closing_times(stage, replicas)
                    found = max(found, stage_work.bound_time(replicas, closing))
            self._replica_bounds[key] = found
        return self._replica_bounds[key]

    @cached_property
    def _ahead(self) -> set[str]:
        """The sections that may have worked ahead, all their stages."""
        ahead = self.work.sections_ahead()
        return {name for name, stages in self.sections.items() if all(s.name in ahead for s in stages)}

    @cached_property
    def _visits(self) -> dict[str, list[SampleVisit]]:
        return self.work.visits_in_any_plan(self.own_sizes)

    @cached_property
    def _stage_works(self) -> dict[str, list[tuple[Section, StageWork]]]:
        """The stages of each section that sum gradients, with their work."""
        return {
            name: stage_works(self.work, self._visits, stages, self.own_sizes)
            for name, stages in self.sections.items()
        }

    @cached_property
    def _pools(self) -> dict[str, list[MachinePool]]:
        """For each section the families of jobs of its first and last places, and of the one with most
        work."""
        found: dict[str, list[MachinePool]] = {}
        for name, stages in self.sections.items():
            count = _places(stages)
            busiest = max(stages, key=lambda s: sum(self.work.least_work(s.name, self.own_sizes)))
            for place in sorted({0, rank_position(busiest.stage, count, busiest.placement), count - 1}):
                own = (s for s in stages if rank_position(s.stage, count, s.placement) == place)
                units = [u for s in own for u in self._visits[s.name]]
                found.setdefault(name, []).extend(
                    MachinePool(jobs, self.ranks // self.unit[name])
                    for _, jobs in job_families(units)
                    if jobs
                )
        return found

    def _fits_memory(self, group: Sequence[str]) -> bool:
        """Whether a rank may hold a stage of each section of a group."""
        cluster = self.work.traffic.cluster
        if cluster is None or len(group) < 2:
            return True
        usable = max(part.device.usable_memory for part in cluster.parts_by_kind)
        weights = {name: [self.work.least_weight_bytes(s) for s in self.sections[name]] for name in group}
        if self.sections[group[0]][0].chunks > 1:
            return True
        together = sum(map(min, weights.values()))
        fullest = max(
            own - min(weights[name]) + self._largest_sample_bytes(s)
            for name in group
            for s, own in zip(self.sections[name], weights[name], strict=True)
        )
        return together + fullest <= usable

    def _largest_sample_bytes(self, section: Section) -> int:
        """Bytes that a rank keeps for the largest sample between forward and backward."""
        if not owes_backward(section) or not section.cost.saved:
            return 0
        return max(self.work.least_saved_bytes(section).values(), default=0)


def _partitions(names: tuple[str, ...]) -> Iterator[Partition]:
    """Yields all ways to put names into groups."""
    if not names:
        yield ()
        return
    first, rest = names[0], names[1:]
    for groups in _partitions(rest):
        yield ((first,), *groups)
        for i, group in enumerate(groups):
            yield (*groups[:i], (first, *group), *groups[i + 1 :])
