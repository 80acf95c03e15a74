"""The `Workload`: a graph on a cluster with the load of each of its sections, from which candidates are made.

The load is the expected one: a global batch holds `global_batch * share` samples of each input pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import ceil
from operator import ge

import torch
from xdsl.ir import SSAValue

from secc.alloc.problem.pins import PIN_WORDS
from secc.alloc.problem.section_load import RankShare, SectionLoad, compute_rank_load
from secc.alloc.problem.size_spread import measure_spread
from secc.alloc.problem.stackable_layers import count_stackable_layers
from secc.alloc.problem.types import WHOLE, Candidate, ReplicaShape
from secc.cluster import Cluster, Overheads
from secc.cost.model import roofline
from secc.cost.model.patterns_and_transfers import (
    InputPattern,
    SectionTransfer,
    input_patterns,
    micro_batch_sizes,
    most_frequent_sizes,
    section_handles_pattern,
    section_transfers,
)
from secc.cost.model.section_cost import SectionCost, ops_in_section, section_cost
from secc.cost.model.tp_pp_scaling import NO_ENDS, PARAMETER_COUNTS, StageEnds
from secc.errors import UserError
from secc.ir.analysis import sample_sizes
from secc.ir.analysis.dataflow import get_number, get_string
from secc.ir.analysis.whole_batch import whole_batch_of_section
from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import CallOp, GraphOp, SectionOp
from secc.ir.dialect.tensor_type import tensor_type
from secc.runtime.plan.expr_eval import evaluate_expr

# (section, shape, attention, share of the rank if it is not one with most)
RankLoadKey = tuple[str, ReplicaShape, str, RankShare | None]


# What a workload memoises that does not depend on what may be in host memory.
_SHARED_BY_COPIES = (
    "cached_active_samples",
    "cached_whole_batches",
    "cached_layers",
    "cached_rank_loads",
    "cached_sequences",
    "cached_sizes",
    "cached_dealt_values",
)


@dataclass(frozen=True)
class Workload:
    """Everything that candidates are made from. `unshardable` is the reason why the user's optimizer cannot
    be sharded, "" if it can; `coupled` why each rank that trains must have all trained parameters, "" if some
    of them will do.

    `offloads`: what sections may keep in host memory without a pin ("optimizer", "weights", "activations").
    `without_offloads`: the workload that this one is a copy of, with the candidates that are priced already.

    On a cluster of several device kinds, `loads` are priced with the worst figures of all kinds, and
    `by_kind` holds the same workload on each kind alone. The `cached_*` fields memoise results.
    """

    graph: GraphOp
    cluster: Cluster
    global_batch: int
    loads: dict[str, SectionLoad]
    crossings: tuple[SectionTransfer, ...]
    unshardable: str = ""
    coupled: str = ""
    by_kind: tuple[Workload, ...] = ()
    offloads: tuple[str, ...] = ()
    without_offloads: Workload | None = field(default=None, repr=False, compare=False)
    cached_active_samples: dict[str, int] = field(
        init=False, repr=False, compare=False, default_factory=dict[str, int]
    )
    cached_whole_batches: dict[str, str] = field(
        init=False, repr=False, compare=False, default_factory=dict[str, str]
    )
    cached_layers: dict[str, int] = field(
        init=False, repr=False, compare=False, default_factory=dict[str, int]
    )
    cached_rank_loads: dict[RankLoadKey, SectionLoad] = field(
        init=False, repr=False, compare=False, default_factory=dict[RankLoadKey, SectionLoad]
    )
    cached_sequences: dict[str, bool] = field(
        init=False, repr=False, compare=False, default_factory=dict[str, bool]
    )
    cached_sizes: dict[tuple[frozenset[str], int], dict[str, int]] = field(
        init=False,
        repr=False,
        compare=False,
        default_factory=dict[tuple[frozenset[str], int], dict[str, int]],
    )
    # by section, expression and number of equal samples together: of each sample that dealt prices look at
    cached_dealt_values: dict[tuple[str, str, int], list[int]] = field(
        init=False, repr=False, compare=False, default_factory=dict[tuple[str, str, int], list[int]]
    )
    cached_candidates: dict[object, tuple[Candidate, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict[object, tuple[Candidate, ...]]
    )

    @cached_property
    def producing_sections(self) -> frozenset[str]:
        """Sections that feed others."""
        return frozenset(c.src for c in self.crossings)

    @cached_property
    def sharing_sections(self) -> tuple[tuple[str, str], ...]:
        """Pairs of sections that must share devices, whatever is pinned: trained ones, if ranks need all
        trained parameters."""
        trained = [name for name, load in self.loads.items() if load.cost.trainable] if self.coupled else []
        return tuple(pairwise(trained))

    @cached_property
    def listed_sizes(self) -> dict[frozenset[str], dict[str, list[int]]]:
        """Sizes of the listed samples, by pattern, as a column for each symbol; rank memory has to suffice
        for each of them.

        Where micro-batches are padded to the global batch's widths, every width is the largest listed one.
        """
        columns_by_pattern: dict[frozenset[str], dict[str, list[int]]] = {}
        for pattern, sizes in sample_sizes.read_all_samples(self.graph):
            columns = columns_by_pattern.setdefault(pattern, {name: [] for name in sizes})
            for name, size in sizes.items():
                columns[name].append(size)
        if self.graph.widths is not None and self.graph.widths.data == "global":
            for name in (name for name, op in self.graph.symbols.items() if op.kind.data == "width"):
                widest = max((max(columns[name]) for columns in columns_by_pattern.values()), default=0)
                columns_by_pattern = {
                    when: columns | {name: [widest] * len(columns[name])}
                    for when, columns in columns_by_pattern.items()
                }
        return columns_by_pattern

    @cached_property
    def largest_sizes(self) -> dict[frozenset[str], dict[str, list[int]]]:
        """`listed_sizes` of the samples to which no other one of their pattern is at least equal in every
        size: none of the others needs more memory than all of these."""
        return {when: _drop_smaller(columns) for when, columns in self.listed_sizes.items()}

    def mean_micro_batch_sizes(self, pattern: InputPattern, samples: int) -> dict[str, int]:
        """Symbol values of a micro-batch of `samples` mean samples of `pattern`."""
        key = pattern.when, samples
        if key not in self.cached_sizes:
            self.cached_sizes[key] = micro_batch_sizes(self.graph, pattern.sizes, samples)
        return self.cached_sizes[key]

    def for_kind(self, kind: int) -> Workload:
        """Workload on the devices of `kind`, which is the index of a kind or `ALL_KINDS`."""
        return self.by_kind[kind] if self.by_kind and kind >= 0 else self

    def with_cluster(self, cluster: Cluster) -> Workload:
        """Copy of the workload, priced for another cluster."""
        return replace(
            self,
            cluster=cluster,
            by_kind=(),
            loads={name: compute_rank_load(load, WHOLE, cluster) for name, load in self.loads.items()},
        )

    def with_offloads(self, offloads: tuple[str, ...] = PIN_WORDS["offload"]) -> Workload:
        """Copy of the workload in which sections may keep this in host memory."""
        kinds = tuple(replace(work, offloads=offloads) for work in self.by_kind)
        copy = replace(
            self, offloads=offloads, by_kind=kinds, without_offloads=None if self.offloads else self
        )
        vars(copy).update({name: getattr(self, name) for name in _SHARED_BY_COPIES})
        return copy

    def rank_load(
        self, load: SectionLoad, shape: ReplicaShape, attention: str = "", stage: int | None = None
    ) -> SectionLoad:
        """Load of a section on one rank of its replicas of this shape (memoised): the rank of a `stage`, or
        by default the one with most to do. attention: how its ranks of cp attend to each other's rows; by
        default as is pinned, or faster."""
        key = load.name, shape, attention, None if stage is None else load.share_of_stage(shape, stage)
        if key not in self.cached_rank_loads:
            self.cached_rank_loads[key] = (
                compute_rank_load(load, shape, self.cluster, attention, stage)
                if shape.offload != "optimizer"
                else replace(
                    self.rank_load(load, shape._replace(offload="none"), attention, stage), shape=shape
                )
            )
        return self.cached_rank_loads[key]

    def stackable_layers(self, load: SectionLoad) -> int:
        """Number of layers between which pipeline stages of a section can be cut."""
        if load.name not in self.cached_layers:
            self.cached_layers[load.name] = count_stackable_layers(self.graph, load.section, load.cost.layers)
        return self.cached_layers[load.name]

    def has_rows_to_share(self, load: SectionLoad) -> bool:
        """Whether ranks of cp may share the rows of a section's layers: sequences, or the frames of videos
        and pictures that a tower attends to one by one."""
        return load.cost.row_pieces != "0" or load.cost.batch_entries != "0" or self.has_sequences(load)

    def has_sequences(self, load: SectionLoad) -> bool:
        """Whether layers of a section work on tensors [samples, rows, width] with rows that depend on
        samples."""
        if load.name not in self.cached_sequences:
            self.cached_sequences[load.name] = any(
                bool(get_number(op, "layers") or get_number(op, "units"))
                and any(map(_is_sequence, (*op.results, *op.operands)))
                for case in self.graph.cases
                for op in ops_in_section(case, load.name)
                if isinstance(op, CallOp)
            )
        return self.cached_sequences[load.name]

    def whole_batch_kind(self, load: SectionLoad) -> str:
        """How a section takes all samples of a step at once (`whole_batch_of_section`), "" if it does not."""
        if load.name not in self.cached_whole_batches:
            self.cached_whole_batches[load.name] = whole_batch_of_section(self.graph, load.section)
        return self.cached_whole_batches[load.name]

    def active_sample_count(self, load: SectionLoad) -> int:
        """Expected number of active samples of a section in a global batch, rounded up; at least 1."""
        if load.name not in self.cached_active_samples:
            self.cached_active_samples[load.name] = max(1, ceil(self.global_batch * load.sample_share))
        return self.cached_active_samples[load.name]


def _is_sequence(value: SSAValue) -> bool:
    kind = tensor_type(value)
    floating = getattr(torch, kind.torch_dtype).is_floating_point
    return floating and len(kind.shape) == 3 and bool(size_expr.symbol_names(kind.shape[1]))


def build_workload(graph: GraphOp, cluster: Cluster, global_batch: int) -> Workload:
    """Computes costs and expected loads of the graph's sections, producers first.

    Raises UserError where sections feed each other in a circle.
    """
    transfers = tuple(section_transfers(graph))
    patterns = input_patterns(graph)
    loads = {
        name: _build_section_load(graph, section, cluster, patterns)
        for name, section in _order_sections(graph, transfers)
    }
    unshardable, coupled = (get_string(graph, name) or "" for name in ("unshardable", "coupled"))
    work = Workload(graph, cluster, global_batch, loads, transfers, unshardable or coupled, coupled)
    return (
        replace(work, by_kind=tuple(map(work.with_cluster, cluster.parts_by_kind)))
        if cluster.groups
        else work
    )


def _build_section_load(
    graph: GraphOp, section: SectionOp, cluster: Cluster, seen: list[InputPattern]
) -> SectionLoad:
    """Load of a whole section, with the spread of its listed samples' times."""
    mode = section.mode.data if section.mode is not None else "train"
    active = tuple(p for p in seen if section_handles_pattern(section, p))
    sizes = most_frequent_sizes(graph, active)
    whole = SectionLoad(section, mode, section_cost(graph, section), "0", {}, "", active, mean_sizes=sizes)
    load = compute_rank_load(whole, WHOLE, cluster)
    both, *passes = _shares_outside_layers(graph, load, cluster)
    return replace(
        load,
        spread=measure_spread(graph, active, f"{load.forward_ns} + {load.backward_ns['none']}"),
        end_shares=both,
        pass_end_shares=(passes[0], passes[1]),
        outside=_count_outside_layers(graph, load),
    )


