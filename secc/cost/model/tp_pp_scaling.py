"""Scales a section's cost to one rank under tensor parallelism (tp) and pipeline stages (pp), and prices
their messages.

Tensor parallelism divides the blocks' weights and products evenly, and logits with what losses make of them
by tokens (`secc.ir.analysis.vocab_sharding`). Norms, residuals and other glue are replicated on every rank.
Of the bytes that a transformer layer saves for backward, about 24 of 34 parts lie between divided products
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, equation 2). Each
layer all-reduces two outputs in forward and two input gradients in backward; a divided vocabulary adds the
rows of the embedding and the gradient of the head's input. Stages hold whole layers, the first one also what
comes before them (embeddings), the last one what comes behind them (heads, losses); these two have fewer
layers if that makes the longest stage shorter.

All-reduces are priced as those of gradients (`secc.cost.model.collectives`): a ring over n ranks sends 2(n -
1) messages of 1/n of the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from heapq import heapify, heapreplace
from math import floor

from secc.cluster import OWN_RUNTIME, Cluster
from secc.cost.model.collectives import all_reduce_messages
from secc.cost.model.cost_expressions import scale_expression
from secc.cost.model.gemm_efficiency import DEFAULT_EFFICIENCY
from secc.cost.model.recompute_cost import RECOMPUTED_LAYERS, RecomputeCost
from secc.cost.model.section_cost import SectionCost
from secc.runtime.plan.expr_eval import evaluate_expr, expression_symbols
from secc.runtime.plan.schema import OVERLAPS, rank_position
from secc.runtime.tensor_parallel.overlapped_products import PRODUCT_CHUNKS

# Korthikanti et al.: 34 bytes per token and hidden unit are saved, 24 of them between divided products.
CUT_ACTIVATION_PARTS, ALL_ACTIVATION_PARTS = 24, 34
GATHERED_ACTIVATION_PARTS = 4  # the inputs of attention and of the feed-forward network
PARAMETER_COUNTS = ("params", "trainable", "param_bytes", "trainable_bytes", "master_bytes")
EXPERT_COUNTS = ("expert_params", "expert_trainable", "expert_bytes", "expert_trainable_bytes")
ALL_REDUCES_PER_LAYER = 2  # after attention and after the feed-forward network
# Parts of a layer's products that attention and the feed-forward network have, by FLOPs: means of GPT (0.25
# and 0.33 in columns, 0.08 and 0.33 in rows), Llama 2 7B (0.25 and 0.45, 0.08 and 0.22) and Llama 3 8B (0.12
# and 0.54, 0.08 and 0.27).
COLUMN_PRODUCTS = (Fraction(20, 100), Fraction(44, 100))
ROW_PRODUCTS = (Fraction(8, 100), Fraction(28, 100))
HIDDEN_PERCENT = 85  # of a hidden sum; the rest is what products lose to its kernels (assumed)
TYPICAL_SIZE = 8192  # of every symbol, where only a ratio of two costs counts


@dataclass(frozen=True)
class TensorSums:
    """Nanoseconds of the sums over tp that products do not hide, as expressions over a micro-batch's symbols:
    of one forward, of the input gradients of one backward, and the fraction of a forward's that layers need
    when they run again."""

    forward_ns: str = "0"
    gradient_ns: str = "0"
    again: Fraction = Fraction(1)

    def backward_ns(self, recompute: str) -> str:
        """Sums in a backward; layers that run again sum again, but for their last sum."""
        again = scale_expression(self.forward_ns, self.again * RECOMPUTED_LAYERS[recompute])
        return self.gradient_ns if again == "0" else f"{self.gradient_ns} + {again}"


def price_tensor_sums(
    cost: SectionCost,
    tp: int,
    cluster: Cluster,
    overlap: str = "none",
    sizes: Mapping[str, int] | None = None,
    splits_backward: bool = False,
) -> TensorSums:
    """Prices the sums over tp of a micro-batch.

    cost: of a rank. overlap: which sums travel behind products (`Section.overlap`); how much of them these
    hide is found for a micro-batch of `sizes`, and the same part is taken of every other one.
    splits_backward: the first part of a backward has no weight gradients to hide sums behind.
    """
    if tp == 1 or cost.layers == 0:
        return TensorSums()
    messages, link = all_reduce_messages(tp, cluster)
    # With sequence parallelism, gathering positions at a layer's ends costs half an all-reduce more.
    all_reduces = (
        Fraction(cost.layers * cost.sequence_parallel, 2)
        + ALL_REDUCES_PER_LAYER * cost.layers
        + (cost.logits_moved != "0")
    )
    per_layer = all_reduces / cost.layers
    bandwidth = per_layer.denominator * (tp * link.bytes_per_s // 10**6)
    moving = f"{messages * per_layer.numerator}*1000*({cost.layer_input_bytes})//({bandwidth})"
    latency = messages * link.latency_ns
    framework = cluster.device.framework
    share = Fraction(framework.tp_percent * (100 - framework.tp_hidden_percent), 100**2)
    sums = _LayerSums(cost, cluster, latency, moving, all_reduces, sizes or {})

    def price(chunks: int, hidden_ns: int) -> str:
        more = (chunks - 1) * latency * ALL_REDUCES_PER_LAYER * cost.layers // (1 + cost.sequence_parallel)
        text = f"{int(latency * all_reduces) + more} + {moving}"
        total = evaluate_expr(text, sums.sizes)
        left = Fraction(round(1000 * (total - hidden_ns) / total), 1000) if hidden_ns else Fraction(1)
        return scale_expression(text, share * left)

    # When a layer runs again, it stops as soon as the backward has what it needs, which is before the layer's
    # last sum. With `norms=sequence`, that sum is two halves: the layer ends with the half that scatters, and
    # only this half is saved, since the next layer begins with the half that gathers.
    again = Fraction(1)
    if framework == OWN_RUNTIME:
        last = Fraction(cost.layers, 1 + cost.sequence_parallel) + (cost.logits_moved != "0")
        again = (all_reduces - last) / all_reduces
    opened = price(1, 0)
    if overlap == "none":
        return TensorSums(opened, opened, again)
    trained = Fraction(0 if splits_backward else cost.trainable, max(1, cost.params))
    gradients = price(1, sums.hidden_ns(COLUMN_PRODUCTS, trained, 1))
    if overlap == "backward":
        return TensorSums(opened, gradients, again)
    hidden = sums.hidden_ns(ROW_PRODUCTS, Fraction(1), PRODUCT_CHUNKS)
    return TensorSums(price(PRODUCT_CHUNKS, hidden), gradients, again)


class _LayerSums:
    """The sums of a section's layers in a micro-batch of `sizes`, and the products that may hide them."""

    def __init__(
        self,
        cost: SectionCost,
        cluster: Cluster,
        latency: int,
        moving: str,
        all_reduces: Fraction,
        sizes: Mapping[str, int],
    ) -> None:
        symbols = expression_symbols(f"{cost.layer_work} + {moving}")
        self.sizes = dict.fromkeys(symbols, TYPICAL_SIZE) | dict(sizes)
        work = evaluate_expr(cost.layer_work, self.sizes)
        self.layers, self.dense_layers = cost.layers, max(0, cost.layers - cost.expert_layers)
        self.products_ns = Fraction(1000 * work, cluster.device.flops_per_us(cost.dtype) * cost.layers)
        # With sequence parallelism, half of an all-reduce passes behind products: a reduce-scatter.
        behind = Fraction(1, 2) if cost.sequence_parallel else Fraction(1)
        self.moving_ns = behind * evaluate_expr(moving, self.sizes) / all_reduces
        self.latency_ns = behind * latency

    def hidden_ns(self, parts: tuple[Fraction, Fraction], weight: Fraction, chunks: int) -> int:
        """Ns of sums that pass behind products of attention and of the feed-forward network, `parts` of a
        layer's products, times `weight`. One chunk is all of a sum behind a product that does not need it;
        of several, each but the last travels behind the product of the next one. Results of experts are
        summed in the open."""
        each, hidden = self.latency_ns + self.moving_ns / chunks, Fraction(0)
        for part, layers in zip(parts, (self.layers, self.dense_layers), strict=True):
            product = part * weight * self.products_ns / chunks
            hidden += layers * max(1, chunks - 1) * min(product, each)
        return int(hidden * HIDDEN_PERCENT / 100)


