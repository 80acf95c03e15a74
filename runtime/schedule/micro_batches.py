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

from secc.runtime.plan.int_columns import made
from secc.runtime.plan.predicted_costs import Costs
from secc.runtime.plan.replica_routes import replicas
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.section_graph import Graph
from secc.runtime.plan.step_program import (
    MicroBatch,
    SampleMeta,
    active,
    gathers,
    replica_ranks,
    returns_gradient,
    weight_parts,
)
from secc.runtime.schedule.batch_packing import Cut, Lot, halved, lots
from secc.runtime.schedule.load_balance import Ranks, balance, balance_rounds

Column = list[int]  # one number for each sample of the global batch


AWAITED, NEEDY, FREE = range(
    3
)  # waves: the backward is awaited upstream, only the forward needs upstream, nothing does
SCARCE = 0.1  # of the critical section's work: less of a wave hardly matters
LEAD = 4


@dataclass(frozen=True)
class Style:
    """What no rule decides for all batches: how many samples that are ready soon lead each replica's queue,
    and whether samples that need upstream without owing it anything go by when they are ready (or the largest
    first)."""

    lead: int = 0
    soonest: bool = False


@dataclass(frozen=True)
class Table:
    """The micro-batches of a section, and a number for each in every column.

    `forward`, `backward`: ns; `weight`: the part of the backward that comes later where it is split. `kept`:
    bytes between forward and backward, none where the section's room is not bounded. `upstream`: backward ns
    that become possible upstream once this one is done. Within a `wave`, the least `urgency` goes first.
    `turn`: when the critical section wants its samples.
    """

    micro_batches: tuple[MicroBatch, ...]
    forward: Column
    backward: Column
    weight: Column
    kept: Column
    upstream: Column
    wave: Column
    urgency: Column
    turn: Column


@dataclass(frozen=True)
class Dealt:
    """The samples of each replica of each section, and the lots of the critical section's replicas."""

    positions: dict[str, list[list[int]]]
    critical: list[list[Lot]]


