"""Work of one global batch under a plan, sample by sample: input of the bounds and of the exact schedule.

A sample passes through every section that is active for it: forward along the edges, backward against them
where gradients return. Its durations alone give, for each forward and backward, a *head* (time that must pass
before it can start) and a *tail* (time from its end to the end of the step): the longest paths through the
sample's own work, plus messages between ranks, plus the reduction of a section's gradients.

A prefetching section can have done its work in the step before, so it delays nothing; its own work is bounded
in `secc/bounds/steady_state.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from secc.bounds.additive import is_subadditive, split_additive
from secc.bounds.traffic import Traffic, message_ns, sample_bytes
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.sample_predicates import is_active
from secc.runtime.plan.schema import Cost, Edge, Plan, Section, SubgroupCost
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import (
    SampleMeta,
    compute_kinds,
    owes_backward,
    replica_first_ranks,
    returns_gradient,
    weight_backward_ns,
)
from secc.runtime.schedule.cross_step_prefetch import find_prefetchable_sections

# Sums are rounded: a sample may add more to a micro-batch's bytes than it keeps alone, but at most this
# much more.
ROUNDING_DIVISOR, ROUNDING_BYTES = 1000, 4096


@dataclass(frozen=True, slots=True)
class SampleVisit:
    """Forward and backward of one sample in one section, which run on one rank. All times in ns.

    forward, backward: durations of the sample alone.
    forward_weight, backward_weight: what the sample adds to any micro-batch.
    forward_head, forward_tail, backward_head, backward_tail: see the module; None for a backward that is
        not owed.
    second_part, second_part_weight, second_part_tail: the weight-gradient part of a split backward; the
        backward fields are then those of the first part.
    """

    section: str
    sample: int
    forward: int
    backward: int
    forward_weight: int
    backward_weight: int
    forward_head: int
    forward_tail: int
    backward_head: int | None
    backward_tail: int | None
    second_part: int = 0
    second_part_weight: int = 0
    second_part_tail: int | None = None


@dataclass(frozen=True)
class WorkEdge:
    """An edge between sections. `returns_gradient`: whether gradients return; `message_ns`: each sample's
    message, each way."""

    src: str
    dst: str
    returns_gradient: bool
    message_ns: Mapping[int, int]


@dataclass(frozen=True)
class PassParts:
    """A lower bound in ns on one pass of a micro-batch through a section: what each of its samples adds, by
    position in the global batch, and what the pass takes `once`, whatever the samples."""

    added: Mapping[int, int]
    once: int

    def scale_time(self, permille: int) -> PassParts:
        """Returns the parts with `permille` thousandths of their times."""
        if permille == 1000:
            return self
        return PassParts(
            {p: ns * permille // 1000 for p, ns in self.added.items()}, self.once * permille // 1000
        )


class BatchWork:
    """Visits of one global batch by section, in the order of the plan's graph."""

    def __init__(self, plan: Plan, samples: Sequence[SampleMeta], traffic: Traffic | None = None) -> None:
        self.plan, self.samples, self.traffic = plan, samples, traffic or Traffic(plan)
        graph = SectionGraph(plan)
        self.sections = graph.topological_order
        self.prefetching = (
            frozenset(s.name for s in find_prefetchable_sections(plan, graph))
            if plan.run_ahead_gib > 0
            else frozenset[str]()
        )
        self.replica_ranks = {s.name: replica_first_ranks(s) for s in plan.sections}
        self.active_samples = {
            s.name: [p for p, x in enumerate(samples) if is_active(s.when, x.pattern)] for s in plan.sections
        }
        self._costs = PredictedCosts(plan, samples)
        self.closing_ns = {s.name: self._closing_ns(s) for s in plan.sections}
        self._sample_times = {s.name: self._measure_samples(s) for s in plan.sections}
        sections_by_name = {s.name: s for s in plan.sections}
        self.edges = [
            WorkEdge(e.src, e.dst, returns_gradient(e, sections_by_name), self._message_times(e))
            for e in plan.edges
        ]
        self._weights = {s.name: self._additive_weights(s) for s in self.sections}
        self.visits = self._build_visits(self.edges, self.prefetching, self.closing_ns, self._weights)

    def _closing_ns(self, section: Section) -> int:
        """Least time between a section's last backward and its updated parameters, 0 if nothing is summed."""
        least = self.traffic.section_closing_ns(section.name)
        if not least or not self.active_samples[section.name] or not owes_backward(section):
            return least
        ways = self._largest_ways(section)
        forward_ns = max(evaluate_expr(cost.forward_ns, sizes) for cost, sizes in ways)
        backward_ns = max(evaluate_expr(cost.backward_ns, sizes) for cost, sizes in ways)
        if self.always_splits(section):
            backward_ns = weight_backward_ns(section, backward_ns)
        # Replicas with some of the experts only may have no forward that hides their gathers.
        hiding_ns = forward_ns if section.mesh.ep == 1 else None
        return self.traffic.section_closing_ns(section.name, backward_ns, hiding_ns)

    def always_splits(self, section: Section) -> bool:
        """Whether no micro-batch of at most as many samples as in the plan has its backward in one part."""
        if not section.weight_permille or not section.room_bytes:
            return section.weight_permille > 0
        kept = max(
            evaluate_expr(c.saved or "0", sizes) + evaluate_expr(c.kept_between or "0", sizes)
            for c, sizes in self._largest_ways(section)
        )
        return kept <= section.room_bytes

    def unsplit_bytes(self, section: Section) -> dict[int, int] | None:
        """Bytes of each active sample that add up to more than the section's room in every micro-batch with
        its backward in one part; None if that is not known."""
        cost, ways = section.cost, [section.cost, *(s.cost for s in section.subgroups)]
        texts = [text for c in ways for text in (c.saved, c.kept_between)]
        if not section.room_bytes or not all(text and is_subadditive(text) for text in texts):
            return None
        sizes = [(p, self._costs.sample_sizes(p)) for p in self.active_samples[section.name]]
        if section.may_deal:  # parts that are dealt keep less
            dealt = [
                1 + evaluate_expr(s.cost.kept_between, own) / max(1, evaluate_expr(s.cost.saved, own))
                for s in section.subgroups
                for _, own in sizes
            ]
            if 2 * max(dealt, default=0) * section.subgroup_bytes > section.room_bytes:
                return None
        found = {
            p: evaluate_expr(cost.saved, own) + evaluate_expr(cost.kept_between, own) for p, own in sizes
        }
        return {p: n + n // ROUNDING_DIVISOR + ROUNDING_BYTES for p, n in found.items()}

    def least_split_bytes(self, section: Section) -> dict[int, int]:
        """What each active sample adds at least to the bytes that a micro-batch keeps on a rank, on average,
        between the parts of a split backward."""
        positions = self.active_samples[section.name]
        found = self._bytes_between_parts(section.cost, positions)
        for subgroup, fitting in self._fitting_samples(section):
            of_subgroup = self._bytes_between_parts(subgroup.cost, fitting)
            for p in fitting:
                found[p] = min(found[p], subgroup.ranks * of_subgroup[p] // section.mesh.cp)
        return found

    def _bytes_between_parts(self, cost: Cost, positions: Sequence[int]) -> dict[int, int]:
        saved, between = (
            self._additive_bytes(text or "0", positions) for text in (cost.saved, cost.kept_between)
        )
        return {p: saved[p] + between[p] for p in positions}

    def _largest_ways(self, section: Section) -> list[tuple[Cost, dict[str, int]]]:
        """Costs of what ranks compute together, all of a replica or a subgroup of cp, with sizes that no
        micro-batch exceeds there."""
        ways = [(section.cost, self._largest_sizes(section, self.active_samples[section.name]))]
        return ways + [
            (s.cost, self._largest_sizes(section, fitting))
            for s, fitting in self._fitting_samples(section)
            if fitting
        ]

    def _largest_sizes(self, section: Section, positions: Sequence[int]) -> dict[str, int]:
        """Sizes that no micro-batch of these samples exceeds: of each kind of rows those of the samples with
        most, as many as it may have; of widths the largest."""
        rows = {s.name for s in self.plan.symbols if s.kind == "rows"}
        most = sys.maxsize if section.whole_batch else section.micro_batch
        found: dict[str, int] = {}
        for name, column in self._costs.sample_columns.items():
            own = sorted((column[p] for p in positions), reverse=True)
            found[name] = sum(own[:most]) if name in rows else own[0]
        return found

    def _measure_samples(self, section: Section) -> dict[int, tuple[int, int, int]]:
        """(forward, backward, second part of a split backward) ns of each active sample alone."""
        # Copies: sections with the same costs share the lists.
        forward, backward = map(list, self._costs.sample_times(section))
        for subgroup, fitting in self._fitting_samples(section):
            own = self._costs.sample_times(replace(section, cost=subgroup.cost))
            for p in fitting:
                forward[p], backward[p] = min(forward[p], own[0][p]), min(backward[p], own[1][p])
        second_parts = [weight_backward_ns(section, b) for b in backward]
        return {
            p: (forward[p], backward[p] - second_parts[p], second_parts[p])
            for p in self.active_samples[section.name]
        }

    def _fitting_samples(self, section: Section) -> list[tuple[SubgroupCost, list[int]]]:
        """Subgroups of the ranks of cp with the active samples that they may compute without the others."""
        if not section.may_deal:
            return []
        fits = [(s, self._costs.fitting_samples(section, s)) for s in section.subgroups]
        return [(s, [p for p in self.active_samples[section.name] if fit[p]]) for s, fit in fits]

    def _message_times(self, edge: Edge) -> dict[int, int]:
        """Message of each sample that both ends of an edge handle, over the fastest link there is. Replicas
        of several ranks exchange it in slices that may all travel at once (`route_message`)."""
        shared_samples = set(self.active_samples[edge.src]) & set(self.active_samples[edge.dst])
        link = self.traffic.fastest_link(edge)
        slices = max(self.plan.find_section(name).mesh.replica_size for name in (edge.src, edge.dst))
        return {
            p: message_ns(link, [sample_bytes(edge, self._costs.sample_sizes(p)) // slices] if link else ())
            for p in shared_samples
        }

    def visits_in_any_plan(self, own_sizes: bool) -> dict[str, list[SampleVisit]]:
        """Visits with what holds in any plan with these layouts: messages may stay on a rank, gradient sums
        count as nothing, and `sections_ahead` may have worked ahead. own_sizes: micro-batches have at most as
        many samples as in this plan; else any number."""
        edges = [replace(a, message_ns=dict.fromkeys(a.message_ns, 0)) for a in self.edges]
        weights = self._weights if own_sizes else self._weights_of_any_size
        return self._build_visits(edges, self.sections_ahead(), dict.fromkeys(self.closing_ns, 0), weights)

    def sections_ahead(self) -> set[str]:
        """The sections that no update changes, which may have worked ahead in some plan."""
        ahead = set[str]()
        for s in self.sections:
            if not owes_backward(s) and all(a.src in ahead for a in self.edges if a.dst == s.name):
                ahead.add(s.name)
        return ahead

    def _build_visits(
        self,
        edges: Sequence[WorkEdge],
        ahead: Collection[str],
        closing_ns: Mapping[str, int],
        weights_of_sections: Mapping[str, Mapping[int, tuple[int, int]]],
    ) -> dict[str, list[SampleVisit]]:
        heads, tails = self._heads(edges, ahead), self._tails(edges, closing_ns)
        found: dict[str, list[SampleVisit]] = {}
        for s in self.sections:
            weights, backward = weights_of_sections[s.name], owes_backward(s)
            last = closing_ns[s.name] if compute_kinds(s)[-1] == "W" else None
            found[s.name] = []
            for p in self.active_samples[s.name]:
                f, b = ("F", s.name, p), ("B", s.name, p)
                late = (heads[b], tails[b]) if backward else (None, None)
                (own, total), (forward, inputs, later) = weights[p], self._sample_times[s.name][p]
                first = total * (1000 - s.weight_permille) // 1000
                unit = SampleVisit(
                    s.name,
                    p,
                    forward,
                    inputs,
                    own,
                    first,
                    heads[f],
                    tails[f],
                    *late,
                    later,
                    total - first,
                    last,
                )
                found[s.name].append(unit)
        return found

    def longest_way_ns(self) -> int:
        """The longest way of one sample through all its sections and back, in any plan with these layouts:
        messages may stay on a rank, and sections that no update changes may have worked ahead."""
        edges = [replace(a, message_ns=dict.fromkeys(a.message_ns, 0)) for a in self.edges]
        ahead = self.sections_ahead()
        heads = self._heads(edges, ahead)
        tails = self._tails(edges, dict.fromkeys(self.closing_ns, 0))
        return max(
            (
                heads["F", s.name, p] + self._sample_times[s.name][p][0] + tails["F", s.name, p]
                for s in self.sections
                if s.name not in ahead
                for p in self.active_samples[s.name]
            ),
            default=0,
        )

    def least_work(self, section: str, own_sizes: bool = False) -> list[int]:
        """The least that each active sample adds to a section's work, forward and backward, however
        micro-batches are formed. own_sizes: with at most as many samples as in the plan."""
        weights = self._weights if own_sizes else self._weights_of_any_size
        return [sum(weights[section][p]) for p in self.active_samples[section]]

    @cached_property
    def _weights_of_any_size(self) -> dict[str, dict[int, tuple[int, int]]]:
        """(forward, backward) that samples add to micro-batches of any number of samples, as far as what
        these keep for the backward fits a rank."""
        return {
            s.name: self._shares_of(s, max(1, len(self.active_samples[s.name])), self.room_of_one(s))
            for s in self.sections
        }

    def room_of_one(self, section: Section) -> int:
        """Bytes that a micro-batch of several samples may keep at most on a rank, next to the section's
        weights, in any plan; 0 for any number."""
        cluster = self.traffic.cluster
        if cluster is None or section.whole_batch or not section.room_bytes or not owes_backward(section):
            return 0
        usable = max(part.device.usable_memory for part in cluster.parts_by_kind)
        return max(1, usable - self.least_weight_bytes(section))

    def least_weight_bytes(self, section: Section) -> int:
        """Bytes of weights that each rank of a section holds, however many replicas there are. Tied ones may
        be another section's, and experts that are modules lie on one rank of several."""
        if section.sharding == "zero3" or section.offload == "weights":
            return 0
        elsewhere = {s.name for s in section.shards if s.holder >= 0}
        elsewhere.update(name for tie in self.plan.ties for name in tie.names)
        return sum(self.traffic.bytes_on_rank(n) for n in section.params if n not in elsewhere)

    def least_saved_bytes(self, section: Section) -> dict[int, int]:
        """The least that each active sample adds to the bytes that micro-batches of single samples, or dealt
        ones, keep on a rank."""
        saved = self._costs.saved_bytes_of_samples(section.cost)
        found = {p: saved[p] for p in self.active_samples[section.name]}
        for subgroup, fitting in self._fitting_samples(section):
            of_subgroup = self._costs.saved_bytes_of_samples(subgroup.cost)
            for p in fitting:
                found[p] = min(found[p], subgroup.ranks * of_subgroup[p] // section.mesh.cp)
        return found

    def _additive_weights(self, section: Section) -> dict[int, tuple[int, int]]:
        """(forward, backward) of each sample that it adds to a micro-batch; all of it where micro-batches are
        single samples.

        For a split backward this counts both parts.
        """
        return self._shares_of(section, min(section.micro_batch, len(self.active_samples[section.name])))

    def _shares_of(self, section: Section, together: int, room: int = 0) -> dict[int, tuple[int, int]]:
        """(forward, backward) that each sample adds to micro-batches of up to `together` samples, that keep
        at most `room` bytes if they have several (0: any number). Of one that a subgroup of the ranks of cp
        may compute, it is no more than the subgroup's share of its replica."""
        shares = self._shares_of_cost(section, section.cost, together, room)
        for subgroup, fitting in self._fitting_samples(section):
            of_subgroup = self._shares_of_cost(section, subgroup.cost, together, room)
            for p in fitting:
                forward, backward = (
                    min(own, subgroup.ranks * ns // section.mesh.cp)
                    for own, ns in zip(shares[p], of_subgroup[p], strict=True)
                )
                shares[p] = forward, backward
        return shares

    def _shares_of_cost(
        self, section: Section, cost: Cost, together: int, room: int = 0
    ) -> dict[int, tuple[int, int]]:
        positions = self.active_samples[section.name]
        if together <= 1:
            forward, backward = self._costs.sample_times(replace(section, cost=cost))
            return {p: (forward[p], backward[p]) for p in positions}
        texts = (cost.forward_ns, cost.backward_ns if owes_backward(section) else "0")
        kept = self._additive_bytes(cost.saved, positions) if room and cost.saved else None
        forward, backward = (self._additive_shares(text, positions, together, kept, room) for text in texts)
        return {p: (forward[p], backward[p]) for p in positions}

    def pass_parts(self, section: Section, text: str) -> PassParts:
        """The parts of a pass that takes `text`, by the branch of its maxima that is largest in micro-batches
        of as many samples as in the plan."""
        positions, sizes = self.active_samples[section.name], self._costs.sample_sizes
        found: list[PassParts] = []
        for b in split_additive(text, self.plan.symbols):
            rest = {p: evaluate_expr(b.rest_text, sizes(p)) for p in positions}
            added = {p: evaluate_expr(b.additive_text, sizes(p)) + min(0, rest[p]) for p in positions}
            found.append(PassParts(added, max(0, min(rest.values(), default=0))))
        together = -(-len(positions) // section.micro_batch)
        return max(found, key=lambda parts: sum(parts.added.values()) + together * parts.once)

    def kept_bytes(self, section: Section) -> dict[int, int]:
        """What each active sample adds at least to the bytes that a micro-batch keeps on a rank for its
        backward."""
        return self._additive_bytes(section.cost.saved, self.active_samples[section.name])

    def _additive_bytes(self, text: str, positions: Sequence[int]) -> dict[int, int]:
        """What each sample adds at least to the bytes that a micro-batch keeps, by the branch of its maxima
        with the largest sum."""
        sizes = self._costs.sample_sizes
        branches = [
            {p: evaluate_expr(b.additive_text, sizes(p)) for p in positions}
            for b in split_additive(text, self.plan.symbols)
        ]
        return max(branches, key=lambda found: sum(found.values()))

    def _additive_shares(
        self,
        text: str,
        positions: Sequence[int],
        together: int,
        kept: Mapping[int, int] | None = None,
        room: int = 0,
    ) -> dict[int, int]:
        """Each sample's share of a time, by the branch of its maxima with the largest sum. Its part of what
        does not add up is that of one of `together` samples; or, of micro-batches that keep at most `room`
        bytes, that of the bytes `kept` for it, if all samples together have more then."""
        sizes = self._costs.sample_sizes
        branches: list[dict[int, int]] = []
        for b in split_additive(text, self.plan.symbols):
            added = {p: evaluate_expr(b.additive_text, sizes(p)) for p in positions}
            rest = {p: evaluate_expr(b.rest_text, sizes(p)) for p in positions}
            less = {p: min(0, ns) for p, ns in rest.items()}  # what is taken off counts whole
            branches.append({p: added[p] + less[p] + max(0, rest[p]) // together for p in positions})
            if kept is not None:
                part = {p: max(0, rest[p]) * min(kept[p], room) // room for p in positions}
                branches.append({p: added[p] + less[p] + part[p] for p in positions})
        return max(branches, key=lambda shares: sum(shares.values()))

    # -- longest ways

    def _heads(self, edges: Sequence[WorkEdge], ahead: Collection[str]) -> dict[tuple[str, str, int], int]:
        """Earliest start of each forward and backward if every sample had the ranks for itself, and the
        results of sections `ahead` were there."""
        heads: dict[tuple[str, str, int], int] = {}
        for s in self.sections:
            incoming = [a for a in edges if a.dst == s.name and a.src not in ahead]
            for p in self.active_samples[s.name]:
                ends = (
                    heads["F", a.src, p] + self._sample_times[a.src][p][0] + a.message_ns[p]
                    for a in incoming
                    if p in a.message_ns
                )
                heads["F", s.name, p] = max(ends, default=0)
        for s in reversed(self.sections):
            returning = [a for a in edges if a.src == s.name and a.returns_gradient]
            for p in self.active_samples[s.name] if owes_backward(s) else ():
                ends = [
                    heads["B", a.dst, p] + self._sample_times[a.dst][p][1] + a.message_ns[p]
                    for a in returning
                    if p in a.message_ns
                ]
                heads["B", s.name, p] = max([heads["F", s.name, p] + self._sample_times[s.name][p][0], *ends])
        return heads

    def _tails(
        self, edges: Sequence[WorkEdge], closing_ns: Mapping[str, int]
    ) -> dict[tuple[str, str, int], int]:
        """Time from the end of each forward and backward until the sample's sections have reduced their
        gradients, which takes `closing_ns`."""
        tails: dict[tuple[str, str, int], int] = {}
        for s in self.sections:
            returning = [a for a in edges if a.dst == s.name and a.returns_gradient]
            for p in self.active_samples[s.name] if owes_backward(s) else ():
                following = (
                    a.message_ns[p] + self._sample_times[a.src][p][1] + tails["B", a.src, p]
                    for a in returning
                    if p in a.message_ns
                )
                tails["B", s.name, p] = max(
                    [self._sample_times[s.name][p][2] + closing_ns[s.name], *following]
                )
        for s in reversed(self.sections):
            outgoing = [a for a in edges if a.src == s.name]
            for p in self.active_samples[s.name]:
                following = [
                    a.message_ns[p] + self._sample_times[a.dst][p][0] + tails["F", a.dst, p]
                    for a in outgoing
                    if p in a.message_ns
                ]
                own_backward = (
                    [self._sample_times[s.name][p][1] + tails["B", s.name, p]] if owes_backward(s) else []
                )
                tails["F", s.name, p] = max([closing_ns[s.name], *own_backward, *following])
        return tails