def _count_outside_layers(graph: GraphOp, load: SectionLoad) -> tuple[Mapping[str, int], ...]:
    """Counts of the parameters before, behind and outside of a section's layers; empty without layers. Tied
    ones are before and behind, and once outside."""
    if load.cost.layers < 2:
        return ()
    costs = (section_cost(graph, load.section, part) for part in ("before", "behind", "outside"))
    return tuple({key: getattr(cost, key) for key in PARAMETER_COUNTS} for cost in costs)


def _shares_outside_layers(graph: GraphOp, load: SectionLoad, cluster: Cluster) -> list[StageEnds]:
    """The fractions of a section's time, in thousandths, that mean samples spend before and behind its
    layers: of both passes, of the forward, and of the backward."""
    if load.cost.layers < 2:
        return [NO_ENDS] * 3
    device = replace(cluster.device, overheads=Overheads())

    def mean_ns(cost: SectionCost) -> tuple[Fraction, Fraction]:
        texts = (
            roofline.forward_ns_expression(cost, device),
            roofline.backward_ns_expression(cost, load.mode, device),
        )
        sizes = [(p.share, micro_batch_sizes(graph, p.sizes, 1)) for p in load.active_patterns]
        forward, backward = (
            sum((share * evaluate_expr(text, own) for share, own in sizes), Fraction(0)) for text in texts
        )
        return forward, backward

    parts = (section_cost(graph, load.section, "before"), section_cost(graph, load.section, "behind"))
    before, behind, whole = map(mean_ns, (*parts, load.cost))

    def shares_of_ends(*passes: int) -> StageEnds:
        first, last = sum(before[i] for i in passes), sum(behind[i] for i in passes)
        all_ns = max(1, sum(whole[i] for i in passes), first + last)
        return Fraction(round(1000 * first / all_ns), 1000), Fraction(round(1000 * last / all_ns), 1000)

    return [shares_of_ends(0, 1), shares_of_ends(0), shares_of_ends(1)]


def _order_sections(graph: GraphOp, edges: Iterable[SectionTransfer]) -> list[tuple[str, SectionOp]]:
    """Sections in topological order of the transfers between them."""
    left = {s.sym.data: s for s in graph.sections}
    placed: list[tuple[str, SectionOp]] = []
    while left:
        ready = [name for name in left if not any(e.dst == name and e.src in left for e in edges)]
        if not ready:
            raise UserError(
                f"expected sections without cycles, but {', '.join(sorted(left))} feed each other",
                remedy="let coarsen make them one section: name their blocks together",
            )
        placed += [(name, left.pop(name)) for name in ready]
    return placed


def _drop_smaller(columns: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """The columns without rows that another row equals or exceeds in every column."""
    rows = sorted(dict.fromkeys(zip(*columns.values(), strict=True)), key=lambda row: (-sum(row), row))
    found: list[tuple[int, ...]] = []
    for row in rows:
        if not any(all(map(ge, larger, row)) for larger in found):
            found.append(row)
    return {name: list(column) for name, column in zip(columns, zip(*found, strict=True), strict=True)}