class Composer:
    """Deals the samples of one global batch to replicas and cuts them into micro-batches."""

    def __init__(self, plan: Plan, samples: Sequence[SampleMeta], graph: Graph) -> None:
        self.plan, self.graph, self.samples, self.count = plan, graph, samples, len(samples)
        self.costs = Costs(plan, samples)
        patterns = sorted({s.pattern for s in samples}, key=sorted)
        number = {pattern: k for k, pattern in enumerate(patterns)}
        self.kind: Column = [number[s.pattern] for s in samples]
        self._active = {
            s.name: [active(s.when, pattern) for pattern in patterns] for s in plan.sections
        }  # by kind
        self._mask = {
            name: [] if all(on) else list(map(on.__getitem__, self.kind)) for name, on in self._active.items()
        }
        self.active = {s.name: self._active_positions(s) for s in plan.sections}
        self.alone = {s.name: self._masked(s) for s in plan.sections}
        self.size = {name: list(map(int.__add__, f, b)) for name, (f, b) in self.alone.items()}
        self.share = {s.name: self._share(s) for s in plan.sections}
        self.head, self.upstream = self._ways()
        self.waves = {s.name: self._waves(s) for s in plan.sections}
        self._set_style(Style())
        loads = {s.name: sum(self.share[s.name]) // s.mesh.dp for s in graph.order}
        busy = [s for s in graph.order if 2 * loads[s.name] >= max(loads.values())]
        self.critical = max(busy, key=lambda s: (graph.depth[s.name], loads[s.name]))

    # -- columns
    # ------------------------------------------------------------------------------------------------------------------

    def _active_positions(self, section: Section) -> list[int]:
        mask = self._mask[section.name]
        return list(compress(range(self.count), mask)) if mask else list(range(self.count))

    def _masked(self, section: Section) -> tuple[Column, Column]:
        """(forward, backward) of every sample on its own, 0 where the section is not active."""
        forward, backward = self.costs.alone(section)
        return self._where_active(section.name, forward), self._where_active(section.name, backward)

    def _share(self, section: Section) -> Column:
        """What every sample adds to its section's work: less than it takes alone where it shares a
        micro-batch."""
        if section.micro_batch == 1:
            return self.size[section.name]
        return self._where_active(section.name, self.costs.shared(section))

    def _where_active(self, name: str, column: Column) -> Column:
        """The column with 0 for samples that do not pass a section."""
        mask = self._mask[name]
        return list(map(mul, column, mask)) if mask else column

    def _sum(self, columns: Iterable[Column]) -> Column:
        parts = list(columns)
        if len(parts) == 1:
            return parts[0]
        return list(map(sum, zip(*parts, strict=True))) if parts else [0] * self.count

    def _ways(self) -> tuple[dict[str, Column], dict[str, Column]]:
        """For each section and sample, the longest way of forwards to it, and the longest way of backwards
        that follow its own upstream."""
        sections = {s.name: s for s in self.plan.sections}
        heads: dict[str, Column] = {}
        backs: dict[str, Column] = {}
        for section in self.graph.order:
            into = [e for e in self.plan.edges if e.dst == section.name]
            heads[section.name] = self._longest(
                self._through(e.src, heads[e.src], self.alone[e.src][0]) for e in into
            )
            owed = [sections[e.src] for e in into if returns_gradient(e, sections)]
            backs[section.name] = self._longest(
                self._through(s.name, backs[s.name], self._awaited(s)) for s in owed
            )
        return heads, backs

    def _awaited(self, section: Section) -> Column:
        """The backward of every sample without a second part, for which nobody waits."""
        backward = self.alone[section.name][1]
        return list(map(int.__sub__, backward, weight_parts(section, backward)))

    def _through(self, name: str, way: Column, own: Column) -> Column:
        """The way through a section, 0 for samples that do not pass it."""
        return self._where_active(name, list(map(int.__add__, way, own)))

    def _longest(self, columns: Iterable[Column]) -> Column:
        parts = list(columns)
        if len(parts) == 1:
            return parts[0]
        return list(map(max, *parts)) if parts else [0] * self.count

    def least(self) -> int:
        """Ns that no order can beat: the work of sections on the same ranks spread evenly, and a sample's
        longest way."""
        work: dict[Ranks, int] = defaultdict(int)
        longest = 0
        for s in self.plan.sections:
            name = s.name
            work[replica_ranks(s)] += sum(self.share[name])
            own = map(int.__add__, self.alone[name][0], self._awaited(s))
            ways = map(int.__add__, map(int.__add__, self.head[name], self.upstream[name]), own)
            longest = max(
                longest, max(compress(ways, self._mask[name]) if self._mask[name] else ways, default=0)
            )
        return max([longest, *(-(-total // len(ranks)) for ranks, total in work.items())])

    def _waves(self, section: Section) -> list[int]:
        """The wave of each kind of sample; what the last stage of a pipeline needs and owes, the stages of it
        aside."""
        last = self.graph.stages[section.name][-1].name
        sources = (
            self.graph.outside(last, names[last]) for names in (self.graph.creditors, self.graph.ancestors)
        )
        awaited, needed = ([self._active[name] for name in names] for names in sources)
        kinds = range(len(self._active[section.name]))
        return [
            AWAITED if any(on[k] for on in awaited) else NEEDY if any(on[k] for on in needed) else FREE
            for k in kinds
        ]

    def _set_style(self, style: Style) -> None:
        last = {s.name: self.graph.stages[s.name][-1].name for s in self.plan.sections}
        urgency = {name: self._urgency(name, style) for name in dict.fromkeys(last.values())}
        self._style, self.urgency = style, {name: urgency[stage] for name, stage in last.items()}

    def _urgency(self, name: str, style: Style) -> Column:
        """Of samples of one wave the least goes first: what owes most upstream, what upstream has ready
        soonest, or the largest."""
        size = self.size[name]
        second = self.head[name] if style.soonest else [-s for s in size]
        columns = zip(self.upstream[name], second, size, self.kind, strict=True)
        return [(-u, h, -s)[self.waves[name][kind]] for u, h, s, kind in columns]

    # -- dealing
    # ------------------------------------------------------------------------------------------------------------------

    @cached_property
    def dealt(self) -> Dealt:
        """Each replica's samples: largest first, each to the least loaded. Sections of the same ranks and
        stages are dealt alike.

        Of a team that has several ranks a replica, the busiest decide.
        """
        load: dict[int, int] = defaultdict(int)
        positions: dict[str, list[list[int]]] = {}
        critical: list[list[Lot]] = []
        for weights, ranks, team in sorted(
            map(self._weighed, self.graph.teams()), key=lambda x: (-sum(x[0][x[1]]) // len(x[1]), x[1])
        ):
            _level(load, team)
            if self.critical in team and self.critical.micro_batch > 1:
                critical, owner = self._deal_lots(ranks, weights[ranks], load)
            else:
                owner = self._deal_samples(ranks, team, weights[ranks], load)
            for others, column in weights.items():
                for p, weight in enumerate(column) if others != ranks else ():
                    load[others[owner[p]]] += weight
            _level(load, team)
            for s in team:
                positions[s.name] = dealt = [[] for _ in ranks]
                for p in self.active[s.name]:
                    dealt[owner[p]].append(p)
        return Dealt(
            positions, critical or [[(p,) for p in dealt] for dealt in positions[self.critical.name]]
        )

    def _weighed(self, team: list[Section]) -> tuple[dict[Ranks, Column], Ranks, list[Section]]:
        """The work of each sample by the ranks that do it, and the busiest of these; the team."""
        weights = {
            ranks: self._sum(self.share[s.name] for s in team if replica_ranks(s) == ranks)
            for ranks in map(replica_ranks, team)
        }
        return weights, max(weights, key=lambda ranks: sum(weights[ranks])), team

    def _deal_samples(
        self, ranks: Ranks, sections: Sequence[Section], weights: Column, load: dict[int, int]
    ) -> Column:
        """The replica of each sample: first what needs upstream, so that replicas get even shares of it, then
        the rest to level them.

        Samples of equal weight are taken kind by kind, so that each replica gets its share of every kind.
        """
        last = max(sections, key=lambda s: self.graph.depth[s.name])
        some = (
            self.active[sections[0].name]
            if len(sections) == 1
            else [p for p in range(self.count) if self._any(sections, p)]
        )
        order = sorted(some, key=self.kind.__getitem__)
        order.sort(key=weights.__getitem__, reverse=True)
        order.sort(key=list(map(self.waves[last.name].__getitem__, self.kind)).__getitem__)
        owner = [0] * self.count
        deal = balance_rounds if any(map(gathers, sections)) else balance
        for p, replica in zip(order, deal([weights[p] for p in order], ranks, load), strict=True):
            owner[p] = replica
        return owner

    def _any(self, sections: Iterable[Section], position: int) -> bool:
        return any(self._active[s.name][self.kind[position]] for s in sections)

    def _deal_lots(
        self, ranks: Ranks, weights: Column, load: dict[int, int]
    ) -> tuple[list[list[Lot]], Column]:
        """The critical section's lots by replica, and the replica of each sample."""
        section, own, share = self.critical, self.size[self.critical.name], self.share[self.critical.name]
        groups: dict[int, list[int]] = defaultdict(list)
        for p in self.active[section.name]:
            groups[self.kind[p]].append(p)
        others = list(map(int.__sub__, weights, share))
        dealt: list[list[Lot]] = [[] for _ in ranks]
        owner = [0] * self.count
        ordered = [sorted(g, key=own.__getitem__, reverse=True) for g in groups.values()]
        for lot, replica in lots(
            self.costs, self.graph.stages[section.name], section, ordered, others, ranks, load
        ):
            dealt[replica].append(lot)
            for p in lot:
                owner[p] = replica
        rest = [p for p in range(self.count) if weights[p] and not self._active[section.name][self.kind[p]]]
        rest.sort(key=weights.__getitem__, reverse=True)
        for p, replica in zip(rest, balance([weights[p] for p in rest], ranks, load), strict=True):
            owner[p] = replica
        return dealt, owner

    # -- cutting
    # ------------------------------------------------------------------------------------------------------------------

    def styles(self) -> list[Style]:
        """The styles that suit this batch, the likeliest first.

        Where hardly any of the critical section's work is free, some samples must lead the queue; where it
        needs what owes nothing, which of these comes first is open.
        """
        size, waves = self.size[self.critical.name], self.waves[self.critical.name]
        work = [0, 0, 0]
        for s, kind in zip(size, self.kind, strict=True):
            work[waves[kind]] += s
        soonest = [True, False] if work[NEEDY] > SCARCE * sum(work) else [False]
        if work[FREE] < SCARCE * sum(work):
            return [Style(lead, soon) for lead in (LEAD, 0) for soon in soonest]
        return [Style(0, soon) for soon in soonest[::-1]]

    def wavefront(self, style: Style) -> dict[str, Table]:
        """Micro-batches of balanced replicas, cut as the critical section wants them."""
        if style.soonest != self._style.soonest:
            self._set_style(style)
        turn = self.turns(self.dealt, style.lead)
        return self._tables([(r, t) for r, some in enumerate(self.dealt.critical) for t in some], turn)

    def queued(self, queues: Sequence[Sequence[Lot]], turn: Column) -> dict[str, Table]:
        """Micro-batches of which the critical section's replicas take those in their queues, each in its
        queue's order; the other sections take samples by turn."""
        tables = self._tables([(r, t) for r, queue in enumerate(queues) for t in queue], turn)
        for stage in self.graph.stages[self.critical.name]:
            table = tables[stage.name]
            place = list(range(len(table.micro_batches)))
            tables[stage.name] = replace(table, wave=[0] * len(place), urgency=place)
        return tables

    def _tables(self, critical: Cut, turn: Column) -> dict[str, Table]:
        cuts = {self.critical.whole: critical}
        for name, stages in self.plan.pipelines.items():
            if name not in cuts:
                cuts[name] = self._cut(stages[-1], self.dealt.positions[stages[-1].name], turn)
        found: dict[str, Table] = {}
        for s in self.plan.sections:
            first = found.get(self.graph.stages[s.name][0].name)
            found[s.name] = self.table(s, cuts[s.whole], turn) if first is None else self._at_stage(s, first)
        return found

    def _at_stage(self, section: Section, first: Table) -> Table:
        """The table of a later stage, whose micro-batches are as urgent as at the first one."""
        lots = [m.samples for m in first.micro_batches]
        micros = _micros(section, [m.replica for m in first.micro_batches], lots)
        forward, backward = self.times(section, lots)
        kept = self.costs.kept(section, lots)
        return replace(
            first,
            micro_batches=micros,
            forward=forward,
            backward=backward,
            weight=weight_parts(section, backward),
            kept=kept,
        )

    def times(self, section: Section, lots: Sequence[Lot]) -> tuple[Column, Column]:
        """(forward, backward) ns of micro-batches, which all pass the section."""
        if set(map(len, lots)) - {1}:
            return self.costs.of(section, lots)
        at, (forward, backward) = [p for (p,) in lots], self.alone[section.name]
        return list(map(forward.__getitem__, at)), list(map(backward.__getitem__, at))

    def turns(self, dealt: Dealt, lead: int) -> Column:
        """When the critical section wants each sample: how long its replica has work before it that is more
        urgent.

        What needs upstream comes first, so these times are those of a section that finds everything ready;
        before all else come `lead` samples of each replica that upstream has ready soonest.
        """
        name = self.critical.name
        size, urgency, waves, head = self.size[name], self.urgency[name], self.waves[name], self.head[name]
        turn = [sum(size)] * self.count
        for some in dealt.critical:
            queue = sorted(
                (
                    waves[self.kind[t[0]]],
                    urgency[t[0]] if len(t) == 1 else sum(map(urgency.__getitem__, t)),
                    t,
                )
                for t in some
            )
            if lead:
                first = sorted(
                    (q for q in queue if q[0] < FREE), key=lambda q: max(map(head.__getitem__, q[2]))
                )[:lead]
                queue = first + [q for q in queue if q not in first]
            time = 0
            for _, _, lot in queue:
                for p in lot:
                    turn[p] = time
                time += size[lot[0]] if len(lot) == 1 else sum(map(size.__getitem__, lot))
        return turn

    def dataset_order(self) -> dict[str, Table]:
        """Micro-batches of consecutive samples, dealt to the replicas in turn."""
        tables: dict[str, Table] = {}
        for s in self.plan.sections:
            positions = self.active[s.name]
            chunks = [
                tuple(positions[i : i + s.micro_batch]) for i in range(0, len(positions), s.micro_batch)
            ]
            tables[s.name] = self.table(
                s, [(i % s.mesh.dp, chunk) for i, chunk in enumerate(chunks)], list(range(self.count))
            )
        return tables

    def _cut(self, section: Section, dealt: list[list[int]], turn: Column) -> Cut:
        """Even micro-batches of one kind each: by turn, and within a turn the largest together, which wastes
        the least padding."""
        if section.micro_batch == 1:
            return [(r, (p,)) for r, positions in enumerate(dealt) for p in positions]
        size, upstream, cut = self.size[section.name], self.upstream[section.name], []
        for r, positions in enumerate(dealt):
            groups: dict[int, list[int]] = defaultdict(list)
            for p in sorted(positions, key=lambda p: (turn[p], -upstream[p], -size[p], p)):
                groups[self.kind[p]].append(p)
            for group in groups.values():
                count = -(-len(group) // section.micro_batch)
                bounds = [i * len(group) // count for i in range(count + 1)]
                cut += [(r, tuple(group[a:b])) for a, b in pairwise(bounds)]
        return halved(self.costs, self.graph.stages[section.name], cut)

    def table(self, section: Section, cut: Cut, turn: Column) -> Table:
        """The columns of a section's micro-batches; with empty ones, where all replicas of the section must
        have equally many."""
        cut = _evened(cut, section.mesh.dp) if gathers(section) else cut
        name, waves, urgency = section.name, self.waves[section.name], self.urgency[section.name]
        owed = self.upstream[self.graph.stages[name][-1].name]
        lots = [t for _, t in cut]
        alone = set(map(len, lots)) <= {1}
        sets = lots if alone else [tuple(sorted(t)) for t in lots]
        micros = _micros(section, [r for r, _ in cut], sets)
        if alone:
            at = [p for (p,) in lots]
            columns = (
                list(map(c.__getitem__, at)) for c in (*self.alone[name], owed, urgency, turn, self.kind)
            )
            forward, backward, upstream, urgencies, turns, kinds = columns
            wave = list(map(waves.__getitem__, kinds))
            kept = self.costs.kept(section, lots)
            return Table(
                micros,
                forward,
                backward,
                weight_parts(section, backward),
                kept,
                upstream,
                wave,
                urgencies,
                turns,
            )
        forward, backward = self.costs.of(section, lots)
        upstream, urgencies = ([sum(c[p] for p in t) for t in lots] for c in (owed, urgency))
        wave = [min((waves[self.kind[p]] for p in t), default=FREE) for t in lots]
        turns = [min((turn[p] for p in t), default=0) for t in lots]
        kept = self.costs.kept(section, lots)
        return Table(
            micros, forward, backward, weight_parts(section, backward), kept, upstream, wave, urgencies, turns
        )


def _micros(section: Section, replica: Iterable[int], lots: Sequence[Lot]) -> tuple[MicroBatch, ...]:
    """The section's micro-batches, without a call for each of the thousands."""
    return tuple(made(MicroBatch, (range(len(lots)), repeat(section.name), replica, lots)))


def _evened(cut: Cut, replicas: int) -> Cut:
    """The cut with empty micro-batches for replicas that have fewer than others."""
    counts = Counter(r for r, _ in cut)
    most = max(counts.values(), default=0)
    return cut + [(r, ()) for r in range(replicas) for _ in range(most - counts[r])]


def _level(load: dict[int, int], team: Iterable[Section]) -> None:
    """All ranks of a replica are as busy as the busiest of them."""
    for ranks in (ranks for s in team for ranks in replicas(s) if len(ranks) > 1):
        load |= dict.fromkeys(ranks, max(load[r] for r in ranks))