def choose_overlap(
    cost: SectionCost, tp: int, cluster: Cluster, mode: str, sizes: Mapping[str, int], pinned: str = ""
) -> str:
    """Returns which sums over tp travel behind products: what is shortest for a micro-batch of these sizes,
    or what is pinned. `mode`: of the section, `cost`: of a rank. On CPUs sums need the processor themselves,
    and nothing hides them."""
    if tp == 1 or cost.layers == 0:
        return "none"
    if pinned or cluster.device.backend == "cpu" or cluster.device.framework != OWN_RUNTIME:
        return pinned or "none"

    def step_ns(overlap: str) -> int:
        sums = price_tensor_sums(cost, tp, cluster, overlap, sizes)
        text = sums.forward_ns if mode == "forward" else f"{sums.forward_ns} + {sums.gradient_ns}"
        return evaluate_expr(text, dict.fromkeys(expression_symbols(text), TYPICAL_SIZE) | dict(sizes))

    return min(OVERLAPS, key=step_ns)


@dataclass(frozen=True)
class StageShares:
    """Parts of a section that its stages have.

    layers: the fraction of its layers on the rank with most of them, which needs most memory.
    times: the fractions of its time that the stages take, first to last.
    longest: the fraction of its time that the longest rank takes, with all its stages.
    held: the fractions of its layers that the stages have, first to last.
    forwards, backwards: the fractions of its forward and of its backward that the stages take, first to last.
    """

    layers: Fraction
    times: tuple[Fraction, ...]
    longest: Fraction
    held: tuple[Fraction, ...]
    forwards: tuple[Fraction, ...]
    backwards: tuple[Fraction, ...]

    def of_rank(self, own: Sequence[int]) -> StageShares:
        """The parts where `layers` and `longest` are those of the rank with the stages `own`."""
        layers, longest = (sum((parts[i] for i in own), Fraction(0)) for parts in (self.held, self.times))
        return replace(self, layers=layers, longest=longest)

    def sum_over(self, longest_ns: int) -> int:
        """Ns over all stages of what takes the longest rank `longest_ns`."""
        whole, part = self.longest.numerator, self.longest.denominator
        return longest_ns * part // whole if longest_ns >= 0 else -(-longest_ns * part // whole)

    def forward_of_stage(self, text: str, stage: int) -> str:
        """The forward of the stage of this number, given that of the longest rank as an expression, which has
        its share of the whole time."""
        return scale_expression(text, self.forwards[stage] / self.longest)

    def backward_of_stage(self, text: str, stage: int) -> str:
        """The backward of the stage of this number, given that of the longest rank."""
        return scale_expression(text, self.backwards[stage] / self.longest)


