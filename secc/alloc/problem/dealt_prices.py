"""Prices sections that deal their micro-batches to subgroups of the ranks of cp (dynamic cp).

A sample that a subgroup can compute takes its ranks alone, and the others compute other samples meanwhile. So
its share of a replica's time is that of the subgroup, times the part of the ranks that the subgroup has. Of
the subgroups that have memory for it, and of all ranks together, the cheapest counts. Parts that wait for the
longest one are left out, as order and waits are of other closed forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from secc.alloc.problem.candidate_memory import candidate_memory
from secc.alloc.problem.candidates import price_candidate
from secc.alloc.problem.in_flight import in_flight_alternating
from secc.alloc.problem.micro_batch_times import (
    busiest_replica_ns,
    micro_batch_ns_of_samples,
    subgroup_loads,
)
from secc.alloc.problem.section_load import SectionLoad
from secc.alloc.problem.types import Candidate
from secc.alloc.problem.workload import Workload
from secc.runtime.plan.expr_eval import evaluate_expr_columns

LISTED_SAMPLES = 96  # of each pattern, evenly spaced by their time

Columns = Mapping[str, Sequence[int]]


@dataclass
class DealtPrices:
    """Prices a section's candidates as dealing ones. `load` is that of the whole section."""

    work: Workload
    load: SectionLoad

    def __post_init__(self) -> None:
        rows = {name for name, op in self.work.graph.symbols.items() if op.kind.data == "rows"}
        self._rows = rows
        self._known_subgroups: dict[object, list[tuple[int, SectionLoad, str]]] = {}
        self._columns = [
            _spaced_samples(columns, self.load.forward_ns)
            for p in self.load.active_patterns
            if (columns := self.work.listed_sizes.get(p.when))
        ]

    def price_as_divided(self, c: Candidate) -> Candidate:
        """Returns the candidate as one that divides every sample, with the time that this takes."""
        rank = self.work.rank_load(self.load, c.shape)
        priced = price_candidate(self.work, rank, c.dp, c.micro_batch, c.sharding, c.recompute)
        return replace(c, cp_per="section", cp_degrees="any", time_ns=priced.time_ns)

    def price_as_dealt(self, c: Candidate, degrees: str = "any") -> Candidate:
        """Returns a candidate that divides every sample as one that deals its micro-batches, to subgroups as
        `degrees` says, with the time that this takes."""
        dealing = c.with_fields(cp_per="micro_batch", cp_degrees=degrees)
        if not self._columns:
            return dealing
        rank = self.work.rank_load(self.load, c.shape)
        divided = self._sample_ns(c, rank, rank, c.micro_batch)
        longest = max(self._sample_ns(c, rank, rank, 1))
        room = self._room_bytes(c, rank)
        dealt = divided
        for ranks, own, saved in self._subgroups(dealing):
            ns_of_subgroup = self._sample_ns(c, own, rank, c.micro_batch)
            needed = self._evaluate(saved, 1)
            dealt = [
                min(ns, ranks * of_subgroup // c.cp) if size <= room else ns
                for ns, of_subgroup, size in zip(dealt, ns_of_subgroup, needed, strict=True)
            ]
        total, *_ = busiest_replica_ns(self.work, rank, c.dp, c.micro_batch, c.sharding, c.recompute)
        least = max(total * sum(dealt) // max(1, sum(divided)), min(total, longest))
        return dealing.with_fields(time_ns=c.time_ns - total + least)

    def _room_bytes(self, c: Candidate, rank: SectionLoad) -> int:
        """Bytes that a rank has for samples that its subgroup computes, if no other section is on it."""
        memory = candidate_memory(self.work, rank, c)
        held = 1 if self.load.mode == "forward" else in_flight_alternating(self.work, rank, c.micro_batches)
        usable = self.work.cluster.device.usable_memory
        return (usable - memory.total_bytes(held) + memory.activation_bytes(held)) // (
            held if c.pp > 1 else 1
        )

    def _subgroups(self, c: Candidate) -> list[tuple[int, SectionLoad, str]]:
        """The `subgroup_loads` of a candidate (memoised)."""
        key = c.shape, c.subgroup_sizes, c.recompute
        if key not in self._known_subgroups:
            self._known_subgroups[key] = [*subgroup_loads(self.work, self.load, c)]
        return self._known_subgroups[key]

    def _sample_ns(self, c: Candidate, own: SectionLoad, spans: SectionLoad, together: int) -> list[int]:
        """Forward plus backward ns of each listed sample as its share of `together` equal ones. `own` and
        `spans`: see `micro_batch_ns_of_samples`."""
        both = micro_batch_ns_of_samples(
            self.work, own, c, spans, lambda text: self._evaluate(text, together)
        )
        return [ns // together for ns in both]

    def _evaluate(self, text: str, together: int) -> list[int]:
        known, key = self.work.cached_dealt_values, (self.load.name, text, together)
        if key not in known:
            known[key] = [
                value
                for columns in self._columns
                for value in evaluate_expr_columns(
                    text,
                    {n: [together * x for x in c] if n in self._rows else c for n, c in columns.items()},
                    len(next(iter(columns.values()))),
                )
            ]
        return known[key]


def _spaced_samples(columns: Columns, time_ns: str) -> Columns:
    """Returns the columns of at most `LISTED_SAMPLES` samples, the longest among them."""
    count = len(next(iter(columns.values())))
    ns = evaluate_expr_columns(time_ns, columns, count)
    by_time = sorted(range(count), key=lambda i: (-ns[i], i))
    most = min(count, LISTED_SAMPLES)
    taken = [by_time[i * count // most] for i in range(most)]
    return {name: [column[i] for i in taken] for name, column in columns.items()}
