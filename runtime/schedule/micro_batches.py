"""Micro-batches: which samples each replica of each section processes together, and how urgent each
micro-batch is.

The *critical* section has the largest load per replica. If it takes several samples together, its samples are
first cut into *lots* of one pattern, similar in size, so that little time goes into padding. Lots, or single
samples elsewhere, go to the least loaded replica, largest first; then replicas swap lots until they are
level. Sections on the same ranks are dealt together, so that a sample stays on its rank; it weighs what it
adds to a micro-batch. The other sections cut what each replica got in the order in which the critical section
will want it: its *turns*. A micro-batch holds samples of one pattern, because one that needs no encoder can
start while the encoders fill.

The stages of a pipeline are dealt together, too, and have the same micro-batches, as urgent at each stage as
at the last one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, pairwise, repeat
from operator import mul

from secc.runtime.plan.int_columns import rows_from_columns
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.replica_routes import ranks_by_replica
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import (
    MicroBatch,
    SampleMeta,
    gathers_parameters,
    is_active,
    replica_first_ranks,
    returns_gradient,
    weight_backward_times,
)
from secc.runtime.schedule.batch_packing import (
    AssignedMicroBatches,
    SamplePositions,
    halve_large_micro_batches,
    pack_and_assign,
)
from secc.runtime.schedule.load_balance import Ranks, assign_in_rounds, assign_least_loaded

IntColumn = list[int]  # one number for each sample of the global batch


GRADIENT_OWED, NEEDS_UPSTREAM, INDEPENDENT = range(
    3
)  # waves: the backward is awaited upstream, only the forward needs upstream, nothing does
SCARCE_WORK_SHARE = 0.1  # of the critical section's work: less of a wave hardly matters
LEADING_MICRO_BATCHES = 4


@dataclass(frozen=True)
class PriorityRule:
    """What no rule decides for all batches: how many samples that are ready soon lead each replica's queue,
    and whether samples that need upstream without owing it anything go by when they are ready (or the largest
    first)."""

    lead_count: int = 0
    by_ready_time: bool = False


@dataclass(frozen=True)
class MicroBatchTable:
    """The micro-batches of a section, and a number for each in every column.

    `forward`, `backward`: ns; `weight`: the part of the backward that comes later where it is split. `kept`:
    bytes between forward and backward, none where the section's room is not bounded. `upstream`: backward ns
    that become possible upstream once this one is done. Within a `wave`, the least `urgency` goes first.
    `turn`: when the critical section wants its samples.
    """

    micro_batches: tuple[MicroBatch, ...]
    forward_ns: IntColumn
    backward_ns: IntColumn
    weight_ns: IntColumn
    saved_bytes: IntColumn
    upstream_ns: IntColumn
    priority_class: IntColumn
    urgency: IntColumn
    critical_start_ns: IntColumn


@dataclass(frozen=True)
class ReplicaAssignment:
    """The samples of each replica of each section, and the lots of the critical section's replicas."""

    samples_by_replica: dict[str, list[list[int]]]
    critical_micro_batches: list[list[SamplePositions]]


