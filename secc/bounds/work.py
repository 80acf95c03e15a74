"""What one global batch owes under a plan, sample by sample: the common ground of the bounds and of the exact
schedule.

A sample passes through every section that is active for it: forward along the edges, backward against them
where gradients return. With its durations alone that gives, for each forward and backward, a *head*, the time
that must pass before it can start, and a *tail*, the time that must pass after its end until the step ends:
the longest ways through the sample's own work, plus the messages between ranks, plus what closes a section
(the reduction of its gradients).

A section that runs ahead can have done its work in the step before, so it delays nothing; what it owes is for
`secc/bounds/steady_state.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from secc.bounds.additive import parts
from secc.bounds.traffic import Traffic, message_ns, sample_bytes
from secc.runtime.plan.expr_eval import evaluate
from secc.runtime.plan.predicted_costs import Costs
from secc.runtime.plan.schema import Edge, Plan, Section
from secc.runtime.plan.section_graph import Graph
from secc.runtime.plan.step_program import (
    SampleMeta,
    active,
    computations,
    owes_backward,
    replica_ranks,
    returns_gradient,
    weight_part,
)
from secc.runtime.schedule.cross_step_prefetch import sections


@dataclass(frozen=True, slots=True)
class Unit:
    """Forward and backward of one sample in one section, which run on one rank. All times in ns.

    `forward`, `backward`: durations of the sample alone. `forward_weight`, `backward_weight`: what it adds to
    any micro-batch. Heads and tails as the module says; those of the backward are None in a section that owes
    none. Of a split backward all this is that of its first part; `last`, `last_weight` and `last_tail` are
    the second part's duration, what it adds, and the tail behind it.
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
    last: int = 0
    last_weight: int = 0
    last_tail: int | None = None


@dataclass(frozen=True)
class Arc:
    """An edge between sections as the schedule sees it: `gradient` returns, and each sample's message takes
    `wait` ns each way."""

    src: str
    dst: str
    gradient: bool
    wait: Mapping[int, int]