_ALL = (Fraction(1),)
WHOLE_SECTION = StageShares(Fraction(1), _ALL, Fraction(1), _ALL, _ALL, _ALL)
# By this share of a mean stage a longest one may take more before layers are divided.
UNEVEN_SHARE = Fraction(1, 50)
PLACE_ERROR = Fraction(3, 10)  # of a layer: by this much the places of even stages may be wrong
StageEnds = tuple[Fraction, Fraction]  # fractions of a time that pass before and behind a section's layers
NO_ENDS = Fraction(0), Fraction(0)


@cache
def stage_shares(
    layers: int,
    pp: int,
    ends: StageEnds = NO_ENDS,
    chunks: int = 1,
    placement: str = "loop",
    pass_ends: tuple[StageEnds, StageEnds] | None = None,
) -> StageShares:
    """What the stages, `chunks` on each of `pp` ranks, have of a section with `layers` equal layers.

    ends: the fractions of its time that pass before its layers, in the first stage, and behind them, in the
    last one; `pass_ends` has those of its forward and of its backward, which differ where a head computes
    gradients in its forward. The longest stage is as short as possible, and the others are as even as whole
    layers allow, as in `secc.passes.boundaries.stage_cuts.balance_stages`: each layer goes to the stage that
    has least, and of equal ones to the latest, which holds fewest micro-batches.
    """
    stages = pp * chunks
    if stages == 1:
        return WHOLE_SECTION
    layers = max(layers, stages)
    one_layer = (1 - ends[0] - ends[1]) / layers
    held = [0] * stages
    queue = [(Fraction(0), -i) for i in range(1, stages - 1)] + [(ends[0], 0), (ends[1], 1 - stages)]
    heapify(queue)
    for _ in range(layers):
        time, stage = queue[0]
        held[-stage] += 1
        heapreplace(queue, (time + one_layer, stage))
    times = _times_of_stages(held, ends)
    on_rank: dict[int, list[int]] = {}
    for stage in range(stages):
        on_rank.setdefault(rank_position(stage, pp, placement), []).append(stage)
    most = max(sum(held[i] for i in own) for own in on_rank.values())
    longest = max(sum((times[i] for i in own), Fraction(0)) for own in on_rank.values())
    # A stage without a layer, in front of a long head, still has weights and activations of its own.
    parts = tuple(Fraction(max(1, n), layers) for n in held)
    forwards, backwards = (_times_of_stages(held, own) for own in pass_ends or (ends, ends))
    return StageShares(Fraction(most, layers), times, longest, parts, forwards, backwards)


