"""Forms micro-batches: which samples each replica of each section processes together, and how urgent each one
is.

The *critical* section has the largest load per replica. If its micro-batches hold several samples, its
samples are first packed into micro-batches of one input pattern and similar size, to waste little padding.
Micro-batches (or single samples in other sections) go to the least loaded replica, largest first; then
replicas swap micro-batches until they are balanced. Sections on the same ranks are assigned together, so that
a sample stays on its rank; its weight is the work that it adds to a micro-batch. The other sections cut each
replica's samples in the order of the *critical start times*, when the critical section wants them. A
micro-batch holds samples of one pattern, because a sample that needs no encoder can start while the encoders
fill.

The stages of a pipeline are assigned together, too. They have the same micro-batches, with the urgency of the
last stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress, pairwise, repeat
from operator import mul

from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.int_columns import rows_from_columns
from secc.runtime.plan.predicted_costs import KnownSampleValues, PredictedCosts
from secc.runtime.plan.replica_routes import ranks_by_replica
from secc.runtime.plan.sample_predicates import is_active
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import (
    MicroBatch,
    SampleMeta,
    owes_backward,
    replica_first_ranks,
    replicas_in_lockstep,
    returns_gradient,
    runs_in_lockstep,
    weight_backward_times,
)
from secc.runtime.schedule.batch_packing import (
    AssignedMicroBatches,
    SamplePositions,
    halve_large_micro_batches,
    pack_and_assign,
    pack_replicas,
)
from secc.runtime.schedule.load_balance import Ranks, assign_in_rounds, assign_least_loaded

IntColumn = list[int]  # one number for each sample of the global batch, or each micro-batch or task

# Priority classes of samples in a section: an upstream backward waits for its gradient; its forward needs
# upstream outputs, but no gradient returns; neither.
GRADIENT_OWED, NEEDS_UPSTREAM, INDEPENDENT = range(3)
SCARCE_WORK_SHARE = 0.1  # of the critical section's work; a priority class with less hardly matters
LEADING_MICRO_BATCHES = 4  # micro-batches per replica that a rule with a lead puts first


@dataclass
class KnownPackings:
    """Micro-batches of the samples of one global batch, by all that they depend on besides these samples.

    `assigned`: (samples, replica) of a section's micro-batches, and the ns of each replica's ranks after it.
    `dealt`: the micro-batches of some samples on one replica that may deal them. `sample_values`: costs of
    the samples.
    """

    assigned: dict[str, tuple[list[tuple[SamplePositions, int]], list[int]]] = field(
        default_factory=dict[str, tuple[list[tuple[SamplePositions, int]], list[int]]]
    )
    dealt: dict[tuple[str, SamplePositions], list[SamplePositions]] = field(
        default_factory=dict[tuple[str, SamplePositions], list[SamplePositions]]
    )
    sample_values: KnownSampleValues = field(default_factory=dict[tuple[str, int], list[int]])


@dataclass(frozen=True)
class PriorityRule:
    """Tunable choices in ordering a replica's samples, which no rule decides well for all batches.

    `lead_count`: how many micro-batches with early inputs start each replica's order. `by_ready_time`: order
    samples that need upstream outputs but return no gradient by ready time instead of by size.
    """

    lead_count: int = 0
    by_ready_time: bool = False


@dataclass(frozen=True)
class MicroBatchTable:
    """The micro-batches of a section; every column has one number per micro-batch.

    `weight_ns` is the W part of `backward_ns` if the backward is split, else 0. `saved_bytes` are kept from
    forward to backward; empty if the section has no byte budget. `between_bytes` are kept in addition from
    the start of a split backward to the end of its W part; empty if there are none. `whole_backwards` has
    those that are not split for lack of memory. `upstream_ns` is the upstream backward time that this
    micro-batch's backward makes possible. Lower `priority_class` goes first, and within a class lower
    `urgency`. `critical_start_ns` is when the critical section wants its samples.
    """

    micro_batches: tuple[MicroBatch, ...]
    forward_ns: IntColumn
    backward_ns: IntColumn
    weight_ns: IntColumn
    saved_bytes: IntColumn
    between_bytes: Sequence[int]
    whole_backwards: frozenset[int]
    upstream_ns: IntColumn
    priority_class: IntColumn
    urgency: IntColumn
    critical_start_ns: IntColumn


@dataclass(frozen=True)
class ReplicaAssignment:
    """Sample positions by section and replica, and the micro-batches of each of the critical section's
    replicas.
    """

    samples_by_replica: dict[str, list[list[int]]]
    critical_micro_batches: list[list[SamplePositions]]


@dataclass(frozen=True)
class EnclosingReplicas:
    """Replicas of wider sections on the same ranks: `group` numbers these sections, and `inside` has, for
    each of their replicas, the replicas that have all ranks in it."""

    group: int
    inside: Sequence[Sequence[int]]


class MicroBatchComposer:
    """Assigns the samples of one global batch to replicas and cuts them into micro-batches.

    Columns by section name, with one number per sample (0 if the section is not active for it):
    `sample_times` is (forward, backward) ns alone in a micro-batch, `sample_work` their sum, `shared_work`
    the sample's share in a full micro-batch, `forward_path_ns` the longest path of forwards before the
    section, `upstream_backward_ns` the longest path of backwards after the section's own. `pattern_ids`
    numbers the samples' patterns; `pattern_classes` gives the priority class of each pattern.

    `packings`: those of other plans for the same samples, which this one is added to.
    """

    def __init__(
        self,
        plan: Plan,
        samples: Sequence[SampleMeta],
        graph: SectionGraph,
        packings: KnownPackings | None = None,
    ) -> None:
        self.plan, self.graph, self.samples, self.sample_count = plan, graph, samples, len(samples)
        self._packings = KnownPackings() if packings is None else packings
        self.costs = PredictedCosts(plan, samples, known=self._packings.sample_values)
        patterns = sorted({s.pattern for s in samples}, key=sorted)
        pattern_id = {pattern: k for k, pattern in enumerate(patterns)}
        self.pattern_ids: IntColumn = [pattern_id[s.pattern] for s in samples]
        self._active_by_pattern = {
            s.name: [is_active(s.when, pattern) for pattern in patterns] for s in plan.sections
        }
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
        work = {s.name: sum(self.shared_work[s.name]) // s.mesh.dp for s in graph.topological_order}
        loads = {  # with the other stages of its pipeline on the same ranks
            s.name: sum(work[t.name] for t in graph.pipeline_stages[s.name] if t.mesh.ranks == s.mesh.ranks)
            for s in graph.topological_order
        }
        # Among the sections that are at least half as loaded as the busiest one, the most downstream: what it
        # does last, upstream backwards wait for.
        busy = [s for s in graph.topological_order if 2 * loads[s.name] >= max(loads.values())]
        self.critical_section = max(busy, key=lambda s: (graph.depth[s.name], loads[s.name]))

    # -- columns

    def _find_active_samples(self, section: Section) -> list[int]:
        mask = self._active_masks[section.name]
        return list(compress(range(self.sample_count), mask)) if mask else list(range(self.sample_count))

    def _active_sample_times(self, section: Section) -> tuple[IntColumn, IntColumn]:
        """Returns (forward, backward) ns of every sample alone, 0 where the section is not active."""
        forward, backward = self.costs.sample_times(section)
        return self._zero_inactive(section.name, forward), self._zero_inactive(section.name, backward)

    def _shared_work(self, section: Section) -> IntColumn:
        """Returns the work that each sample adds to a section: less than alone if it shares a micro-batch."""
        if section.most_samples == 1:
            return self.sample_work[section.name]
        return self._zero_inactive(section.name, self.costs.shared_sample_times(section))

    def _zero_inactive(self, name: str, column: IntColumn) -> IntColumn:
        """Returns the column with 0 for samples that do not activate section `name`."""
        mask = self._active_masks[name]
        return list(map(mul, column, mask)) if mask else column

    def _sum_columns(self, columns: Iterable[IntColumn]) -> IntColumn:
        parts = list(columns)
        if len(parts) == 1:
            return parts[0]
        return list(map(sum, zip(*parts, strict=True))) if parts else [0] * self.sample_count

    def _longest_paths(self) -> tuple[dict[str, IntColumn], dict[str, IntColumn]]:
        """Returns, by section and sample, the longest path of forwards before the section's own, and the
        longest path of upstream backwards after the section's own.
        """
        sections = {s.name: s for s in self.plan.sections}
        forward_paths: dict[str, IntColumn] = {}
        backward_paths: dict[str, IntColumn] = {}
        for section in self.graph.topological_order:
            incoming = [e for e in self.plan.edges if e.dst == section.name]
            forward_paths[section.name] = self._max_columns(
                self._extend_path(e.src, forward_paths[e.src], self.sample_times[e.src][0]) for e in incoming
            )
            gradient_receivers = [sections[e.src] for e in incoming if returns_gradient(e, sections)]
            backward_paths[section.name] = self._max_columns(
                self._extend_path(s.name, backward_paths[s.name], self._awaited_backward_times(s))
                for s in gradient_receivers
            )
        return forward_paths, backward_paths

    def _awaited_backward_times(self, section: Section) -> IntColumn:
        """Returns the backward time of every sample without its W part, which no other section waits for."""
        backward = self.sample_times[section.name][1]
        return list(map(int.__sub__, backward, weight_backward_times(section, backward)))

    def _extend_path(self, name: str, path: IntColumn, own_times: IntColumn) -> IntColumn:
        """Adds a section's own times to the path before it; 0 for samples that do not activate it."""
        return self._zero_inactive(name, list(map(int.__add__, path, own_times)))

    def _max_columns(self, columns: Iterable[IntColumn]) -> IntColumn:
        parts = list(columns)
        if len(parts) == 1:
            return parts[0]
        return list(map(max, *parts)) if parts else [0] * self.sample_count

    def makespan_lower_bound(self) -> int:
        """Returns ns that no order can beat: the larger of the work of co-located sections spread evenly over
        their ranks, and the longest path of a sample.
        """
        work: dict[Ranks, int] = defaultdict(int)
        longest = 0
        for s in self.plan.sections:
            name = s.name
            work[replica_first_ranks(s)] += sum(self.shared_work[name])
            own_times = map(int.__add__, self.sample_times[name][0], self._awaited_backward_times(s))
            paths = map(
                int.__add__,
                map(int.__add__, self.forward_path_ns[name], self.upstream_backward_ns[name]),
                own_times,
            )
            longest = max(
                longest,
                max(
                    compress(paths, self._active_masks[name]) if self._active_masks[name] else paths,
                    default=0,
                ),
            )
        return max([longest, *(-(-total // len(ranks)) for ranks, total in work.items())])

    def _classify_patterns(self, section: Section) -> list[int]:
        """Returns the priority class of each pattern in a section.

        For a stage, it is what the last stage of its pipeline needs and owes outside the pipeline.
        """
        last_stage = self.graph.pipeline_stages[section.name][-1].name
        sources = (
            self.graph.exclude_own_stages(last_stage, names[last_stage])
            for names in (self.graph.gradient_ancestors, self.graph.ancestors)
        )
        owed, needed = ([self._active_by_pattern[name] for name in names] for names in sources)
        patterns = range(len(self._active_by_pattern[section.name]))
        return [
            GRADIENT_OWED
            if any(active[i] for active in owed)
            else NEEDS_UPSTREAM
            if any(active[i] for active in needed)
            else INDEPENDENT
            for i in patterns
        ]

    def _set_priority_rule(self, rule: PriorityRule) -> None:
        last_stage = {s.name: self.graph.pipeline_stages[s.name][-1].name for s in self.plan.sections}
        urgency = {name: self._rate_urgency(name, rule) for name in dict.fromkeys(last_stage.values())}
        self._priority_rule, self.urgency = rule, {name: urgency[stage] for name, stage in last_stage.items()}

    def _rate_urgency(self, name: str, rule: PriorityRule) -> IntColumn:
        """Returns the urgency of each sample, lower first, comparable within a priority class only.

        By class: most upstream backward time first; earliest inputs (or largest) first; largest first.
        """
        work = self.sample_work[name]
        second = self.forward_path_ns[name] if rule.by_ready_time else [-own_work for own_work in work]
        columns = zip(self.upstream_backward_ns[name], second, work, self.pattern_ids, strict=True)
        return [
            (-owed, ready_or_size, -own_work)[self.pattern_classes[name][pattern]]
            for owed, ready_or_size, own_work, pattern in columns
        ]

    # -- assignment

    @cached_property
    def assignment(self) -> ReplicaAssignment:
        """Samples of each replica of each section: largest first, each to the least loaded replica.

        Co-scheduled sections get the same assignment; if they are on several groups of ranks, the busiest
        group decides.
        """
        return self._assign_all([None] * len(self.graph.co_scheduled_sections()))

    def assign_inside(self) -> bool:
        """Keeps each sample inside the replicas that enclose those of other sections; returns whether there
        are any such replicas. Loads are less even then, and fewer ranks wait for each other."""
        if not any(enclosing := _find_enclosing(self.graph.co_scheduled_sections())):
            return False
        self.assignment = self._assign_all(enclosing)
        return True

    def _assign_all(self, enclosing: Sequence[EnclosingReplicas | None]) -> ReplicaAssignment:
        load: dict[int, int] = defaultdict(int)
        samples_by_replica: dict[str, list[list[int]]] = {}
        critical: list[list[SamplePositions]] = []
        # Replicas that enclose others come first, then those with most work per rank: the others then fill
        # what these leave free.
        weighed = [*map(self._weigh_sections, self.graph.co_scheduled_sections())]
        order = sorted(
            range(len(weighed)),
            key=lambda g: (
                enclosing[g] is not None,
                -sum(weighed[g][0][weighed[g][1]]) // len(weighed[g][1]),
                weighed[g][1],
            ),
        )
        owners = dict[int, IntColumn]()
        for g in order:
            weights, ranks, sections = weighed[g]
            _equalize_replica_load(load, sections)
            if found := enclosing[g]:
                owner = self._assign_inside(found, owners[found.group], ranks, sections, weights[ranks], load)
            else:
                inner = [weighed[k] for k, other in enumerate(enclosing) if other and other.group == g]
                added = self._sum_columns(self._rank_shares(sections, *inside) for inside in inner)
                wanted = list(map(int.__add__, weights[ranks], added))
                if self.critical_section in sections and _packs_micro_batches(self.critical_section):
                    critical, owner = self._assign_critical_micro_batches(ranks, wanted, load)
                else:
                    together = [*sections, *(s for _, _, inside in inner for s in inside)]
                    owner = self._assign_samples(ranks, together, wanted, load)
                for p, more in enumerate(added if inner else ()):
                    load[ranks[owner[p]]] -= more
            owners[g] = owner
            for other_ranks, column in weights.items():
                for p, weight in enumerate(column) if other_ranks != ranks else ():
                    load[other_ranks[owner[p]]] += weight
            _equalize_replica_load(load, sections)
            in_rounds = (
                self._order_of_assignment(sections, weights[ranks])
                if any(map(runs_in_lockstep, sections))
                else []
            )
            for s in sections:
                samples_by_replica[s.name] = by_replica = [[] for _ in ranks]
                active = self.active_samples[s.name]
                # Of replicas in lockstep, the n-th micro-batches form a round: samples keep the order of
                # their assignment, in which those of a round are alike.
                for p in filter(set(active).__contains__, in_rounds) if runs_in_lockstep(s) else active:
                    by_replica[owner[p]].append(p)
        by_replica = samples_by_replica[self.critical_section.name]
        if self.critical_section.whole_batch:
            critical = [[tuple(sorted(samples))] if samples else [] for samples in by_replica]
        return ReplicaAssignment(samples_by_replica, critical or [[(p,) for p in ps] for ps in by_replica])

    def _rank_shares(
        self,
        sections: Sequence[Section],
        weights: dict[Ranks, IntColumn],
        ranks: Ranks,
        inside: Sequence[Section],
    ) -> IntColumn:
        """Returns the time of each sample in the sections `inside`, if their work is spread over all ranks of
        a replica of `sections`."""
        most, own = (len(_ranks_of_replicas(each)[0]) for each in (sections, inside))
        return [ns * own // most for ns in weights[ranks]]

    def _assign_inside(
        self,
        enclosing: EnclosingReplicas,
        outer_owner: IntColumn,
        ranks: Ranks,
        sections: Sequence[Section],
        weights: IntColumn,
        load: dict[int, int],
    ) -> IntColumn:
        """Returns the replica of each sample: the least loaded one inside the replica that has the sample in
        the enclosing sections."""
        owner = [0] * self.sample_count
        for p in self._order_of_assignment(sections, weights):
            inside = enclosing.inside[outer_owner[p]]
            owner[p] = min(inside, key=lambda r: (load[ranks[r]], r))
            load[ranks[owner[p]]] += weights[p]
        return owner

    def _weigh_sections(self, sections: list[Section]) -> tuple[dict[Ranks, IntColumn], Ranks, list[Section]]:
        """Returns each sample's work by the ranks that do it, the ranks with most work, and the sections."""
        weights = {
            ranks: self._sum_columns(
                self.shared_work[s.name] for s in sections if replica_first_ranks(s) == ranks
            )
            for ranks in map(replica_first_ranks, sections)
        }
        return weights, max(weights, key=lambda ranks: sum(weights[ranks])), sections

    def _assign_samples(
        self, ranks: Ranks, sections: Sequence[Section], weights: IntColumn, load: dict[int, int]
    ) -> IntColumn:
        """Returns the replica of each sample.

        Samples that need upstream are assigned first, so that all replicas get equal shares of them; the
        others then balance the load. Samples of equal weight are taken pattern by pattern, so that each
        replica gets its share of every pattern.
        """
        order = self._order_of_assignment(sections, weights)
        owner = [0] * self.sample_count
        ordered_weights, together = [weights[p] for p in order], max(map(replicas_in_lockstep, sections))
        replicas = (
            assign_in_rounds(ordered_weights, ranks, load, together)[0]
            if together > 1
            else assign_least_loaded(ordered_weights, ranks, load)
        )
        for p, replica in zip(order, replicas, strict=True):
            owner[p] = replica
        return owner

    def _order_of_assignment(self, sections: Sequence[Section], weights: IntColumn) -> list[int]:
        """Returns the samples of these sections in the order in which replicas get them."""
        most_downstream = max(sections, key=lambda s: self.graph.depth[s.name])
        samples = (
            self.active_samples[sections[0].name]
            if len(sections) == 1
            else [p for p in range(self.sample_count) if self._is_active_in_any(sections, p)]
        )
        # Stable sorts, the most significant key last: by priority class, then largest first, then by pattern.
        order = sorted(samples, key=self.pattern_ids.__getitem__)
        order.sort(key=weights.__getitem__, reverse=True)
        classes = list(map(self.pattern_classes[most_downstream.name].__getitem__, self.pattern_ids))
        order.sort(key=classes.__getitem__)
        return order

    def _is_active_in_any(self, sections: Iterable[Section], position: int) -> bool:
        return any(self._active_by_pattern[s.name][self.pattern_ids[position]] for s in sections)

    def _assign_critical_micro_batches(
        self, ranks: Ranks, weights: IntColumn, load: dict[int, int]
    ) -> tuple[list[list[SamplePositions]], IntColumn]:
        """Returns the critical section's micro-batches by replica, and the replica of each sample."""
        section = self.critical_section
        work, share = self.sample_work[section.name], self.shared_work[section.name]
        groups: dict[int, list[int]] = defaultdict(list)
        for p in self.active_samples[section.name]:
            groups[self.pattern_ids[p]].append(p)
        other_work = list(map(int.__sub__, weights, share))
        by_replica: list[list[SamplePositions]] = [[] for _ in ranks]
        owner = [0] * self.sample_count
        ordered = [sorted(group, key=work.__getitem__, reverse=True) for group in groups.values()]
        for micro_batch, replica in self._pack_once(section, ordered, other_work, ranks, load):
            by_replica[replica].append(micro_batch)
            for p in micro_batch:
                owner[p] = replica
        # Samples that only other sections on these ranks process: they fill up the least loaded replicas.
        remaining = [
            p
            for p in range(self.sample_count)
            if weights[p] and not self._active_by_pattern[section.name][self.pattern_ids[p]]
        ]
        remaining.sort(key=weights.__getitem__, reverse=True)
        for p, replica in zip(
            remaining, assign_least_loaded([weights[p] for p in remaining], ranks, load), strict=True
        ):
            owner[p] = replica
        return by_replica, owner

    def _pack_once(
        self,
        section: Section,
        groups: Sequence[Sequence[int]],
        other_work: Sequence[int],
        ranks: Ranks,
        load: dict[int, int],
    ) -> Sequence[tuple[SamplePositions, int]]:
        """Returns `pack_and_assign`, computed once for plans that differ in other sections or in where the
        ranks of this one are."""
        stages, known = self.graph.pipeline_stages[section.name], self._packings.assigned
        loads = [load.get(rank, 0) for rank in ranks]
        key = repr((_without_places(stages), section.stage, groups, any(other_work) and other_work, loads))
        if key not in known:
            packed = pack_and_assign(self.costs, stages, section, groups, other_work, ranks, load)
            known[key] = packed, [load[rank] for rank in ranks]
        packed, loads = known[key]
        load.update(zip(ranks, loads, strict=True))
        return packed

    # -- cutting

    def list_priority_rules(self) -> list[PriorityRule]:
        """Returns the priority rules that suit this batch, the likeliest first.

        If hardly any of the critical section's work is independent of upstream, some samples must lead each
        order. If much of it needs upstream without owing a gradient, both orders of these samples are worth
        trying.
        """
        sample_work = self.sample_work[self.critical_section.name]
        classes = self.pattern_classes[self.critical_section.name]
        class_work = [0, 0, 0]
        for ns, pattern in zip(sample_work, self.pattern_ids, strict=True):
            class_work[classes[pattern]] += ns
        by_ready_choices = (
            [True, False] if class_work[NEEDS_UPSTREAM] > SCARCE_WORK_SHARE * sum(class_work) else [False]
        )
        if class_work[INDEPENDENT] < SCARCE_WORK_SHARE * sum(class_work):
            return [
                PriorityRule(lead, by_ready)
                for lead in (LEADING_MICRO_BATCHES, 0)
                for by_ready in by_ready_choices
            ]
        return [PriorityRule(0, by_ready) for by_ready in by_ready_choices[::-1]]

    def compose_by_priority(self, rule: PriorityRule) -> dict[str, MicroBatchTable]:
        """Returns the micro-batches of all sections, cut by the critical start times under a priority
        rule.
        """
        if rule.by_ready_time != self._priority_rule.by_ready_time:
            self._set_priority_rule(rule)
        start_times = self.critical_start_times(self.assignment, rule.lead_count)
        return self._build_tables(
            [
                (r, samples)
                for r, micro_batches in enumerate(self.assignment.critical_micro_batches)
                for samples in micro_batches
            ],
            start_times,
        )

    def compose_by_order(
        self, orders: Sequence[Sequence[SamplePositions]], start_times: IntColumn
    ) -> dict[str, MicroBatchTable]:
        """Returns the micro-batches of all sections, with given orders on the critical section's replicas.

        The other sections take samples by their critical start times.
        """
        tables = self._build_tables(
            [(r, samples) for r, order in enumerate(orders) for samples in order], start_times
        )
        for stage in self.graph.pipeline_stages[self.critical_section.name]:
            table = tables[stage.name]
            place = list(range(len(table.micro_batches)))
            tables[stage.name] = replace(table, priority_class=[0] * len(place), urgency=place)
        return tables

    def _build_tables(
        self, critical: AssignedMicroBatches, start_times: IntColumn
    ) -> dict[str, MicroBatchTable]:
        cuts = {self.critical_section.user_section_name: critical}
        for name, stages in self.plan.pipelines.items():
            if name not in cuts:
                cuts[name] = self.cut_section(stages[-1], start_times)
        tables: dict[str, MicroBatchTable] = {}
        for s in self.plan.sections:
            first_stage = tables.get(self.graph.pipeline_stages[s.name][0].name)
            tables[s.name] = (
                self.build_table(s, cuts[s.user_section_name], start_times)
                if first_stage is None
                else self._build_stage_table(s, first_stage)
            )
        return tables

    def _build_stage_table(self, section: Section, first_stage: MicroBatchTable) -> MicroBatchTable:
        """Returns the table of a later pipeline stage; its micro-batches are as urgent as those of the first
        stage.
        """
        positions = [m.samples for m in first_stage.micro_batches]
        micros = _build_micro_batches(section, [m.replica for m in first_stage.micro_batches], positions)
        forward, backward = self.micro_batch_times(section, positions)
        saved_bytes = self.costs.saved_bytes(section, positions)
        split = self.costs.split_backwards(section, positions)
        return replace(
            first_stage,
            micro_batches=micros,
            forward_ns=forward,
            backward_ns=backward,
            weight_ns=weight_backward_times(section, backward, split.whole),
            saved_bytes=saved_bytes,
            between_bytes=split.between_bytes,
            whole_backwards=split.whole,
        )

    def micro_batch_times(
        self, section: Section, micro_batches: Sequence[SamplePositions]
    ) -> tuple[IntColumn, IntColumn]:
        """Returns (forward, backward) ns of micro-batches that are all active in the section."""
        if set(map(len, micro_batches)) - {1}:
            return self.costs.micro_batch_times(section, micro_batches)
        positions, (forward, backward) = [p for (p,) in micro_batches], self.sample_times[section.name]
        return list(map(forward.__getitem__, positions)), list(map(backward.__getitem__, positions))

    def critical_start_times(self, assignment: ReplicaAssignment, lead: int) -> IntColumn:
        """Returns when the critical section wants each sample: the work on its replica that is more urgent.

        Samples that need upstream come first, as if all their inputs were ready at once. Before these come
        `lead` micro-batches of each replica with the earliest inputs.
        """
        name = self.critical_section.name
        work = self.sample_work[name]
        urgency = self.urgency[name]
        classes = self.pattern_classes[name]
        forward_path = self.forward_path_ns[name]
        start_times = [sum(work)] * self.sample_count
        for micro_batches in assignment.critical_micro_batches:
            queue = sorted(
                (
                    classes[self.pattern_ids[samples[0]]],
                    urgency[samples[0]] if len(samples) == 1 else sum(map(urgency.__getitem__, samples)),
                    samples,
                )
                for samples in micro_batches
            )
            if lead:
                leading = sorted(
                    (entry for entry in queue if entry[0] < INDEPENDENT),
                    key=lambda entry: max(map(forward_path.__getitem__, entry[2])),
                )[:lead]
                queue = leading + [entry for entry in queue if entry not in leading]
            time = 0
            for _, _, micro_batch in queue:
                for p in micro_batch:
                    start_times[p] = time
                time += (
                    work[micro_batch[0]] if len(micro_batch) == 1 else sum(map(work.__getitem__, micro_batch))
                )
        return start_times

    def compose_in_dataset_order(self) -> dict[str, MicroBatchTable]:
        """Returns micro-batches of consecutive samples, assigned to the replicas round-robin."""
        tables: dict[str, MicroBatchTable] = {}
        for s in self.plan.sections:
            positions = self.active_samples[s.name]
            chunks = _deal_evenly(positions, s.mesh.dp) if s.whole_batch else self._cut_in_order(s, positions)
            tables[s.name] = self.build_table(
                s, [(i % s.mesh.dp, chunk) for i, chunk in enumerate(chunks)], list(range(self.sample_count))
            )
        return tables

    def _cut_in_order(self, section: Section, positions: Sequence[int]) -> list[SamplePositions]:
        """Cuts samples into runs of as many as the section's micro-batches may have."""
        chunks, may_mix = list[SamplePositions](), self._may_mix_patterns(section)
        for p in positions:
            longer = (*chunks[-1], p) if chunks else (p,)
            fits = bool(chunks) and len(longer) <= section.micro_batch
            fits = fits and (may_mix or self.pattern_ids[longer[0]] == self.pattern_ids[p])
            if fits and section.micro_batch_tokens:
                columns = self.costs.micro_batch_columns([longer])
                fits = self.costs.token_counts(section, columns, 1)[0] <= section.micro_batch_tokens
            chunks[len(chunks) - fits :] = [longer if fits else (p,)]
        return chunks

    def _may_mix_patterns(self, section: Section) -> bool:
        """Whether a micro-batch of a section, or of its pipeline, may hold samples of several patterns: no
        sample that a producer skips would have rows in that producer's tensor."""
        stages = {s.name for s in self.graph.pipeline_stages[section.name]}
        return not any(
            evaluate_expr(edge.rows, sample.sizes)
            for edge in self.plan.edges
            if edge.dst in stages and edge.when and edge.rows
            for sample in self.samples
            if not is_active(edge.when, sample.pattern)
        )

    def cut_section(self, section: Section, start_times: Sequence[int]) -> AssignedMicroBatches:
        """Cuts the samples of each replica of a section, or of its pipeline, into micro-batches of one
        pattern and equal count, by critical start time.

        Among equal start times the largest are together, which wastes the least padding. Replicas in lockstep
        keep the order that their rounds have. A section that takes all samples at once has one micro-batch
        for each replica.
        """
        section = self.graph.pipeline_stages[section.name][-1]
        by_replica = self.assignment.samples_by_replica[section.name]
        if section.whole_batch:
            return [(r, tuple(sorted(samples))) for r, samples in enumerate(by_replica) if samples]
        if section.most_samples == 1:
            return [(r, (p,)) for r, positions in enumerate(by_replica) for p in positions]
        if section.may_deal:
            return self._cut_into_dealt(section, by_replica)
        work, upstream, cut = self.sample_work[section.name], self.upstream_backward_ns[section.name], []
        for r, positions in enumerate(by_replica):
            groups: dict[int, list[int]] = defaultdict(list)
            by_start = sorted(positions, key=lambda p: (start_times[p], -upstream[p], -work[p], p))
            for p in positions if runs_in_lockstep(section) else by_start:
                groups[self.pattern_ids[p]].append(p)
            for group in groups.values():
                count = max(-(-len(group) // section.micro_batch), self._least_by_tokens(section, group))
                bounds = [i * len(group) // count for i in range(count + 1)]
                cut += [(r, tuple(group[a:b])) for a, b in pairwise(bounds)]
        return halve_large_micro_batches(self.costs, self.graph.pipeline_stages[section.name], cut)

    def _cut_into_dealt(self, section: Section, by_replica: list[list[int]]) -> AssignedMicroBatches:
        """Cuts each replica's samples into micro-batches of similar samples of one pattern. The ranks of a
        replica may compute different samples of such a micro-batch. No priority rule or order changes them,
        so they are computed once."""
        work, stages = self.sample_work[section.name], self.graph.pipeline_stages[section.name]
        known = self._packings.dealt
        own = repr((_without_places(stages), section.stage))
        replica_groups = list[tuple[int, SamplePositions]]()
        for r, positions in enumerate(by_replica):
            groups: dict[int, list[int]] = defaultdict(list)
            for p in sorted(positions, key=lambda p: (-work[p], p)):
                groups[self.pattern_ids[p]].append(p)
            replica_groups += [(r, tuple(group)) for group in groups.values()]
        new = list(dict.fromkeys(group for _, group in replica_groups if (own, group) not in known))
        for group, packed in zip(new, pack_replicas(self.costs, stages, section, new), strict=True):
            known[own, group] = [run for run, _ in packed]
        return [(r, run) for r, group in replica_groups for run in known[own, group]]

    def _least_by_tokens(self, section: Section, group: Sequence[int]) -> int:
        """Returns how many micro-batches samples fill if none has more tokens than the section allows."""
        if not section.micro_batch_tokens:
            return 1
        columns = self.costs.micro_batch_columns([(p,) for p in group])
        tokens = sum(self.costs.token_counts(section, columns, len(group)))
        return min(len(group), -(-tokens // section.micro_batch_tokens))

    def build_table(
        self, section: Section, cut: AssignedMicroBatches, start_times: IntColumn
    ) -> MicroBatchTable:
        """Returns the table of a section's micro-batches.

        Empty micro-batches are added if all replicas must have equally many (ZeRO-3).
        """
        if runs_in_lockstep(section):
            cut = _add_empty_micro_batches(cut, section.mesh.dp, replicas_in_lockstep(section))
        name, classes, urgency = section.name, self.pattern_classes[section.name], self.urgency[section.name]
        upstream_backward = self.upstream_backward_ns[self.graph.pipeline_stages[name][-1].name]
        positions = [samples for _, samples in cut]
        all_single = set(map(len, positions)) <= {1}
        ascending = positions if all_single else [tuple(sorted(samples)) for samples in positions]
        micros = _build_micro_batches(section, [r for r, _ in cut], ascending)
        if all_single:
            sample_of = [p for (p,) in positions]
            columns = (
                list(map(column.__getitem__, sample_of))
                for column in (
                    *self.sample_times[name],
                    upstream_backward,
                    urgency,
                    start_times,
                    self.pattern_ids,
                )
            )
            forward, backward, upstream_ns, urgencies, micro_start_times, patterns = columns
            priority_class = list(map(classes.__getitem__, patterns))
            saved_bytes = self.costs.saved_bytes(section, positions)
            split = self.costs.split_backwards(section, positions)
            return MicroBatchTable(
                micros,
                forward,
                backward,
                weight_backward_times(section, backward, split.whole),
                saved_bytes,
                *split,
                upstream_ns,
                priority_class,
                urgencies,
                micro_start_times,
            )
        forward, backward = self.costs.micro_batch_times(section, positions)
        upstream_ns, urgencies = (
            [sum(column[p] for p in samples) for samples in positions]
            for column in (upstream_backward, urgency)
        )
        priority_class = [
            min((classes[self.pattern_ids[p]] for p in samples), default=INDEPENDENT) for samples in positions
        ]
        micro_start_times = [min((start_times[p] for p in samples), default=0) for samples in positions]
        saved_bytes = self.costs.saved_bytes(section, positions)
        split = self.costs.split_backwards(section, positions)
        return MicroBatchTable(
            micros,
            forward,
            backward,
            weight_backward_times(section, backward, split.whole),
            saved_bytes,
            *split,
            upstream_ns,
            priority_class,
            urgencies,
            micro_start_times,
        )


def _build_micro_batches(
    section: Section, replicas: Iterable[int], micro_batches: Sequence[SamplePositions]
) -> tuple[MicroBatch, ...]:
    """Builds a section's micro-batches from columns, without a call for each of thousands."""
    return tuple(
        rows_from_columns(
            MicroBatch, (range(len(micro_batches)), repeat(section.name), replicas, micro_batches)
        )
    )


def _add_empty_micro_batches(cut: AssignedMicroBatches, replicas: int, together: int) -> AssignedMicroBatches:
    """Adds empty micro-batches for replicas that have fewer than others of the `together` consecutive ones
    that run in lockstep."""
    counts = Counter(r for r, _ in cut)
    most = [max(counts[q] for q in range(first, first + together)) for first in range(0, replicas, together)]
    return cut + [(r, ()) for r in range(replicas) for _ in range(most[r // together] - counts[r])]


def _without_places(stages: Sequence[Section]) -> list[Section]:
    """Returns the stages of a pipeline without the ranks that they are on."""
    return [replace(s, mesh=replace(s.mesh, ranks=())) for s in stages]


def _find_enclosing(groups: Sequence[Sequence[Section]]) -> list[EnclosingReplicas | None]:
    """Returns, for each group of sections with the same replicas, the one with the widest replicas that
    enclose its own; None where none does, where nothing is held for a backward, and where replicas wait for
    each other in rounds or take all samples at once."""
    replicas = [_ranks_of_replicas(sections) for sections in groups]
    free = [
        g
        for g, sections in enumerate(groups)
        if any(map(owes_backward, sections))
        and not any(runs_in_lockstep(s) or s.whole_batch for s in sections)
    ]
    free.sort(key=lambda g: (-len(replicas[g][0]), g))
    found: list[EnclosingReplicas | None] = [None] * len(groups)
    for i, own in enumerate(free):
        for group in free[:i]:
            if inside := _replicas_inside(replicas[group], replicas[own]):
                found[own] = EnclosingReplicas(group, inside)
                break
    return found


def _replicas_inside(outer: Sequence[set[int]], inner: Sequence[set[int]]) -> list[list[int]]:
    """Returns for each replica of `outer` (sets of ranks) those of `inner` that have all ranks in it; an
    empty list if some replica of `inner` is in none, or one of `outer` has none."""
    replica_of = {rank: r for r, ranks in enumerate(outer) for rank in ranks}
    inside: list[list[int]] = [[] for _ in outer]
    for r, ranks in enumerate(inner):
        places = {replica_of.get(rank, -1) for rank in ranks}
        if len(places) > 1 or -1 in places:
            return []
        inside[places.pop()].append(r)
    return inside if all(inside) else []


def _ranks_of_replicas(sections: Iterable[Section]) -> list[set[int]]:
    """Returns the ranks of each replica of co-scheduled sections."""
    by_section = [ranks_by_replica(s) for s in sections]
    return [set[int]().union(*replica) for replica in zip(*by_section, strict=True)]


def _packs_micro_batches(section: Section) -> bool:
    """Whether a section's samples are chosen to go together in micro-batches of several."""
    return section.most_samples > 1 and not section.whole_batch


def _deal_evenly(positions: Sequence[int], replicas: int) -> list[SamplePositions]:
    """Cuts samples into a run for each replica, none of them empty."""
    count = min(replicas, len(positions))
    bounds = [i * len(positions) // count for i in range(count + 1)] if count else []
    return [tuple(positions[a:b]) for a, b in pairwise(bounds)]


def _equalize_replica_load(load: dict[int, int], sections: Iterable[Section]) -> None:
    """Sets the load of all ranks of a replica to that of its busiest rank."""
    for ranks in (ranks for s in sections for ranks in ranks_by_replica(s) if len(ranks) > 1):
        load |= dict.fromkeys(ranks, max(load[r] for r in ranks))