class MicroBatchComposer:
    """Deals the samples of one global batch to replicas and cuts them into micro-batches."""

    def __init__(self, plan: Plan, samples: Sequence[SampleMeta], graph: SectionGraph) -> None:
        self.plan, self.graph, self.samples, self.sample_count = plan, graph, samples, len(samples)
        self.costs = PredictedCosts(plan, samples)
        patterns = sorted({s.pattern for s in samples}, key=sorted)
        number = {pattern: k for k, pattern in enumerate(patterns)}
        self.pattern_ids: IntColumn = [number[s.pattern] for s in samples]
        self._active_by_pattern = {
            s.name: [is_active(s.when, pattern) for pattern in patterns] for s in plan.sections
        }  # by kind
        self._active_masks = {
            name: [] if all(on) else list(map(on.__getitem__, self.pattern_ids))
            for name, on in self._active_by_pattern.items()
        }
        self.active_samples = {s.name: self._find_active_samples(s) for s in plan.sections}
        self.sample_times = {s.name: self._active_sample_times(s) for s in plan.sections}
        self.sample_work = {name: list(map(int.__add__, f, b)) for name, (f, b) in self.sample_times.items()}
        self.shared_work = {s.name: self._shared_work(s) for s in plan.sections}
        self.forward_path_ns, self.upstream_backward_ns = self._longest_paths()
        self.pattern_classes = {s.name: self._classify_patterns(s) for s in plan.sections}
        self._set_priority_rule(PriorityRule())
        loads = {s.name: sum(self.shared_work[s.name]) // s.mesh.dp for s in graph.topological_order}
        busy = [s for s in graph.topological_order if 2 * loads[s.name] >= max(loads.values())]
        self.critical_section = max(busy, key=lambda s: (graph.depth[s.name], loads[s.name]))

    # -- columns
    # ------------------------------------------------------------------------------------------------------------------

    def _find_active_samples(self, section: Section) -> list[int]:
        mask = self._active_masks[section.name]
        return list(compress(range(self.sample_count), mask)) if mask else list(range(self.sample_count))

    def _active_sample_times(self, section: Section) -> tuple[IntColumn, IntColumn]:
        """(forward, backward) of every sample on its own, 0 where the section is not active."""
        forward, backward = self.costs.sample_times(section)
        return self._zero_inactive(section.name, forward), self._zero_inactive(section.name, backward)

    def _shared_work(self, section: Section) -> IntColumn:
        """What every sample adds to its section's work: less than it takes alone where it shares a
        micro-batch."""
        if section.micro_batch == 1:
            return self.sample_work[section.name]
        return self._zero_inactive(section.name, self.costs.shared_sample_times(section))

    def _zero_inactive(self, name: str, column: IntColumn) -> IntColumn:
        """The column with 0 for samples that do not pass a section."""
        mask = self._active_masks[name]
        return list(map(mul, column, mask)) if mask else column

    def _sum_columns(self, columns: Iterable[IntColumn]) -> IntColumn:
        parts = list(columns)
        if len(parts) == 1:
            return parts[0]
        return list(map(sum, zip(*parts, strict=True))) if parts else [0] * self.sample_count

    def _longest_paths(self) -> tuple[dict[str, IntColumn], dict[str, IntColumn]]:
        """For each section and sample, the longest way of forwards to it, and the longest way of backwards
        that follow its own upstream."""
        sections = {s.name: s for s in self.plan.sections}
        heads: dict[str, IntColumn] = {}
        backs: dict[str, IntColumn] = {}
        for section in self.graph.topological_order:
            into = [e for e in self.plan.edges if e.dst == section.name]
            heads[section.name] = self._max_columns(
                self._extend_path(e.src, heads[e.src], self.sample_times[e.src][0]) for e in into
            )
            owed = [sections[e.src] for e in into if returns_gradient(e, sections)]
            backs[section.name] = self._max_columns(
                self._extend_path(s.name, backs[s.name], self._awaited_backward_times(s)) for s in owed
            )
        return heads, backs

    def _awaited_backward_times(self, section: Section) -> IntColumn:
        """The backward of every sample without a second part, for which nobody waits."""
        backward = self.sample_times[section.name][1]
        return list(map(int.__sub__, backward, weight_backward_times(section, backward)))

    def _extend_path(self, name: str, way: IntColumn, own: IntColumn) -> IntColumn:
        """The way through a section, 0 for samples that do not pass it."""
        return self._zero_inactive(name, list(map(int.__add__, way, own)))

    def _max_columns(self, columns: Iterable[IntColumn]) -> IntColumn:
        parts = list(columns)
        if len(parts) == 1:
            return parts[0]
        return list(map(max, *parts)) if parts else [0] * self.sample_count

    def makespan_lower_bound(self) -> int:
        """Ns that no order can beat: the work of sections on the same ranks spread evenly, and a sample's
        longest way."""
        work: dict[Ranks, int] = defaultdict(int)
        longest = 0
        for s in self.plan.sections:
            name = s.name
            work[replica_first_ranks(s)] += sum(self.shared_work[name])
            own = map(int.__add__, self.sample_times[name][0], self._awaited_backward_times(s))
            ways = map(
                int.__add__,
                map(int.__add__, self.forward_path_ns[name], self.upstream_backward_ns[name]),
                own,
            )
            longest = max(
                longest,
                max(
                    compress(ways, self._active_masks[name]) if self._active_masks[name] else ways, default=0
                ),
            )
        return max([longest, *(-(-total // len(ranks)) for ranks, total in work.items())])

    def _classify_patterns(self, section: Section) -> list[int]:
        """The wave of each kind of sample; what the last stage of a pipeline needs and owes, the stages of it
        aside."""
        last = self.graph.pipeline_stages[section.name][-1].name
        sources = (
            self.graph.exclude_own_stages(last, names[last])
            for names in (self.graph.gradient_ancestors, self.graph.ancestors)
        )
        awaited, needed = ([self._active_by_pattern[name] for name in names] for names in sources)
        kinds = range(len(self._active_by_pattern[section.name]))
        return [
            GRADIENT_OWED
            if any(on[k] for on in awaited)
            else NEEDS_UPSTREAM
            if any(on[k] for on in needed)
            else INDEPENDENT
            for k in kinds
        ]

    def _set_priority_rule(self, style: PriorityRule) -> None:
        last = {s.name: self.graph.pipeline_stages[s.name][-1].name for s in self.plan.sections}
        urgency = {name: self._rate_urgency(name, style) for name in dict.fromkeys(last.values())}
        self._priority_rule, self.urgency = style, {name: urgency[stage] for name, stage in last.items()}

    def _rate_urgency(self, name: str, style: PriorityRule) -> IntColumn:
        """Of samples of one wave the least goes first: what owes most upstream, what upstream has ready
        soonest, or the largest."""
        size = self.sample_work[name]
        second = self.forward_path_ns[name] if style.by_ready_time else [-s for s in size]
        columns = zip(self.upstream_backward_ns[name], second, size, self.pattern_ids, strict=True)
        return [(-u, h, -s)[self.pattern_classes[name][kind]] for u, h, s, kind in columns]

    # -- dealing
    # ------------------------------------------------------------------------------------------------------------------

    @cached_property
    def assignment(self) -> ReplicaAssignment:
        """Each replica's samples: largest first, each to the least loaded. Sections of the same ranks and
        stages are dealt alike.

        Of a team that has several ranks a replica, the busiest decide.
        """
        load: dict[int, int] = defaultdict(int)
        positions: dict[str, list[list[int]]] = {}
        critical: list[list[SamplePositions]] = []
        for weights, ranks, team in sorted(
            map(self._weigh_sections, self.graph.co_scheduled_sections()),
            key=lambda x: (-sum(x[0][x[1]]) // len(x[1]), x[1]),
        ):
            _equalize_replica_load(load, team)
            if self.critical_section in team and self.critical_section.micro_batch > 1:
                critical, owner = self._assign_critical_micro_batches(ranks, weights[ranks], load)
            else:
                owner = self._assign_samples(ranks, team, weights[ranks], load)
            for others, column in weights.items():
                for p, weight in enumerate(column) if others != ranks else ():
                    load[others[owner[p]]] += weight
            _equalize_replica_load(load, team)
            for s in team:
                positions[s.name] = dealt = [[] for _ in ranks]
                for p in self.active_samples[s.name]:
                    dealt[owner[p]].append(p)
        return ReplicaAssignment(
            positions, critical or [[(p,) for p in dealt] for dealt in positions[self.critical_section.name]]
        )

    def _weigh_sections(self, team: list[Section]) -> tuple[dict[Ranks, IntColumn], Ranks, list[Section]]:
        """The work of each sample by the ranks that do it, and the busiest of these; the team."""
        weights = {
            ranks: self._sum_columns(
                self.shared_work[s.name] for s in team if replica_first_ranks(s) == ranks
            )
            for ranks in map(replica_first_ranks, team)
        }
        return weights, max(weights, key=lambda ranks: sum(weights[ranks])), team

    def _assign_samples(
        self, ranks: Ranks, sections: Sequence[Section], weights: IntColumn, load: dict[int, int]
    ) -> IntColumn:
        """The replica of each sample: first what needs upstream, so that replicas get even shares of it, then
        the rest to level them.

        Samples of equal weight are taken kind by kind, so that each replica gets its share of every kind.
        """
        last = max(sections, key=lambda s: self.graph.depth[s.name])
        some = (
            self.active_samples[sections[0].name]
            if len(sections) == 1
            else [p for p in range(self.sample_count) if self._is_active_in_any(sections, p)]
        )
        order = sorted(some, key=self.pattern_ids.__getitem__)
        order.sort(key=weights.__getitem__, reverse=True)
        order.sort(key=list(map(self.pattern_classes[last.name].__getitem__, self.pattern_ids)).__getitem__)
        owner = [0] * self.sample_count
        deal = assign_in_rounds if any(map(gathers_parameters, sections)) else assign_least_loaded
        for p, replica in zip(order, deal([weights[p] for p in order], ranks, load), strict=True):
            owner[p] = replica
        return owner

    def _is_active_in_any(self, sections: Iterable[Section], position: int) -> bool:
        return any(self._active_by_pattern[s.name][self.pattern_ids[position]] for s in sections)

    def _assign_critical_micro_batches(
        self, ranks: Ranks, weights: IntColumn, load: dict[int, int]
    ) -> tuple[list[list[SamplePositions]], IntColumn]:
        """The critical section's lots by replica, and the replica of each sample."""
        section, own, share = (
            self.critical_section,
            self.sample_work[self.critical_section.name],
            self.shared_work[self.critical_section.name],
        )
        groups: dict[int, list[int]] = defaultdict(list)
        for p in self.active_samples[section.name]:
            groups[self.pattern_ids[p]].append(p)
        others = list(map(int.__sub__, weights, share))
        dealt: list[list[SamplePositions]] = [[] for _ in ranks]
        owner = [0] * self.sample_count
        ordered = [sorted(g, key=own.__getitem__, reverse=True) for g in groups.values()]
        for lot, replica in pack_and_assign(
            self.costs, self.graph.pipeline_stages[section.name], section, ordered, others, ranks, load
        ):
            dealt[replica].append(lot)
            for p in lot:
                owner[p] = replica
        rest = [
            p
            for p in range(self.sample_count)
            if weights[p] and not self._active_by_pattern[section.name][self.pattern_ids[p]]
        ]
        rest.sort(key=weights.__getitem__, reverse=True)
        for p, replica in zip(
            rest, assign_least_loaded([weights[p] for p in rest], ranks, load), strict=True
        ):
            owner[p] = replica
        return dealt, owner

    # -- cutting
    # ------------------------------------------------------------------------------------------------------------------

    def list_priority_rules(self) -> list[PriorityRule]:
        """The styles that suit this batch, the likeliest first.

        Where hardly any of the critical section's work is free, some samples must lead the queue; where it
        needs what owes nothing, which of these comes first is open.
        """
        size, waves = (
            self.sample_work[self.critical_section.name],
            self.pattern_classes[self.critical_section.name],
        )
        work = [0, 0, 0]
        for s, kind in zip(size, self.pattern_ids, strict=True):
            work[waves[kind]] += s
        soonest = [True, False] if work[NEEDS_UPSTREAM] > SCARCE_WORK_SHARE * sum(work) else [False]
        if work[INDEPENDENT] < SCARCE_WORK_SHARE * sum(work):
            return [PriorityRule(lead, soon) for lead in (LEADING_MICRO_BATCHES, 0) for soon in soonest]
        return [PriorityRule(0, soon) for soon in soonest[::-1]]

    def compose_by_priority(self, style: PriorityRule) -> dict[str, MicroBatchTable]:
        """Micro-batches of balanced replicas, cut as the critical section wants them."""
        if style.by_ready_time != self._priority_rule.by_ready_time:
            self._set_priority_rule(style)
        turn = self.critical_start_times(self.assignment, style.lead_count)
        return self._build_tables(
            [(r, t) for r, some in enumerate(self.assignment.critical_micro_batches) for t in some], turn
        )

    def compose_by_order(
        self, queues: Sequence[Sequence[SamplePositions]], turn: IntColumn
    ) -> dict[str, MicroBatchTable]:
        """Micro-batches of which the critical section's replicas take those in their queues, each in its
        queue's order; the other sections take samples by turn."""
        tables = self._build_tables([(r, t) for r, queue in enumerate(queues) for t in queue], turn)
        for stage in self.graph.pipeline_stages[self.critical_section.name]:
            table = tables[stage.name]
            place = list(range(len(table.micro_batches)))
            tables[stage.name] = replace(table, priority_class=[0] * len(place), urgency=place)
        return tables

    def _build_tables(self, critical: AssignedMicroBatches, turn: IntColumn) -> dict[str, MicroBatchTable]:
        cuts = {self.critical_section.user_section_name: critical}
        for name, stages in self.plan.pipelines.items():
            if name not in cuts:
                cuts[name] = self._cut_micro_batches(
                    stages[-1], self.assignment.samples_by_replica[stages[-1].name], turn
                )
        found: dict[str, MicroBatchTable] = {}
        for s in self.plan.sections:
            first = found.get(self.graph.pipeline_stages[s.name][0].name)
            found[s.name] = (
                self.build_table(s, cuts[s.user_section_name], turn)
                if first is None
                else self._build_stage_table(s, first)
            )
        return found

    def _build_stage_table(self, section: Section, first: MicroBatchTable) -> MicroBatchTable:
        """The table of a later stage, whose micro-batches are as urgent as at the first one."""
        lots = [m.samples for m in first.micro_batches]
        micros = _build_micro_batches(section, [m.replica for m in first.micro_batches], lots)
        forward, backward = self.micro_batch_times(section, lots)
        kept = self.costs.saved_bytes(section, lots)
        return replace(
            first,
            micro_batches=micros,
            forward_ns=forward,
            backward_ns=backward,
            weight_ns=weight_backward_times(section, backward),
            saved_bytes=kept,
        )

    def micro_batch_times(
        self, section: Section, lots: Sequence[SamplePositions]
    ) -> tuple[IntColumn, IntColumn]:
        """(forward, backward) ns of micro-batches, which all pass the section."""
        if set(map(len, lots)) - {1}:
            return self.costs.micro_batch_times(section, lots)
        at, (forward, backward) = [p for (p,) in lots], self.sample_times[section.name]
        return list(map(forward.__getitem__, at)), list(map(backward.__getitem__, at))

    def critical_start_times(self, dealt: ReplicaAssignment, lead: int) -> IntColumn:
        """When the critical section wants each sample: how long its replica has work before it that is more
        urgent.

        What needs upstream comes first, so these times are those of a section that finds everything ready;
        before all else come `lead` samples of each replica that upstream has ready soonest.
        """
        name = self.critical_section.name
        size, urgency, waves, head = (
            self.sample_work[name],
            self.urgency[name],
            self.pattern_classes[name],
            self.forward_path_ns[name],
        )
        turn = [sum(size)] * self.sample_count
        for some in dealt.critical_micro_batches:
            queue = sorted(
                (
                    waves[self.pattern_ids[t[0]]],
                    urgency[t[0]] if len(t) == 1 else sum(map(urgency.__getitem__, t)),
                    t,
                )
                for t in some
            )
            if lead:
                first = sorted(
                    (q for q in queue if q[0] < INDEPENDENT), key=lambda q: max(map(head.__getitem__, q[2]))
                )[:lead]
                queue = first + [q for q in queue if q not in first]
            time = 0
            for _, _, lot in queue:
                for p in lot:
                    turn[p] = time
                time += size[lot[0]] if len(lot) == 1 else sum(map(size.__getitem__, lot))
        return turn

    def compose_in_dataset_order(self) -> dict[str, MicroBatchTable]:
        """Micro-batches of consecutive samples, dealt to the replicas in turn."""
        tables: dict[str, MicroBatchTable] = {}
        for s in self.plan.sections:
            positions = self.active_samples[s.name]
            chunks = [
                tuple(positions[i : i + s.micro_batch]) for i in range(0, len(positions), s.micro_batch)
            ]
            tables[s.name] = self.build_table(
                s, [(i % s.mesh.dp, chunk) for i, chunk in enumerate(chunks)], list(range(self.sample_count))
            )
        return tables

    def _cut_micro_batches(
        self, section: Section, dealt: list[list[int]], turn: IntColumn
    ) -> AssignedMicroBatches:
        """Even micro-batches of one kind each: by turn, and within a turn the largest together, which wastes
        the least padding."""
        if section.micro_batch == 1:
            return [(r, (p,)) for r, positions in enumerate(dealt) for p in positions]
        size, upstream, cut = self.sample_work[section.name], self.upstream_backward_ns[section.name], []
        for r, positions in enumerate(dealt):
            groups: dict[int, list[int]] = defaultdict(list)
            for p in sorted(positions, key=lambda p: (turn[p], -upstream[p], -size[p], p)):
                groups[self.pattern_ids[p]].append(p)
            for group in groups.values():
                count = -(-len(group) // section.micro_batch)
                bounds = [i * len(group) // count for i in range(count + 1)]
                cut += [(r, tuple(group[a:b])) for a, b in pairwise(bounds)]
        return halve_large_micro_batches(self.costs, self.graph.pipeline_stages[section.name], cut)

    def build_table(self, section: Section, cut: AssignedMicroBatches, turn: IntColumn) -> MicroBatchTable:
        """The columns of a section's micro-batches; with empty ones, where all replicas of the section must
        have equally many."""
        cut = _add_empty_micro_batches(cut, section.mesh.dp) if gathers_parameters(section) else cut
        name, waves, urgency = section.name, self.pattern_classes[section.name], self.urgency[section.name]
        owed = self.upstream_backward_ns[self.graph.pipeline_stages[name][-1].name]
        lots = [t for _, t in cut]
        alone = set(map(len, lots)) <= {1}
        sets = lots if alone else [tuple(sorted(t)) for t in lots]
        micros = _build_micro_batches(section, [r for r, _ in cut], sets)
        if alone:
            at = [p for (p,) in lots]
            columns = (
                list(map(c.__getitem__, at))
                for c in (*self.sample_times[name], owed, urgency, turn, self.pattern_ids)
            )
            forward, backward, upstream, urgencies, turns, kinds = columns
            wave = list(map(waves.__getitem__, kinds))
            kept = self.costs.saved_bytes(section, lots)
            return MicroBatchTable(
                micros,
                forward,
                backward,
                weight_backward_times(section, backward),
                kept,
                upstream,
                wave,
                urgencies,
                turns,
            )
        forward, backward = self.costs.micro_batch_times(section, lots)
        upstream, urgencies = ([sum(c[p] for p in t) for t in lots] for c in (owed, urgency))
        wave = [min((waves[self.pattern_ids[p]] for p in t), default=INDEPENDENT) for t in lots]
        turns = [min((turn[p] for p in t), default=0) for t in lots]
        kept = self.costs.saved_bytes(section, lots)
        return MicroBatchTable(
            micros,
            forward,
            backward,
            weight_backward_times(section, backward),
            kept,
            upstream,
            wave,
            urgencies,
            turns,
        )


def _build_micro_batches(
    section: Section, replica: Iterable[int], lots: Sequence[SamplePositions]
) -> tuple[MicroBatch, ...]:
    """The section's micro-batches, without a call for each of the thousands."""
    return tuple(rows_from_columns(MicroBatch, (range(len(lots)), repeat(section.name), replica, lots)))


def _add_empty_micro_batches(cut: AssignedMicroBatches, replicas: int) -> AssignedMicroBatches:
    """The cut with empty micro-batches for replicas that have fewer than others."""
    counts = Counter(r for r, _ in cut)
    most = max(counts.values(), default=0)
    return cut + [(r, ()) for r in range(replicas) for _ in range(most - counts[r])]


def _equalize_replica_load(load: dict[int, int], team: Iterable[Section]) -> None:
    """All ranks of a replica are as busy as the busiest of them."""
    for ranks in (ranks for s in team for ranks in ranks_by_replica(s) if len(ranks) > 1):
        load |= dict.fromkeys(ranks, max(load[r] for r in ranks))