def layers_at_even_cuts(layers: int, stages: int, ends: StageEnds) -> list[int]:
    """Positions, among `layers` equal layers, of those inside which stages of equal times may begin: `ends`,
    those of `stage_shares`, are estimates. Empty where whole layers make the longest stage hardly longer than
    a mean one."""
    if layers < 2 or stages * stage_shares(layers, stages, ends).longest <= 1 + UNEVEN_SHARE:
        return []
    one_layer = (1 - ends[0] - ends[1]) / layers
    places = [(Fraction(stage, stages) - ends[0]) / one_layer for stage in range(1, stages)]
    near = {floor(place + shift) for place in places for shift in (-PLACE_ERROR, PLACE_ERROR)}
    return sorted(near & {*range(layers)})


def _times_of_stages(held: Sequence[int], ends: StageEnds) -> tuple[Fraction, ...]:
    """The fractions of a section's time that its stages take; `held`: the layers of each stage."""
    times = [n * (1 - ends[0] - ends[1]) / sum(held) for n in held]
    times[0], times[-1] = times[0] + ends[0], times[-1] + ends[1]
    return tuple(times)


def cost_on_rank(cost: SectionCost, tp: int, stages: StageShares = WHOLE_SECTION) -> SectionCost:
    """The cost of the part of a section that a rank of a stage has: times of the longest stage, memory of the
    one with most layers. Tensor parallelism does not divide `ops` and glue, nor the products that stay whole
    in its layers."""
    if tp == 1 and stages == WHOLE_SECTION:
        return cost
    longest, stage_share = stages.longest, stages.layers
    whole = Fraction(cost.whole_permille, 1000)
    part = whole + (1 - whole) / tp
    divided_share, divided_time = stage_share * part, longest * part
    replicated_parts = ALL_ACTIVATION_PARTS - CUT_ACTIVATION_PARTS
    activations_per_layer = (replicated_parts + CUT_ACTIVATION_PARTS * part) / ALL_ACTIVATION_PARTS
    activations_share = stage_share * activations_per_layer
    if cost.sequence_parallel:  # inputs of the divided products are gathered and saved whole
        divided_parts = ALL_ACTIVATION_PARTS - GATHERED_ACTIVATION_PARTS
        activations_share = (
            stage_share * (GATHERED_ACTIVATION_PARTS + divided_parts * part) / ALL_ACTIVATION_PARTS
        )
    logits_share, logits_time = stage_share / tp, longest / tp
    slowdown = narrowing_slowdown(cost.narrowest_dim, tp)
    recompute = {
        kind: _recompute_on_rank(
            costs, stages, divided_time * slowdown, activations_share, cost.logits_saved, logits_share
        )
        for kind, costs in cost.recompute.items()
    }
    counts = {
        key: ceil_share(getattr(cost, key), divided_share) for key in (*PARAMETER_COUNTS, *EXPERT_COUNTS)
    }
    return replace(
        cost,
        largest_layer_bytes=ceil_share(cost.largest_layer_bytes, part),
        outside_layers_bytes=-(-cost.outside_layers_bytes // tp),
        flops=scale_expression(cost.flops, divided_time),
        backward_flops=scale_expression(cost.backward_flops, divided_time),
        work=scale_expression(cost.work, divided_time * slowdown),
        backward_work=scale_expression(cost.backward_work, divided_time * slowdown),
        saved=_scale_in_parts(cost.saved, activations_share, cost.logits_saved, logits_share),
        outside_saved=_scale_in_parts(cost.outside_saved, activations_share, cost.logits_saved, logits_share),
        glue_bytes=_scale_in_parts(
            cost.glue_bytes, longest * activations_share / stage_share, cost.logits_moved, logits_time
        ),
        logits_saved=scale_expression(cost.logits_saved, logits_share),
        logits_moved=scale_expression(cost.logits_moved, logits_time),
        logits_transient=scale_expression(cost.logits_transient, Fraction(1, tp)),
        call_transient=scale_expression(cost.call_transient, activations_per_layer),
        narrowest_dim=cost.narrowest_dim // tp,
        forward_ns=scale_expression(cost.forward_ns, divided_time),
        backward_ns=scale_expression(cost.backward_ns, divided_time),
        layer_input_bytes=scale_expression(cost.layer_input_bytes, stage_share),
        exchanged_bytes=scale_expression(cost.exchanged_bytes, divided_share),
        query_bytes=scale_expression(cost.query_bytes, divided_share),
        layer_work=scale_expression(cost.layer_work, divided_share * slowdown),
        ops=ceil_share(cost.ops, longest),
        layers=ceil_share(cost.layers, stage_share),
        recompute=recompute,
        routed_work=scale_expression(cost.routed_work, divided_time * slowdown),
        routed_backward_work=scale_expression(cost.routed_backward_work, divided_time * slowdown),
        routed_bytes=scale_expression(cost.routed_bytes, divided_time),
        expert_row_work=ceil_share(cost.expert_row_work, divided_time * slowdown),
        expert_layers=ceil_share(cost.expert_layers, stage_share),
        **counts,
    )


def _recompute_on_rank(
    costs: RecomputeCost,
    stages: StageShares,
    divided: Fraction,
    activations_share: Fraction,
    logits: str,
    cut: Fraction,
) -> RecomputeCost:
    """Recomputation cost on a rank: recomputed layers keep their inputs, which every rank of tp holds
    whole; logits are divided."""
    per_layer = activations_share / stages.layers
    return RecomputeCost(
        _scale_in_parts(costs.saved, stages.layers, logits, cut),
        scale_expression(costs.working, per_layer),
        scale_expression(costs.work, divided),
        ceil_share(costs.ops, stages.longest),
        scale_expression(costs.moved, stages.longest * per_layer),
        scale_expression(costs.unneeded, divided),
    )


def _scale_in_parts(text: str, share: Fraction, part: str, cut: Fraction) -> str:
    """The fraction `share` of an expression without its part `part`, plus the fraction `cut` of that part."""
    if part == "0" or share == cut:
        return scale_expression(text, share)
    return f"{scale_expression(f'{text} - ({part})', share)} + {scale_expression(part, cut)}"


def narrowing_slowdown(narrow: int, tp: int) -> Fraction:
    """How much longer the same FLOPs take after tp has divided the smallest weight dimension: a factor, in
    hundredths."""
    if not narrow:
        return Fraction(1)
    rate = DEFAULT_EFFICIENCY.percent_of_rate
    return Fraction(round(100 * rate(narrow) / rate(max(1, narrow // tp))), 100)


def ceil_share(count: int, share: Fraction) -> int:
    """The fraction `share` of `count`, rounded up."""
    return -(-count * share.numerator // share.denominator)
