"""Prices ways to run a section on a cluster: step time, fill and drain times and memory of each `Candidate`.

The load is the expected one. A global batch holds `global_batch * share` samples of each input pattern; the
busiest of `dp` replicas gets the dp-th part of a section's active samples, rounded up. As in the scheduler, a
micro-batch holds samples of one pattern; it is priced at the pattern's mean sizes. Pipeline stages, and
replicas that gather parameters together (ZeRO-3), wait for the longest of several micro-batches, so their
times also depend on the spread of the samples (`secc.alloc.problem.size_spread`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain
from math import ceil, gcd, lcm
from typing import NamedTuple

import torch
from xdsl.dialects.builtin import StringAttr
from xdsl.ir import SSAValue

from secc.alloc.problem.pins import PIN_WORDS, Pins
from secc.alloc.problem.size_spread import PERMILLE, SizeSpread, measure_spread
from secc.alloc.problem.stackable_layers import count_stackable_layers
from secc.alloc.problem.types import WHOLE, Candidate, ReplicaShape
from secc.cluster import Cluster, Overheads
from secc.cost.model import cp_scaling, roofline, tp_pp_scaling
from secc.cost.model.activation_copies import ActivationCopies, price_activation_copies
from secc.cost.model.collectives import RankSpan, span_of_consecutive_ranks
from secc.cost.model.cost_expressions import max_expr, scale_expression
from secc.cost.model.expert_parallel_cost import cost_with_expert_parts, exchange_ns
from secc.cost.model.framework_cost import cost_under_framework, saved_under_framework
from secc.cost.model.memory import RankMemory, rank_memory
from secc.cost.model.patterns_and_transfers import (
    InputPattern,
    SectionTransfer,
    input_patterns,
    micro_batch_sizes,
    section_handles_pattern,
    section_transfers,
)
from secc.cost.model.recompute_cost import RECOMPUTED_LAYERS
from secc.cost.model.section_cost import SectionCost, ops_in_section, section_cost
from secc.cost.model.tp_pp_scaling import PARAMETER_COUNTS, WHOLE_SECTION, StageShares, stage_shares
from secc.cost.model.zero3_cost import ParameterTransfers, weight_copies, zero3_collectives
from secc.errors import UserError
from secc.ir.analysis import sample_sizes
from secc.ir.analysis.dataflow import get_number, get_string
from secc.ir.analysis.tp_layouts import expert_counts
from secc.ir.analysis.whole_batch import ALONE, whole_batch_of_section
from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import CallOp, GraphOp, SectionOp
from secc.ir.dialect.tensor_type import tensor_type
from secc.runtime.parameters.bucket_limits import BUCKET_BYTES
from secc.runtime.plan.expr_eval import evaluate_expr, evaluate_expr_columns
from secc.runtime.plan.schema import Cost, SubgroupCost, rank_position

# Attributes of a section: measured over modelled times in permille, written by `secc.driver.replan_from_run`.
MEASURED_PERMILLE_ATTRIBUTES = ("forward_permille", "backward_permille")
# Micro-batches in flight of a section with consumers on its own ranks: one waits for them, the next runs.
IN_FLIGHT_FOR_LOCAL_CONSUMERS = 2
# Micro-batches in flight of a pipeline for each of its stages, where memory allows.
IN_FLIGHT_PER_STAGE = 2
# A section may fill all or half of a rank's memory with micro-batches that wait for consumers on other ranks.
IN_FLIGHT_MEMORY_DIVISORS = (1, 2)

# What a split backward keeps besides saved activations until gradients of parameters are computed: the
# gradients that entered its products, over the bytes saved. Counted on layers of Llama (0.50, with grouped
# keys 0.54) and CLIP (0.55) between the two parts of `secc.runtime.training.split_backward`.
KEPT_GRADIENTS_SHARE = Fraction(11, 20)

# (denominator, micro-batches in all, [(pattern, samples in a micro-batch, numerator)])
ExpectedMicroBatches = tuple[int, int, list[tuple[InputPattern, int, int]]]
# (ns of all micro-batches, their number, ns of the longest forward, ns of the longest backward)
BusiestReplica = tuple[int, int, int, int]


class RankShare(NamedTuple):
    """What a rank of a pipeline has of a section: fractions of its layers and of its time, and whether it has
    what lies before and behind the layers."""

    layers: Fraction
    time: Fraction
    first: bool
    last: bool


# (section, shape, attention, share of the rank if it is not one with most)
RankLoadKey = tuple[str, ReplicaShape, str, RankShare | None]


class UpdateTimes(NamedTuple):
    """What follows the backwards of a section on a rank, in ns: sums of gradients, gathers of the updated
    parameters, and the optimizer step."""

    sums: int
    gathers: int
    optimizer: int


@dataclass(frozen=True)
class SectionLoad:
    """A section as the cost model sees it: its cost, its time expressions in ns, and the input patterns that
    it is active for.

    `backward_ns` maps each recompute mode to an expression. `shape` says how many ranks share a replica: cost
    and times are those of one of these ranks (by default the whole section). `spread` describes how the times
    of its samples differ. `end_shares` are the fractions of the section's time that pass before and behind
    its layers, `outside` counts the parameters there (before, behind, both), `stages` is what its stages
    have, `row_attention` how ranks of cp attend to each other's rows, and `overlap` which sums over tp travel
    behind products. `mean_sizes` are those of a mean sample of the most frequent pattern.
    The `cached_*` fields memoise results of this module's functions.
    """

    section: SectionOp
    mode: str
    cost: SectionCost
    forward_ns: str
    backward_ns: Mapping[str, str]
    label: str
    active_patterns: tuple[InputPattern, ...]
    spread: SizeSpread = field(default_factory=SizeSpread)
    shape: ReplicaShape = WHOLE
    end_shares: tuple[Fraction, Fraction] = (Fraction(0), Fraction(0))
    outside: tuple[Mapping[str, int], ...] = ()
    stages: StageShares = WHOLE_SECTION
    row_attention: str = "gather"
    overlap: str = "none"
    mean_sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    cached_numbers: dict[object, tuple[int, int]] = field(
        init=False, repr=False, compare=False, default_factory=dict[object, tuple[int, int]]
    )
    cached_micro_batches: dict[tuple[int, int], ExpectedMicroBatches] = field(
        init=False, repr=False, compare=False, default_factory=dict[tuple[int, int], ExpectedMicroBatches]
    )
    cached_busiest: dict[tuple[int, int, str], BusiestReplica] = field(
        init=False, repr=False, compare=False, default_factory=dict[tuple[int, int, str], BusiestReplica]
    )
    cached_sample_bytes: dict[str, list[tuple[int, int]]] = field(
        init=False, repr=False, compare=False, default_factory=dict[str, list[tuple[int, int]]]
    )
    forward_with_copies: Mapping[str, str] = field(default_factory=dict[str, str])
    cached_updates: dict[tuple[int, str], UpdateTimes] = field(
        init=False, repr=False, compare=False, default_factory=dict[tuple[int, str], UpdateTimes]
    )
    cached_gathers: dict[int, ParameterTransfers | None] = field(
        init=False, repr=False, compare=False, default_factory=dict[int, "ParameterTransfers | None"]
    )

    @cached_property
    def name(self) -> str:
        """Name of the section."""
        return self.section.sym.data

    @cached_property
    def sample_share(self) -> Fraction:
        """Share of samples for which the section is active."""
        return sum((p.share for p in self.active_patterns), Fraction(0))

    def stage_shares(self, shape: ReplicaShape) -> StageShares:
        """What the stages of a replica of this shape have; `self` is the load of the whole section."""
        return stage_shares(self.cost.layers, shape.pp, self.end_shares, shape.chunks, shape.placement)

    def share_of_stage(self, shape: ReplicaShape, stage: int) -> RankShare | None:
        """What the ranks of a stage have of the section; None for the only stage."""
        if shape.stages == 1:
            return None
        own = stages_on_rank(shape, stage)
        stages = self.stage_shares(shape).of_rank(own)
        return RankShare(stages.layers, stages.longest, 0 in own, shape.stages - 1 in own)

    def pass_ns(self, recompute: str) -> tuple[str, str]:
        """Expressions of a forward and a backward in ns, without what replicas exchange in them."""
        return self.forward_with_copies.get(recompute, self.forward_ns), self.backward_ns[recompute]

    def activation_copies(self, recompute: str) -> ActivationCopies | None:
        """What is in host memory from forward to backward, None if all stays on the device."""
        return price_activation_copies(self.cost, recompute) if self.shape.offload == "activations" else None

    def cost_under_recompute(self, recompute: str) -> SectionCost:
        """Cost of the section where `saved` counts only what recompute mode `recompute` keeps on the device.
        Under a split backward, what was computed again stays until the weight gradients, so all of it
        counts."""
        if (copies := self.activation_copies(recompute)) is not None:
            return replace(self.cost, saved=self.cost.outside_saved, streamed=copies.streamed)
        again = self.cost.recompute.get(recompute)
        if again is None or self.shape.backward_parts > 1:
            return self.cost
        return replace(self.cost, saved=again.saved)


@dataclass(frozen=True)
class Workload:
    """Everything that candidates are made from. `unshardable` is the reason why the user's optimizer cannot
    be sharded, "" if it can.

    `offloads`: what sections may keep in host memory without a pin ("optimizer", "weights", "activations").

    On a cluster of several device kinds, `loads` are priced with the worst figures of all kinds, and
    `by_kind` holds the same workload on each kind alone. The `cached_*` fields memoise results.
    """

    graph: GraphOp
    cluster: Cluster
    global_batch: int
    loads: dict[str, SectionLoad]
    crossings: tuple[SectionTransfer, ...]
    unshardable: str = ""
    by_kind: tuple[Workload, ...] = ()
    offloads: tuple[str, ...] = ()
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

    cached_candidates: dict[object, tuple[Candidate, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict[object, tuple[Candidate, ...]]
    )

    @cached_property
    def producing_sections(self) -> frozenset[str]:
        """Sections that feed others."""
        return frozenset(c.src for c in self.crossings)

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
        return replace(self, offloads=offloads, by_kind=kinds)

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
        return load.cost.row_pieces != "0" or self.has_sequences(load)

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
    reason = graph.attributes.get("unshardable")
    work = Workload(
        graph, cluster, global_batch, loads, transfers, reason.data if isinstance(reason, StringAttr) else ""
    )
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
    frequent = max(active, key=lambda p: p.share, default=None)
    sizes = {} if frequent is None else micro_batch_sizes(graph, frequent.sizes, 1)
    whole = SectionLoad(section, mode, section_cost(graph, section), "0", {}, "", active, mean_sizes=sizes)
    load = compute_rank_load(whole, WHOLE, cluster)
    return replace(
        load,
        spread=measure_spread(graph, active, f"{load.forward_ns} + {load.backward_ns['none']}"),
        end_shares=_shares_outside_layers(graph, load, cluster),
        outside=_count_outside_layers(graph, load),
    )


def _count_outside_layers(graph: GraphOp, load: SectionLoad) -> tuple[Mapping[str, int], ...]:
    """Counts of the parameters before, behind and outside of a section's layers; empty without layers. Tied
    ones are before and behind, and once outside."""
    if load.cost.layers < 2:
        return ()
    costs = (section_cost(graph, load.section, part) for part in ("before", "behind", "outside"))
    return tuple({key: getattr(cost, key) for key in PARAMETER_COUNTS} for cost in costs)


def _shares_outside_layers(graph: GraphOp, load: SectionLoad, cluster: Cluster) -> tuple[Fraction, Fraction]:
    """The fractions of a section's time, in thousandths, that mean samples spend before and behind its
    layers."""
    if load.cost.layers < 2:
        return Fraction(0), Fraction(0)
    device = replace(cluster.device, overheads=Overheads())

    def mean_ns(cost: SectionCost) -> Fraction:
        forward = roofline.forward_ns_expression(cost, device)
        backward = roofline.backward_ns_expression(cost, load.mode, device)
        return sum(
            (
                p.share * evaluate_expr(f"{forward} + {backward}", micro_batch_sizes(graph, p.sizes, 1))
                for p in load.active_patterns
            ),
            Fraction(0),
        )

    before = mean_ns(section_cost(graph, load.section, "before"))
    behind = mean_ns(section_cost(graph, load.section, "behind"))
    whole = max(1, mean_ns(load.cost), before + behind)
    return Fraction(round(1000 * before / whole), 1000), Fraction(round(1000 * behind / whole), 1000)


def compute_rank_load(
    whole: SectionLoad,
    shape: ReplicaShape,
    cluster: Cluster,
    attention: str = "",
    stage: int | None = None,
) -> SectionLoad:
    """Load of a section on one rank of its replicas of this shape, given the whole section's load. attention,
    stage: see `Workload.rank_load`."""
    device, mode = cluster.device, whole.mode
    tp, _, cp, ep, backward_parts, offload, chunks, _, norms, overlap = shape
    stages = whole.stage_shares(shape)
    undivided = replace(whole.cost, sequence_parallel=norms == "sequence")
    share = None if stage is None else whole.share_of_stage(shape, stage)
    if share is not None and stage is not None:
        stages = stages.of_rank(stages_on_rank(shape, stage))
        undivided = _move_to_ends(undivided, whole.outside, share)
    whole_rows = cost_with_expert_parts(undivided, tp, ep, stages)
    attention = cp_scaling.choose_row_attention(
        whole.cost,
        whole_rows,
        tp,
        cp,
        cluster,
        attention or get_string(whole.section, "pinned_attention") or "",
    )
    cost = cp_scaling.cost_on_rows(whole_rows, cp, attention)
    priced = cost_under_framework(cost, tp, device.framework)
    saved = saved_under_framework(whole.cost, cost, tp, stages.layers, device.framework)
    cost = replace(cost, saved=saved)
    given_overlap = overlap or get_string(whole.section, "pinned_overlap") or ""
    overlap = tp_pp_scaling.choose_overlap(cost, tp, cluster, mode, whole.mean_sizes, given_overlap)
    sums = tp_pp_scaling.price_tensor_sums(cost, tp, cluster, overlap, whole.mean_sizes, backward_parts > 1)
    tokens = exchange_ns(cost, tp * cp, ep, cluster)
    rows = cp_scaling.price_row_exchange(whole_rows, tp, cp, cluster, attention)
    measured_permille = [
        int(get_number(whole.section, name) or 1000) for name in MEASURED_PERMILLE_ATTRIBUTES
    ]
    forward = _scale_permille(
        _add_times(roofline.forward_ns_expression(priced, device), sums.forward_ns, tokens, rows.forward_ns),
        measured_permille[0],
    )
    backward = {
        recompute: _scale_permille(
            _add_times(
                roofline.backward_ns_expression(priced, mode, device, recompute),
                sums.backward_ns(recompute),
                scale_expression(tokens, 1 + RECOMPUTED_LAYERS[recompute]),
                rows.backward_ns(recompute),
            ),
            measured_permille[1],
        )
        for recompute in PIN_WORDS["recompute"]
    }
    if backward_parts > 1:
        backward = {mode: _add_times(text, str(device.overheads.job)) for mode, text in backward.items()}
        cost = replace(cost, saved=tp_pp_scaling.scale_expression(cost.saved, 1 + KEPT_GRADIENTS_SHARE))
    if chunks > 1:  # a micro-batch passes a rank in several jobs
        more_jobs = str((chunks - 1) * device.overheads.job)
        forward = _add_times(forward, more_jobs)
        backward = {mode: _add_times(text, more_jobs) for mode, text in backward.items()}
    if offload == "weights" and forward != "0":
        copies = weight_copies(cost, device)
        backward = {way: copies.add_to_expressions(forward, text)[1] for way, text in backward.items()}
        forward, _ = copies.add_to_expressions(forward, "0")
    with_copies: dict[str, str] = {}
    if offload == "activations" and mode != "forward":
        for way, text in backward.items():
            moving = price_activation_copies(cost, way)
            with_copies[way], backward[way] = moving.add_to_expressions(forward, text, device)
    return replace(
        whole,
        cost=cost,
        forward_ns=forward,
        backward_ns=backward,
        forward_with_copies=with_copies,
        label=roofline.time_label(cost, device),
        shape=shape,
        stages=stages,
        row_attention=attention,
        overlap=overlap,
    )


def _move_to_ends(cost: SectionCost, outside: Sequence[Mapping[str, int]], share: RankShare) -> SectionCost:
    """The cost of a section in which the parts of a rank come out right if it takes its share of layers of
    all: parameters before layers are on the first stage, and parameters and logits behind them on the last
    one."""
    counts: dict[str, int] = {}
    if outside:
        before, behind, both = outside
        counts = {
            key: getattr(cost, key)
            - both[key]
            + int((before[key] * share.first + behind[key] * share.last) / share.layers)
            for key in both
        }
    if cost.logits_saved == "0":
        return replace(cost, **counts)
    logits = scale_expression(cost.logits_saved, share.last / share.layers) if share.last else "0"

    def move_logits(saved: str) -> str:
        return f"{saved} - ({cost.logits_saved}) + {logits}"

    recompute = {way: replace(costs, saved=move_logits(costs.saved)) for way, costs in cost.recompute.items()}
    saved, outside_saved = move_logits(cost.saved), move_logits(cost.outside_saved)
    return replace(
        cost, saved=saved, outside_saved=outside_saved, logits_saved=logits, recompute=recompute, **counts
    )


def _scale_permille(time_ns: str, permille: int) -> str:
    return time_ns if permille == 1000 or time_ns == "0" else f"({time_ns})*{permille}//1000"


def _add_times(time_ns: str, *exchanges: str) -> str:
    if time_ns == "0":
        return time_ns
    return " + ".join([time_ns, *(text for text in exchanges if text != "0")])


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


def require_rank_load(work: Workload, load: SectionLoad, shape: ReplicaShape, ranks: int) -> SectionLoad:
    """Returns the section's load on one rank of its replicas.

    Raises UserError for a shape that is impossible on `ranks` ranks or for this section.
    """
    tp, pp, cp, ep, *_ = shape
    if shape.ranks > ranks:
        rows = f" and cp={cp}" if cp > 1 else ""
        message = (
            f"{load.name}.tp={tp} with pp={pp}{rows} is impossible: "
            f"a replica would need {shape.ranks} ranks, and there are {ranks}"
        )
        raise UserError(message, remedy="set smaller ones, or give more ranks")
    if tp * ep > 1 and load.cost.trainable and work.unshardable:
        key = f"{load.name}.tp={tp}" if tp > 1 else f"{load.name}.ep={ep}"
        message = f"{key} is impossible: ranks would have parts of parameters, but {work.unshardable}"
        raise UserError(message, remedy=f"leave it out, or set {key.partition('=')[0]}=1")
    layer_count = work.stackable_layers(load)
    if shape.chunks > 1 and (pp == 1 or shape.stages > layer_count):
        reason = f"the section has {layer_count} layers to cut between"
        reason += f", and {shape.stages} stages need one each" if pp > 1 else ""
        message = f"{load.name}.chunks={shape.chunks} with pp={pp} is impossible: {reason}"
        most = layer_count // pp
        remedy = f"set {load.name}.chunks to at most {most}" if most > 1 else f"leave out {load.name}.chunks"
        raise UserError(message, remedy=remedy)
    if pp > max(1, layer_count):
        message = f"{load.name}.pp={pp} is impossible: the section has {layer_count} layers to cut between"
        raise UserError(message, remedy=f"set {load.name}.pp to at most {max(1, layer_count)}")
    if ep > 1:
        _require_expert_parts(work, load, tp, ep)
    return work.rank_load(load, shape)


def _require_expert_parts(work: Workload, load: SectionLoad, tp: int, ep: int) -> None:
    """Raises UserError if the section's experts cannot form `ep` parts on replicas of `tp` ranks."""
    counts = expert_counts(work.graph, load.section)
    out = f"leave {load.name}.ep out"
    if not counts:
        raise UserError(f"{load.name}.ep={ep} is impossible: the section has no experts", remedy=out)
    common = gcd(*counts)
    if common % ep:
        possible = [n for n in range(2, common + 1) if common % n == 0]
        remedy = f"set {load.name}.ep to {' or '.join(map(str, possible))}" if possible else out
        counted = " and ".join(map(str, counts))
        raise UserError(
            f"{load.name}.ep={ep} is impossible: it does not divide {counted} experts", remedy=remedy
        )
    if tp % ep and ep % tp:
        message = (
            f"{load.name}.ep={ep} is impossible: it and the {tp} ranks (tp) of a replica are no multiples"
        )
        raise UserError(message, remedy=f"set {load.name}.tp to a divisor or a multiple of {ep}, or {out}")


