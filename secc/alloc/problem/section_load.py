"""The load of a section: its cost, and its forward and backward times as expressions over the sizes of a
micro-batch. `compute_rank_load` derives the load of one rank from that of the whole section.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from secc.alloc.problem.pins import PIN_WORDS
from secc.alloc.problem.size_spread import PERMILLE, SizeSpread
from secc.alloc.problem.types import WHOLE, ReplicaShape
from secc.cluster import Cluster, Device
from secc.cost.model import cp_scaling, roofline, tp_pp_scaling
from secc.cost.model.activation_copies import ActivationCopies, price_activation_copies
from secc.cost.model.cost_expressions import scale_expression
from secc.cost.model.expert_parallel_cost import cost_with_expert_parts, exchange_ns
from secc.cost.model.framework_cost import cost_under_framework, saved_under_framework
from secc.cost.model.patterns_and_transfers import InputPattern
from secc.cost.model.recompute_cost import RECOMPUTED_LAYERS
from secc.cost.model.section_cost import SectionCost
from secc.cost.model.tp_pp_scaling import NO_ENDS, WHOLE_SECTION, StageEnds, StageShares, stage_shares
from secc.cost.model.zero3_cost import ParameterTransfers, weight_copies
from secc.ir.analysis.dataflow import get_number, get_string
from secc.ir.dialect.ops import SectionOp
from secc.runtime.plan.expr_eval import evaluate_expr

# Attributes of a section: measured over modelled times in permille, written by `secc.driver.replan_from_run`.
MEASURED_PERMILLE_ATTRIBUTES = ("forward_permille", "backward_permille")

# What a split backward keeps between its parts besides saved activations, for gradients of parameters: the
# gradients that entered its products, over the bytes saved. Counted on layers of Llama (0.50, with grouped
# keys 0.54) and CLIP (0.55) between the two parts of `secc.runtime.training.split_backward`.
KEPT_GRADIENTS_SHARE = Fraction(11, 20)

# (denominator, micro-batches in all, [(pattern, samples in a micro-batch, numerator)])
ExpectedMicroBatches = tuple[int, int, list[tuple[InputPattern, int, int]]]


class BusiestReplica(NamedTuple):
    """What the busiest replica of a section does in a step: ns of all its micro-batches, their number, and ns
    of the longest forward and backward."""

    total_ns: int
    micro_batches: int
    forward_ns: int
    backward_ns: int

    @property
    def mean_forward_ns(self) -> int:
        """Ns of a mean forward, with the share of forwards in the longest micro-batch."""
        longest = self.forward_ns + self.backward_ns
        return self.total_ns * self.forward_ns // (self.micro_batches * longest) if longest else 0


class RankShare(NamedTuple):
    """What a rank of a pipeline has of a section: fractions of its layers and of its time, and whether it has
    what lies before and behind the layers."""

    layers: Fraction
    time: Fraction
    first: bool
    last: bool


class UpdateTimes(NamedTuple):
    """What follows the backwards of a section on a rank, in ns: sums of gradients, gathers of the updated
    parameters, the part of these that no forward hides, and the optimizer step."""

    sums: int
    gathers: int
    open_gathers: int
    optimizer: int

    @property
    def open_share(self) -> Fraction:
        """The part of the gathers that no forward hides."""
        return Fraction(self.open_gathers, self.gathers or 1)


@dataclass(frozen=True)
class SectionLoad:
    """A section as the cost model sees it: its cost, its time expressions in ns, and the input patterns that
    it is active for.

    `backward_ns` maps each recompute mode to an expression. `shape` says how many ranks share a replica: cost
    and times are those of one of these ranks (by default the whole section). `spread` describes how the times
    of its samples differ. `end_shares` are the fractions of the section's time that pass before and behind
    its layers, `outside` counts the parameters there (before, behind, both), `stages` is what its stages
    have, `row_attention` how ranks of cp attend to each other's rows, and `overlap` which sums over tp travel
    behind products. `mean_sizes` are those of a mean sample of the most frequent pattern. `weight_permille`
    is the second part's share of a split backward under each recompute mode.
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
    end_shares: StageEnds = NO_ENDS
    pass_end_shares: tuple[StageEnds, StageEnds] = (NO_ENDS, NO_ENDS)
    outside: tuple[Mapping[str, int], ...] = ()
    stages: StageShares = WHOLE_SECTION
    row_attention: str = "gather"
    overlap: str = "none"
    mean_sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    cached_numbers: dict[object, tuple[int, int]] = field(
        init=False, repr=False, compare=False, default_factory=dict[object, tuple[int, int]]
    )
    cached_micro_batches: dict[tuple[int, int], ExpectedMicroBatches] = field(  # shared by all shapes
        repr=False, compare=False, default_factory=dict[tuple[int, int], ExpectedMicroBatches]
    )
    cached_busiest: dict[tuple[int, int, str], BusiestReplica] = field(
        init=False, repr=False, compare=False, default_factory=dict[tuple[int, int, str], BusiestReplica]
    )
    cached_sample_bytes: dict[str, list[tuple[int, int]]] = field(
        init=False, repr=False, compare=False, default_factory=dict[str, list[tuple[int, int]]]
    )
    forward_with_copies: Mapping[str, str] = field(default_factory=dict[str, str])
    weight_permille: Mapping[str, int] = field(default_factory=dict[str, int])
    cached_updates: dict[tuple[int, str, int], UpdateTimes] = field(
        init=False, repr=False, compare=False, default_factory=dict[tuple[int, str, int], UpdateTimes]
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
        return stage_shares(
            self.cost.layers,
            shape.pp,
            self.end_shares,
            shape.chunks,
            shape.placement,
            self.pass_end_shares,
        )

    def layers_at_even_cuts(self, stages: int) -> list[int]:
        """Positions of the layers inside which stages of equal times, of this number, may begin."""
        return tp_pp_scaling.layers_at_even_cuts(self.cost.layers, stages, self.end_shares)

    def share_of_stage(self, shape: ReplicaShape, stage: int) -> RankShare | None:
        """What the ranks of a stage have of the section; None for the only stage."""
        if shape.stages == 1:
            return None
        own = shape.stages_on_rank(stage)
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
        Between the parts of a split backward, what was computed again stays, too, and so do gradients that
        entered products (`kept_between`)."""
        if (copies := self.activation_copies(recompute)) is not None:
            return replace(self.cost, saved=self.cost.outside_saved, streamed=copies.streamed)
        again = self.cost.recompute.get(recompute)
        saved, kept_between = self.cost.saved if again is None else again.saved, "0"
        if self.shape.backward_parts > 1 and self.cost.saved != "0":
            both = scale_expression(self.cost.saved, 1 + KEPT_GRADIENTS_SHARE)
            gradients = scale_expression(self.cost.saved, KEPT_GRADIENTS_SHARE)
            kept_between = gradients if again is None else f"{both} - ({saved})"
        return replace(self.cost, saved=saved, kept_between=kept_between)


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
        stages = stages.of_rank(shape.stages_on_rank(stage))
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
    later: dict[str, int] = {}
    if backward_parts > 1:
        backward = {mode: _add_times(text, str(device.overheads.job)) for mode, text in backward.items()}
        later = {
            way: _weight_gradient_permille(cost, text, way, device, whole.mean_sizes)
            for way, text in backward.items()
        }
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
        weight_permille=later,
        label=roofline.time_label(cost, device),
        shape=shape,
        stages=stages,
        row_attention=attention,
        overlap=overlap,
    )


def _weight_gradient_permille(
    cost: SectionCost, backward_ns: str, recompute: str, device: Device, sizes: Mapping[str, int]
) -> int:
    """The share of a backward that computes gradients of parameters: at a mean sample the products that do,
    as long as those of layers in a forward. Attention, norms, sums over ranks and layers that run again are
    no part of it. Where times are measured or experts compute, the share of parameters; layers that run again
    take as long as their input gradients."""
    others = cost.params + int(cost.params * RECOMPUTED_LAYERS[recompute])
    by_parameters = PERMILLE * cost.trainable // max(1, others + cost.trainable)
    if cost.label == "measured" or cost.experts or cost.layer_work == "0" or not sizes:
        return by_parameters
    products_ns = 1000 * evaluate_expr(cost.layer_work, sizes) // device.flops_per_us(cost.dtype)
    total_ns = max(1, evaluate_expr(backward_ns, sizes))
    return min(by_parameters, PERMILLE * products_ns * cost.trainable // (max(1, cost.params) * total_ns))


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