class Work:
    """The units of one global batch, by section, in the order of the plan's graph."""

    def __init__(self, plan: Plan, samples: Sequence[SampleMeta], traffic: Traffic | None = None) -> None:
        self.plan, self.samples, self.traffic = plan, samples, traffic or Traffic(plan)
        graph = Graph(plan)
        self.sections = graph.order
        self.ahead = (
            frozenset(s.name for s in sections(plan, graph)) if plan.run_ahead_gib > 0 else frozenset[str]()
        )
        self.ranks = {s.name: replica_ranks(s) for s in plan.sections}
        self.active = {
            s.name: [p for p, x in enumerate(samples) if active(s.when, x.pattern)] for s in plan.sections
        }
        self.closing = {s.name: self.traffic.closing_ns(s.name) for s in plan.sections}
        self._costs = Costs(plan, samples)
        self._alone = {s.name: self._times(s) for s in plan.sections}
        named = {s.name: s for s in plan.sections}
        self.arcs = [Arc(e.src, e.dst, returns_gradient(e, named), self._waits(e)) for e in plan.edges]
        self.units = self._units()

    def _times(self, section: Section) -> dict[int, tuple[int, int, int]]:
        """(forward, backward, second part of a split backward) of each active sample on its own."""
        forward, backward = self._costs.alone(section)
        later = [weight_part(section, b) for b in backward]
        return {p: (forward[p], backward[p] - later[p], later[p]) for p in self.active[section.name]}

    def _waits(self, edge: Edge) -> dict[int, int]:
        """The message of each sample that both ends of an edge see, over the fastest link there is."""
        both = set(self.active[edge.src]) & set(self.active[edge.dst])
        link = self.traffic.fastest(edge)
        return {p: message_ns(link, [sample_bytes(edge, self._costs.sizes(p))] if link else ()) for p in both}

    def _units(self) -> dict[str, list[Unit]]:
        heads, tails = self._heads(), self._tails()
        found: dict[str, list[Unit]] = {}
        for s in self.sections:
            weights, backward = self._weights(s), owes_backward(s)
            last = self.closing[s.name] if computations(s)[-1] == "W" else None
            found[s.name] = []
            for p in self.active[s.name]:
                f, b = ("F", s.name, p), ("B", s.name, p)
                late = (heads[b], tails[b]) if backward else (None, None)
                (own, total), (forward, inputs, later) = weights[p], self._alone[s.name][p]
                first = total * (1000 - s.weight_permille) // 1000
                unit = Unit(
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

    def least(self, section: str) -> list[int]:
        """The least that each active sample adds to a section's work, forward and backward, however
        micro-batches are formed."""
        found = self.plan.section(section)
        texts = (found.cost.forward_ns, found.cost.backward_ns if owes_backward(found) else "0")
        together = max(1, len(self.active[section]))
        forward, backward = (self._share(text, self.active[section], together) for text in texts)
        return [forward[p] + backward[p] for p in self.active[section]]

    def _weights(self, section: Section) -> dict[int, tuple[int, int]]:
        """For each sample what it adds to a micro-batch's forward and backward: all of it, where
        micro-batches are single samples.

        Of a split backward both parts count.
        """
        name, together = section.name, min(section.micro_batch, len(self.active[section.name]))
        if together <= 1:
            forward, backward = self._costs.alone(section)
            return {p: (forward[p], backward[p]) for p in self.active[name]}
        texts = (section.cost.forward_ns, section.cost.backward_ns if owes_backward(section) else "0")
        forward, backward = (self._share(text, self.active[name], together) for text in texts)
        return {p: (forward[p], backward[p]) for p in self.active[name]}

    def _share(self, text: str, positions: Sequence[int], together: int) -> dict[int, int]:
        """Each sample's part of a time, by the branch of its maxima that says most."""
        branches = [
            {
                p: evaluate(b.additive, self._costs.sizes(p))
                + evaluate(b.rest, self._costs.sizes(p)) // together
                for p in positions
            }
            for b in parts(text, self.plan.symbols)
        ]
        return max(branches, key=lambda shares: sum(shares.values()))

    # -- longest ways
    # -------------------------------------------------------------------------------------------------------------

    def _heads(self) -> dict[tuple[str, str, int], int]:
        """The earliest start of each forward and backward if every sample had the ranks for itself."""
        heads: dict[tuple[str, str, int], int] = {}
        for s in self.sections:
            into = [a for a in self.arcs if a.dst == s.name and a.src not in self.ahead]
            for p in self.active[s.name]:
                ends = (
                    heads["F", a.src, p] + self._alone[a.src][p][0] + a.wait[p] for a in into if p in a.wait
                )
                heads["F", s.name, p] = max(ends, default=0)
        for s in reversed(self.sections):
            back = [a for a in self.arcs if a.src == s.name and a.gradient]
            for p in self.active[s.name] if owes_backward(s) else ():
                ends = [
                    heads["B", a.dst, p] + self._alone[a.dst][p][1] + a.wait[p] for a in back if p in a.wait
                ]
                heads["B", s.name, p] = max([heads["F", s.name, p] + self._alone[s.name][p][0], *ends])
        return heads

    def _tails(self) -> dict[tuple[str, str, int], int]:
        """The time after the end of each forward and backward that the sample still takes until its sections
        are closed."""
        tails: dict[tuple[str, str, int], int] = {}
        for s in self.sections:
            back = [a for a in self.arcs if a.dst == s.name and a.gradient]
            for p in self.active[s.name] if owes_backward(s) else ():
                rest = (
                    a.wait[p] + self._alone[a.src][p][1] + tails["B", a.src, p] for a in back if p in a.wait
                )
                tails["B", s.name, p] = max([self._alone[s.name][p][2] + self.closing[s.name], *rest])
        for s in reversed(self.sections):
            out = [a for a in self.arcs if a.src == s.name]
            for p in self.active[s.name]:
                rest = [
                    a.wait[p] + self._alone[a.dst][p][0] + tails["F", a.dst, p] for a in out if p in a.wait
                ]
                own = [self._alone[s.name][p][1] + tails["B", s.name, p]] if owes_backward(s) else []
                tails["F", s.name, p] = max([self.closing[s.name], *own, *rest])
        return tails