def require_exchanging_replicas(load: SectionLoad, most: int, pins: Pins) -> None:
    """Raises UserError if no dp, up to `most`, has groups of ep / tp replicas that can exchange tokens."""
    replicas, key = max(1, load.shape.ep // load.shape.tp), f"{load.name}.ep={load.shape.ep}"
    dp = pins.pinned_number(load.name, "dp")
    if replicas > most or (dp is not None and dp % replicas):
        given = f"dp={dp} is no multiple of that" if dp else f"there are ranks and samples for at most {most}"
        message = f"{key} is impossible: {replicas} replicas would share experts, and {given}"
        raise UserError(message, remedy=f"set {load.name}.dp to a multiple of {replicas}, or another ep")
    if replicas > 1 and pins.splits_backward(load.name):
        message = f"{key} is impossible with backward=split: replicas exchange tokens in every backward"
        raise UserError(message, remedy=f"leave {load.name}.backward out")


def list_sharding_and_recompute(work: Workload, load: SectionLoad, pins: Pins) -> list[tuple[str, str]]:
    """Lists the (sharding, recompute) pairs to consider for a section, in order of preference among equals.

    Raises UserError where a pinned choice does not apply to the section.
    """
    sharding, recompute = (pins.word_choices(load.name, key) for key in ("sharding", "recompute"))
    if load.mode == "forward":
        _require_none_pinned(load, "recompute", pins, "it has no backward")
        recompute = ("none",)
    if kind := work.whole_batch_kind(load):
        sharding = tuple(s for s in sharding if s != "zero3")
        recompute = ("none",) if kind == ALONE else recompute
    if pins.splits_backward(load.name):
        # Recomputed layers stay until their weight gradients, so only a pin recomputes.
        recompute = (pins.words.get(load.name, {}).get("recompute", "none"),)
        if sharding == ("zero3",):
            _require_none_pinned(
                load, "sharding", pins, "each part of a split backward would gather parameters again"
            )
        sharding = tuple(s for s in sharding if s != "zero3")
    if not load.cost.trainable:
        if sharding not in (("zero3",), PIN_WORDS["sharding"]):
            _require_none_pinned(load, "sharding", pins, "it trains nothing")
        sharding = tuple(s for s in sharding if s in ("none", "zero3"))
    elif work.unshardable:
        _require_none_pinned(load, "sharding", pins, work.unshardable)
        sharding = ("none",)
    return [(s, r) for s in sharding for r in recompute]


def list_backward_parts(
    load: SectionLoad, shape: ReplicaShape, sharding: str, recompute: str, pins: Pins
) -> list[int]:
    """In how many parts the stages of a section may run backward, in order of preference among equals.

    A number of stages that the user pins runs whole backwards, as it does elsewhere, unless pinned to split.
    """
    if pins.splits_backward(load.name):
        return [2]
    possible = (
        load.mode == "train"
        and shape.pp > 1
        and pins.pinned_number(load.name, "pp") is None
        and shape.cp == 1
        and shape.ep <= shape.tp
        and recompute == "none"
        and sharding != "zero3"
        and load.cost.trainable > 0
        and shape.offload != "activations"
    )
    return [1, 2] if possible and "split" in pins.word_choices(load.name, "backward") else [1]


def list_offloads(
    work: Workload, load: SectionLoad, shape: ReplicaShape, sharding: str, pins: Pins
) -> list[str]:
    """What may live in host memory, in order of preference among equals; empty if the pinned choice is
    impossible with this shape and sharding."""
    pinned = pins.words.get(load.name, {}).get("offload")
    shape = shape._replace(backward_parts=2) if pins.splits_backward(load.name) else shape
    possible = [
        what for what in PIN_WORDS["offload"] if not why_not_offloaded(load, what, shape, sharding, work)
    ]
    if pinned is not None:
        return [pinned] if pinned in possible else []
    return [what for what in possible if what == "none" or what in work.offloads]


def may_copy_in_place_of_recomputing(work: Workload, load: SectionLoad, c: Candidate) -> bool:
    """Whether a section that runs layers again would take less time with what they save in host memory, for a
    micro-batch of one mean sample."""
    if c.recompute == "none" or not load.mean_sizes:
        return False
    if why_not_offloaded(load, "activations", c.shape, c.sharding, work):
        return False

    def passes_ns(offload: str, recompute: str) -> int:
        forward, backward = work.rank_load(load, c.shape._replace(offload=offload)).pass_ns(recompute)
        return evaluate_expr(f"{forward} + {backward}", load.mean_sizes)

    return passes_ns("activations", "none") < passes_ns(c.offload, c.recompute)


def require_offload(
    work: Workload, load: SectionLoad, shape: ReplicaShape, shardings: Iterable[str], pins: Pins
) -> None:
    """Raises UserError for a pinned offload that no sharding of these allows."""
    pinned = pins.words.get(load.name, {}).get("offload", "none")
    shape = shape._replace(backward_parts=2) if pins.splits_backward(load.name) else shape
    reasons = [why_not_offloaded(load, pinned, shape, sharding, work) for sharding in shardings]
    if all(reasons):
        raise UserError(
            f"{load.name}.offload={pinned} is impossible: {reasons[0]}",
            remedy=f"leave it out, or set {load.name}.offload=none",
        )


def why_not_offloaded(
    load: SectionLoad, what: str, shape: ReplicaShape, sharding: str, work: Workload
) -> str:
    """Why host memory cannot have a section's optimizer states, weights or activations, "" if it can."""
    if what == "none":
        return ""
    if not work.cluster.device.host_memory * work.cluster.device.host_bytes_per_s:
        return "the cluster file says nothing of host memory (host: {gb_s: 51, memory_gib: 238})"
    if what == "optimizer":
        return "" if load.cost.trainable else "it trains nothing, so it has no optimizer states"
    if what == "activations":
        return _why_activations_stay(load, shape)
    return _why_weights_stay(load, shape, sharding)


def _why_activations_stay(load: SectionLoad, shape: ReplicaShape) -> str:
    """Why what a section saves for its backward cannot be in host memory meanwhile, "" if it can."""
    if load.mode == "forward":
        return "it has no backward, so it saves nothing"
    if load.cost.layers < 2:
        return "it has no layers that run one after another"
    return "both parts of a split backward need what was saved" if shape.backward_parts > 1 else ""


def _why_weights_stay(load: SectionLoad, shape: ReplicaShape, sharding: str) -> str:
    """Why a section's weights cannot come from host memory layer by layer, "" if they can."""
    if load.cost.trainable:
        return "it trains, and only weights that never change stay in host memory"
    if load.cost.layers < 2 or not load.cost.largest_layer_bytes:
        return "it has no layers that run one after another"
    if sharding == "zero3":
        return "zero3 gathers its layers from the other replicas"
    return "replicas share its experts (ep above tp)" if shape.ep > shape.tp else ""


def _require_none_pinned(load: SectionLoad, key: str, pins: Pins, reason: str) -> None:
    """Raises UserError if `key` is pinned to anything but "none"."""
    choice = pins.words.get(load.name, {}).get(key, "none")
    if choice != "none":
        raise UserError(
            f"{load.name}.{key}={choice} is impossible: {reason}",
            remedy=f"leave it out, or set {load.name}.{key}=none",
        )


def price_candidate(
    work: Workload, load: SectionLoad, dp: int, size: int, sharding: str = "none", recompute: str = "none"
) -> Candidate:
    """Computes times and memory of a section in `dp` replicas with micro-batches of `size` samples."""
    busy = busiest_replica_ns(work, load, dp, size, sharding, recompute)
    rank = memory_on_rank(work, load, dp, size, sharding, recompute, busy[1])
    alternating_bytes = rank.total_bytes(in_flight_alternating(work, load, busy[1]))
    return _make_candidate(work, load, dp, size, sharding, recompute, busy, rank, alternating_bytes)


def fixed_memory_fits(load: SectionLoad, dp: int, sharding: str, offload: str, capacity: int) -> bool:
    """Whether parameters, gradients and optimizer states alone fit into `capacity` bytes of a rank."""
    copies = dp * load.shape.cp
    return any(
        rank_memory(load.cost, 0, dp=copies, sharding=sharding, micro_batches=n, offload=offload).total_bytes(
            1
        )
        <= capacity
        for n in (1, 2)
    )


def price_fitting_candidates(
    work: Workload, load: SectionLoad, dp: int, size: int, sharding: str, recompute: str, capacity: int | None
) -> list[Candidate]:
    """Prices a candidate and its variants with fewer micro-batches in flight (`in_flight_variants`).

    Returns an empty list if it needs more than `capacity` bytes on a rank (None: unlimited).
    """
    _, count, _ = _expect_micro_batches(load, -(-work.active_sample_count(load) // dp), size)
    rank = memory_on_rank(work, load, dp, size, sharding, recompute, count)
    alternating_bytes = rank.total_bytes(in_flight_alternating(work, load, count))
    if capacity is not None and alternating_bytes > capacity:
        return []
    if capacity is not None and _host_bytes(work, load, rank) > work.cluster.device.usable_host_memory:
        return []
    busy = busiest_replica_ns(work, load, dp, size, sharding, recompute)
    candidate = _make_candidate(work, load, dp, size, sharding, recompute, busy, rank, alternating_bytes)
    return _vary_in_flight(work, load, candidate, rank)


def _make_candidate(
    work: Workload,
    load: SectionLoad,
    dp: int,
    size: int,
    sharding: str,
    recompute: str,
    busy: BusiestReplica,
    rank: RankMemory,
    alternating_bytes: int,
) -> Candidate:
    """Builds a candidate from prices: `busy` has the times of its busiest replica, `rank` the memory of one
    rank by purpose, and `alternating_bytes` the bytes on it while it alternates forwards and backwards."""
    total, micro_batches, fill, drain = busy
    alternating = in_flight_alternating(work, load, micro_batches)
    framework = work.cluster.device.framework
    bubble = pipeline_bubble_ns(load, size, busy) // framework.virtual_stages
    if load.shape.pp == 2:
        bubble += framework.waits_of_two_stages * (fill + drain)
    return Candidate(
        dp=dp,
        micro_batch=size,
        time_ns=total + bubble + _update_ns(work, load, dp, sharding, busy),
        fill_ns=load.stages.sum_over(fill),
        drain_ns=load.stages.sum_over(drain - deferred_backward_ns(load, drain)),
        micro_batches=micro_batches,
        memory=alternating_bytes,
        memory_ahead=alternating_bytes
        if load.mode == "forward" or alternating == micro_batches
        else rank.total_bytes(micro_batches),
        in_flight=0 if load.mode == "forward" else micro_batches,
        recompute=recompute,
        tp=load.shape.tp,
        pp=load.shape.pp,
        cp=load.shape.cp,
        ep=load.shape.ep,
        backward_parts=load.shape.backward_parts,
        chunks=load.shape.chunks,
        placement=load.shape.placement,
        norms=load.shape.norms,
        sharding=sharding,
        idle_ns=bubble if load.mode == "forward" else 0,
        offload=load.shape.offload,
        host_memory=_host_bytes(work, load, rank),
    )


def in_flight_alternating(work: Workload, load: SectionLoad, micro_batches: int) -> int:
    """Number of micro-batches between forward and backward where a rank alternates them (1F1B). Stages of
    several chunks on a rank count in parts of one."""
    return min(
        micro_batches,
        max(
            _most_in_flight_on_rank(load.shape),
            IN_FLIGHT_FOR_LOCAL_CONSUMERS if load.name in work.producing_sections else 1,
        ),
    )


def _most_in_flight_on_rank(shape: ReplicaShape) -> int:
    """The number of whole micro-batches that the fullest rank holds if each of its stages holds its least
    number (`least_in_flight`)."""
    held = [0] * shape.pp
    for stage in range(shape.stages):
        place = rank_position(stage, shape.pp, shape.placement)
        held[place] += least_in_flight(shape.pp, shape.chunks, stage)
    return -(-max(held) // shape.chunks)


def least_in_flight(pp: int, chunks: int, stage: int) -> int:
    """The number of micro-batches that a stage must be able to hold: one for itself and each later stage
    (1F1B). A stage of several on its rank takes a part of the rank's time, so fewer micro-batches start
    before the first one returns; one more hides what other chunks delay."""
    following = pp * chunks - stage
    return following if chunks == 1 else -(-following // chunks) + 1


def divide_in_flight_room(shape: ReplicaShape, stage: int, room: int, largest: int = 0) -> int:
    """Returns what a stage gets of `room`, bytes or micro-batches that its rank may hold in flight.

    Of several stages on a rank, the earlier one holds a micro-batch longer, and more of them at once; each
    gets a part in proportion to the least number that it must be able to hold, but no less than the largest
    sample takes if there is room for it on each of them.
    """
    on_rank = stages_on_rank(shape, stage)
    weights = {s: least_in_flight(shape.pp, shape.chunks, s) for s in on_rank}
    least = largest if largest * len(on_rank) <= room else 0
    part, weights_left = room, sum(weights.values())
    for s in sorted(on_rank, key=lambda s: (weights[s], s)):
        part = max(least, -(-room * weights[s] // weights_left))
        room, weights_left = room - part, weights_left - weights[s]
        if s == stage:
            break
    return part


def stages_on_rank(shape: ReplicaShape, stage: int) -> list[int]:
    """The stages on the ranks that have `stage`, first to last."""
    place = rank_position(stage, shape.pp, shape.placement)
    return [s for s in range(shape.stages) if rank_position(s, shape.pp, shape.placement) == place]


def pipeline_bubble_ns(load: SectionLoad, size: int, busy: BusiestReplica) -> int:
    """Idle time of a stage in a step: filling, draining, and waiting where long micro-batches follow short
    ones.

    For each stage but the longest, half a mean micro-batch and half of the longest one; this is close to what
    scheduled steps show. A pipeline without backward has nothing else to do while the longest one passes: a
    step takes all work of a stage, and the longest job once more for each other stage, in any order (Pinedo,
    "Scheduling", proportionate flow shops), unless it runs ahead (`Candidate.idle_ns`). Of a split backward
    no stage waits for the second part, and computes another micro-batch's in idle time (Qi et al. 2023:
    F + B - W remains of F + B + W). With several chunks on a rank, each idle time is that of one chunk
    (Narayanan et al. 2021).
    """
    total, micro_batches, fill, drain = busy
    longest = max(fill + drain, load.spread.longest_micro_batch(size) * total // (PERMILLE * micro_batches))
    if load.mode == "forward":
        return (load.stages.sum_over(longest) - longest) // load.shape.chunks
    later = deferred_backward_ns(load, drain)
    awaited = longest - deferred_backward_ns(load, longest * drain // max(1, fill + drain))
    waits = fill + drain - 2 * later + awaited
    return (load.stages.sum_over(waits) - waits) // (2 * load.shape.chunks)


def deferred_backward_ns(load: SectionLoad, backward_ns: int) -> int:
    """The part of a backward that stages compute later, 0 where backward is not split."""
    return (
        backward_ns * weight_gradient_permille(load.cost) // PERMILLE if load.shape.backward_parts > 1 else 0
    )


def weight_gradient_permille(cost: SectionCost, recompute: str = "none") -> int:
    """The share of a backward that computes gradients of parameters. Layers that run again take as long as
    their input gradients."""
    others = cost.params + int(cost.params * RECOMPUTED_LAYERS[recompute])
    return PERMILLE * cost.trainable // max(1, others + cost.trainable)


def in_flight_variants(work: Workload, load: SectionLoad, c: Candidate) -> list[Candidate]:
    """Variants of a candidate with all its micro-batches in flight, and with as many as fit into all and into
    half of a rank's memory.

    With fewer micro-batches in flight than a step has, the in-flight budget is used in several rounds; each
    round waits until consumers on other ranks return gradients.
    """
    return _vary_in_flight(work, load, c, candidate_memory(work, load, c))


def _vary_in_flight(work: Workload, load: SectionLoad, c: Candidate, rank: RankMemory) -> list[Candidate]:
    """Returns the `in_flight_variants` of a candidate, given the memory of a rank."""
    if not c.in_flight or load.name not in work.producing_sections:
        return [c]
    least = min(c.micro_batches, max(_most_in_flight_on_rank(load.shape), IN_FLIGHT_FOR_LOCAL_CONSUMERS))
    capacity = work.cluster.device.usable_memory
    by_in_flight = {c.micro_batches: c}
    for part in IN_FLIGHT_MEMORY_DIVISORS:
        rounds, count, size = 1, c.micro_batches, c.memory_ahead
        while size > capacity // part and count > least:
            rounds *= 2
            count = max(least, -(-c.micro_batches // rounds))
            size = rank.total_bytes(count)
        if count < c.micro_batches:
            by_in_flight[count] = replace(
                c, in_flight=count, memory_ahead=size, rounds=-(-c.micro_batches // count)
            )
    return list(by_in_flight.values())


def gradient_and_optimizer_ns(
    work: Workload, load: SectionLoad, dp: int, size: int, sharding: str, recompute: str
) -> int:
    """Time from the last backward to the end of the step, in ns: sums of gradients as far as that backward
    does not hide them, parameters gathered, and optimizer step."""
    busy = busiest_replica_ns(work, load, dp, size, sharding, recompute)
    return _update_ns(work, load, dp, sharding, busy)


def _update_ns(work: Workload, load: SectionLoad, dp: int, sharding: str, busy: BusiestReplica) -> int:
    update = update_times(work, load, dp, sharding)
    _, _, _, backward = busy
    last = deferred_backward_ns(load, backward) if load.shape.backward_parts > 1 else backward
    exposed = exposed_sums_ns(update.sums, load.cost.trainable_bytes, last)
    return exposed + update.gathers + update.optimizer


def exposed_sums_ns(sums_ns: int, parameter_bytes: int, last_backward_ns: int) -> int:
    """How long sums of the gradients of `parameter_bytes` of parameters take beyond the last backward. A
    bucket is summed when that backward has all of its gradients, so the first one waits for a part of it, and
    the last one for all of it."""
    parameter_bytes = max(1, parameter_bytes)
    bucket = min(BUCKET_BYTES, parameter_bytes)
    hidden = (parameter_bytes - bucket) * last_backward_ns // parameter_bytes
    return max(sums_ns - hidden, bucket * sums_ns // parameter_bytes)


def update_times(work: Workload, load: SectionLoad, dp: int, sharding: str) -> UpdateTimes:
    """What follows the backwards of a section on one of its ranks (memoised)."""
    if (dp, sharding) not in load.cached_updates:
        load.cached_updates[dp, sharding] = _price_update(work, load, dp, sharding)
    return load.cached_updates[dp, sharding]


def _price_update(work: Workload, load: SectionLoad, dp: int, sharding: str) -> UpdateTimes:
    cost, cluster = load.cost, work.cluster
    if load.mode != "train":
        return UpdateTimes(0, 0, 0)
    copies = dp * load.shape.cp

    def step_ns(shards: int = 1) -> int:
        step = roofline.optimizer_step_ns(cost, cluster.device, shards)
        if load.shape.offload != "optimizer":
            return step
        states = rank_memory(cost, 0, dp=copies, sharding=sharding).optimizer
        return roofline.offloaded_step_ns(step, states, cluster.device)

    if sharding == "zero3" and copies > 1:
        # Every backward has summed its gradients.
        return UpdateTimes(0, 0, step_ns(copies))
    # Experts are summed over the replicas that hold the same ones, all else over all replicas.
    # `place` puts replicas of a stage, not stages of a replica, next to each other where sums take long.
    replicas, stride = cost.expert_replicas, load.shape.tp
    experts = cost.expert_gradient_sum_bytes if replicas > 1 else 0
    if sharding == "none":
        sums = roofline.gradient_all_reduce_ns(
            cost.gradient_sum_bytes - experts, copies, cluster, stride
        ) + roofline.gradient_all_reduce_ns(experts, copies // replicas, cluster, stride * replicas)
        return UpdateTimes(sums, 0, step_ns())
    weights = cost.expert_trainable_bytes if replicas > 1 else 0
    sums = roofline.gradient_reduce_scatter_ns(
        cost.gradient_sum_bytes - experts, copies, cluster, stride
    ) + roofline.gradient_reduce_scatter_ns(experts, copies // replicas, cluster, stride * replicas)
    gathers = roofline.parameter_all_gather_ns(
        cost.trainable_bytes - weights, copies, cluster, stride
    ) + roofline.parameter_all_gather_ns(weights, copies // replicas, cluster, stride * replicas)
    if cluster.device.framework.hides_gathers:
        gathers = 0
    return UpdateTimes(sums, gathers, step_ns(copies // replicas if replicas > 1 else copies))


def micro_batch_time_expressions(
    work: Workload, load: SectionLoad, dp: int, sharding: str, recompute: str, span: RankSpan | None = None
) -> tuple[str, str]:
    """Returns (forward, backward) expressions in ns of a micro-batch on a rank, over the micro-batch's
    symbols.

    `span` is the location of the data-parallel group's ranks if they are placed already; by default they are
    consecutive replicas.
    """
    expressions, span = load.pass_ns(recompute), span or _replica_span(work, load, dp)
    gathers = zero3_collectives(load.cost, sharding, work.cluster, span)
    return expressions if gathers is None else gathers.add_to_expressions(*expressions)


def _replica_span(work: Workload, load: SectionLoad, dp: int) -> RankSpan:
    """Location of the ranks that hold the same parameters if those of a stage are placed in a row."""
    return span_of_consecutive_ranks(dp * load.shape.cp, work.cluster, load.shape.tp)


def busiest_replica_ns(
    work: Workload, load: SectionLoad, dp: int, size: int, sharding: str, recompute: str
) -> BusiestReplica:
    """Load of the busiest of `dp` replicas: ns of all its micro-batches, their number, ns of the longest
    forward and of the longest backward."""
    gathers = _zero3_gathers(work, load, dp) if sharding == "zero3" else None
    lockstep = gathers is not None or load.cost.expert_replicas > 1
    samples_of_busiest = -(-work.active_sample_count(load) // dp)
    key = samples_of_busiest, size, recompute
    if not lockstep and key in load.cached_busiest:
        return load.cached_busiest[key]
    denominator, count, micro_batches = _expect_micro_batches(load, samples_of_busiest, size)
    together = dp if gathers is not None else load.cost.expert_replicas
    slowdown = (
        _round_slowdown(load, count, dp, together, size)
        if lockstep
        else load.spread.replica_imbalance(samples_of_busiest, count)
    )
    total, fill, drain = 0, 0, 0
    for pattern, samples, number in micro_batches:
        forward, backward = _micro_batch_times(work, load, pattern, samples, recompute)
        if lockstep:
            forward, backward = (ns * slowdown // PERMILLE for ns in (forward, backward))
        if gathers is not None:
            forward, backward = gathers.forward_ns(forward), gathers.backward_ns(backward)
        total += number * (forward + backward)
        fill, drain = max(fill, forward), max(drain, backward)
    result = -(-total * (PERMILLE if lockstep else slowdown) // (denominator * PERMILLE)), count, fill, drain
    if not lockstep:
        load.cached_busiest[key] = result
    return result


def _round_slowdown(load: SectionLoad, rounds: int, dp: int, together: int, size: int) -> int:
    """Longest micro-batch of a round over the mean one, in permille, as mean over the rounds of `together`
    replicas in lockstep, or as one of the groups of replicas has it in few rounds."""
    key = "rounds", rounds, dp, together, size
    if key not in load.cached_numbers:
        in_rounds = load.spread.mean_round_maximum(rounds * dp // together, together, size)
        busiest = load.spread.longest_micro_batch(size) // rounds if together < dp else 0
        load.cached_numbers[key] = max(in_rounds, busiest), 0
    return load.cached_numbers[key][0]


def _zero3_gathers(work: Workload, load: SectionLoad, dp: int) -> ParameterTransfers | None:
    """Collectives of a forward and backward under ZeRO-3, None where there is nothing to gather."""
    if dp not in load.cached_gathers:
        load.cached_gathers[dp] = zero3_collectives(
            load.cost, "zero3", work.cluster, _replica_span(work, load, dp)
        )
    return load.cached_gathers[dp]


def _expect_micro_batches(load: SectionLoad, busiest: int, size: int) -> ExpectedMicroBatches:
    """Splits `busiest` samples of a replica into micro-batches of at most `size` samples of one pattern.

    Returns (denominator, micro-batches in all, [(pattern, samples in a micro-batch, numerator)]): a pattern
    has numerator/denominator micro-batches, which need not be a whole number.
    """
    if (busiest, size) not in load.cached_micro_batches:
        samples_of = [
            (pattern, busiest * pattern.share / load.sample_share) for pattern in load.active_patterns
        ]
        numbers = [(pattern, min(size, ceil(n)), n / min(size, ceil(n))) for pattern, n in samples_of]
        denominator = lcm(*(n.denominator for *_, n in numbers))
        micro_batches = [(p, samples_each, int(n * denominator)) for p, samples_each, n in numbers]
        load.cached_micro_batches[busiest, size] = (
            denominator,
            max(1, -(-sum(number for *_, number in micro_batches) // denominator)),
            micro_batches,
        )
    return load.cached_micro_batches[busiest, size]


def _micro_batch_times(
    work: Workload, load: SectionLoad, pattern: InputPattern, samples: int, recompute: str
) -> tuple[int, int]:
    """(forward, backward) ns of a micro-batch of `samples` samples of a pattern."""
    key = (pattern.when, samples, recompute)
    if key not in load.cached_numbers:
        sizes = work.mean_micro_batch_sizes(pattern, samples)
        forward, backward = load.pass_ns(recompute)
        mean_sample_times = evaluate_expr(forward, sizes), evaluate_expr(backward, sizes)
        load.cached_numbers[key] = (
            load.spread.mean_ns(pattern.when, mean_sample_times[0]),
            load.spread.mean_ns(pattern.when, mean_sample_times[1]),
        )
    return load.cached_numbers[key]


def subgroup_costs(
    work: Workload, load: SectionLoad, c: Candidate, stage: int | None = None
) -> tuple[SubgroupCost, ...]:
    """The costs of samples that some ranks of cp compute without the others, for each size of
    subgroups that candidate `c` may have. `load` is the section's. What a rank (of `stage`, or by default one
    with most to do) keeps includes what it needs temporarily, and the tensors of edges of all samples that
    its replica computes meanwhile."""
    all_ranks = work.rank_load(load, c.shape, stage=stage)
    span = _replica_span(work, all_ranks, c.dp)
    found: list[SubgroupCost] = []
    for ranks in c.subgroup_sizes:
        own = work.rank_load(load, c.shape._replace(cp=ranks), all_ranks.row_attention, stage)
        times = micro_batch_time_expressions(work, own, c.dp, c.sharding, c.recompute, span)
        edges = [f"{1 + c.cp // ranks}*({text})" for text in _edge_size_expressions(work, load)]
        working = max_expr([text for text in _working_expressions(own, c.recompute) if text != "0"] or ["0"])
        saved = " + ".join([own.cost_under_recompute(c.recompute).saved, working, *edges])
        found.append(SubgroupCost(ranks, Cost(*times, label=own.label, saved=saved)))
    return tuple(found)


def memory_on_rank(
    work: Workload, load: SectionLoad, dp: int, size: int, sharding: str, recompute: str, micro_batches: int
) -> RankMemory:
    """Bytes on a rank by purpose. A micro-batch keeps what backward needs and the tensors that enter and
    leave the section; the largest pattern counts."""
    memory = rank_memory(
        load.cost,
        *_activation_bytes(work, load, size, recompute),
        dp * load.shape.cp,
        sharding,
        micro_batches,
        _largest_sample_bytes(work, load, size, recompute),
        load.shape.offload,
    )
    if (copies := load.activation_copies(recompute)) is None:
        return memory
    return memory._replace(host_activation=_moved_bytes(work, load, size, copies.moved, recompute))


def _moved_bytes(work: Workload, load: SectionLoad, size: int, moved: str, recompute: str) -> int:
    """Bytes that a micro-batch has in host memory, the largest listed sample alone included."""
    key = "moved", size, recompute
    if key not in load.cached_numbers:
        samples = chain.from_iterable(held for _, held in _sample_bytes(work, load, (moved,)))
        means = (evaluate_expr(moved, work.mean_micro_batch_sizes(p, size)) for p in load.active_patterns)
        load.cached_numbers[key] = max((*means, *samples), default=0), 0
    return load.cached_numbers[key][0]


def _host_bytes(work: Workload, load: SectionLoad, rank: RankMemory) -> int:
    """Bytes of host memory of a rank, with as many micro-batches as it may hold in flight."""
    most = rank.micro_batches
    if load.name not in work.producing_sections:
        most = min(most, IN_FLIGHT_PER_STAGE * load.shape.pp)
    return rank.host_bytes(most)


def candidate_memory(work: Workload, load: SectionLoad, c: Candidate) -> RankMemory:
    """Bytes on one rank under candidate `c`. `load` must be that of a rank (see `Workload.rank_load`)."""
    return memory_on_rank(work, load, c.dp, c.micro_batch, c.sharding, c.recompute, c.micro_batches)


def stage_in_flight_limit(work: Workload, load: SectionLoad, c: Candidate, stage: int) -> int:
    """Number of micro-batches that pipeline stage `stage` may hold: its part of up to
    `IN_FLIGHT_PER_STAGE * pp` micro-batches on its rank where memory allows, at least what `least_in_flight`
    says.

    `load` is that of a rank of the stage.
    """
    rank, device = candidate_memory(work, load, c), work.cluster.device
    least, most = least_in_flight(c.pp, c.chunks, stage), IN_FLIGHT_PER_STAGE * c.pp
    if c.chunks == 1:
        return next((n for n in range(most, least, -1) if rank.fits_device(n, device)), least)
    free_bytes = max(0, device.usable_memory - rank.fixed - rank.gradients)
    room = divide_in_flight_room(c.shape, stage, free_bytes, rank.largest_sample // c.chunks)
    kept = rank.activation * load.stages.held[stage] // load.stages.layers
    return max(least, min(divide_in_flight_room(c.shape, stage, c.chunks * most), room // max(1, kept)))


def _activation_bytes(work: Workload, load: SectionLoad, size: int, recompute: str) -> tuple[int, int]:
    """(bytes that a micro-batch keeps from forward to backward, bytes that its forward, backward or
    recomputation needs temporarily)."""
    if (size, recompute) not in load.cached_numbers:
        activation = working = 0
        saved = load.cost_under_recompute(recompute).saved
        for pattern in load.active_patterns:
            sizes = work.mean_micro_batch_sizes(pattern, size)
            activation = max(
                activation,
                sum(evaluate_expr(text, sizes) for text in (saved, *_edge_size_expressions(work, load))),
            )
            working = max(
                working, *(evaluate_expr(text, sizes) for text in _working_expressions(load, recompute))
            )
        if load.mode == "forward":
            working = max(
                working,
                *(max(held) for _, held in _sample_bytes(work, load, (load.cost.forward_transient,))),
                0,
            )
        load.cached_numbers[size, recompute] = activation, working
    return load.cached_numbers[size, recompute]


def _largest_sample_bytes(work: Workload, load: SectionLoad, size: int, recompute: str) -> int:
    """Bytes that the largest listed sample needs in a micro-batch of its own: what it keeps, and what it
    needs temporarily beyond what a micro-batch of `size` mean samples does."""
    key = "largest", recompute
    if key not in load.cached_numbers:
        needed = _needed_sample_bytes(work, load, recompute)
        load.cached_numbers[key] = (
            max((kept for kept, _ in needed), default=0),
            max(map(sum, needed), default=0),
        )
    kept, kept_and_temporary = load.cached_numbers[key]
    _, working = _activation_bytes(work, load, size, recompute)
    return max(kept, kept_and_temporary - working)


def longest_sample_bytes(work: Workload, load: SectionLoad, recompute: str) -> int:
    """Bytes of activations that the largest listed sample needs in a micro-batch of its own; `load` is that
    of a rank."""
    return max(
        (kept + temporary for kept, temporary in _needed_sample_bytes(work, load, recompute)), default=0
    )


def _needed_sample_bytes(work: Workload, load: SectionLoad, recompute: str) -> list[tuple[int, int]]:
    """(bytes kept, bytes needed temporarily) of each listed sample in a micro-batch of its own."""
    if recompute not in load.cached_sample_bytes:
        kept = chain.from_iterable(held for _, held in sample_activation_bytes(work, load, recompute))
        working = [
            chain.from_iterable(held for _, held in _sample_bytes(work, load, (text,)))
            for text in _working_expressions(load, recompute)
        ]
        load.cached_sample_bytes[recompute] = list(
            zip(kept, map(max, zip(*working, strict=True)), strict=True)
        )
    return load.cached_sample_bytes[recompute]


def _working_expressions(load: SectionLoad, recompute: str) -> tuple[str, ...]:
    """Byte expressions of what a forward, backward or recomputation needs temporarily, one at a time."""
    if load.mode == "forward":
        return (load.cost.forward_transient,)
    again = load.cost.recompute.get(recompute)
    texts = (
        load.cost.forward_transient,
        load.cost.backward_transient,
        load.cost.logits_backward_transient,
        again.working if again else "0",
    )
    streamed = load.cost_under_recompute(recompute).streamed
    return texts if streamed == "0" else tuple(f"{text} + {streamed}" for text in texts)


def sample_activation_bytes(
    work: Workload, load: SectionLoad, recompute: str
) -> Iterator[tuple[Mapping[str, Sequence[int]], list[int]]]:
    """Yields, for each pattern, the columns of listed sizes and the bytes that each listed sample keeps in a
    micro-batch of its own.

    `load` is that of a rank.
    """
    return _sample_bytes(
        work, load, (load.cost_under_recompute(recompute).saved, *_edge_size_expressions(work, load))
    )


def _sample_bytes(
    work: Workload, load: SectionLoad, texts: Sequence[str]
) -> Iterator[tuple[Mapping[str, Sequence[int]], list[int]]]:
    """Sum of byte expressions for each listed sample in a micro-batch of its own."""
    for pattern in load.active_patterns:
        if columns := work.listed_sizes.get(pattern.when):
            count = len(next(iter(columns.values())))
            every = {
                name: [size] * count for name, size in work.mean_micro_batch_sizes(pattern, 1).items()
            } | columns
            yield (
                columns,
                list(
                    map(sum, zip(*(evaluate_expr_columns(text, every, count) for text in texts), strict=True))
                ),
            )


def _edge_size_expressions(work: Workload, load: SectionLoad) -> list[str]:
    """Byte expressions of the tensors that enter and leave the section."""
    return [c.size for c in work.crossings if load.name in (c.src, c.dst)]
