"""Cost of a section: the sums over its calls and glue for each captured case, and the parameters it holds.

Cases compute different things, so a section costs the maximum over its cases. A case with more optional
inputs usually contains the others (its size symbols are 0 where an input is missing), so the maximum is
exact there. Costs are expressions as text, because ranks evaluate them too
(`secc.runtime.plan.expr_eval`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from math import gcd
from typing import Any, Literal

import sympy
from xdsl.dialects.builtin import ArrayAttr, FloatAttr, IntegerAttr, StringAttr
from xdsl.ir import Operation, SSAValue

from secc.cost.model.cost_expressions import max_expr, substitute_estimates, sum_counted_exprs
from secc.cost.model.default_estimate import (
    ZERO,
    CallCost,
    count_entries,
    default_call_cost,
    leading_rows,
)
from secc.cost.model.glue_memory import VIEW_OP_NAMES, GlueMemory, measure_glue, op_has_backward
from secc.cost.model.linear_loss import FusedLossCost, fused_loss_cost
from secc.cost.model.patterns_and_transfers import input_patterns, micro_batch_sizes
from secc.cost.model.recompute_cost import (
    RecomputeAccumulator,
    RecomputeCost,
    recompute_costs,
    selectively_recomputed_blocks,
)
from secc.ir.analysis.dataflow import evaluate_at_means, get_string, size_estimates, value_bytes
from secc.ir.analysis.layers import counts_as_layer, is_part_of_layer, layer_path
from secc.ir.analysis.vocab_sharding import VocabSpread, find_sharded_heads
from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import (
    BlockOp,
    CallOp,
    CaseOp,
    GlueOp,
    GraphOp,
    ParamOp,
    SectionOp,
    TieOp,
    section_of,
    strings_of,
)
from secc.ir.dialect.readable_names import OUT_OF_TURN_ATTRIBUTE
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import tensor_type
from secc.runtime.plan.expr_eval import evaluate_expr

SectionPart = Literal["whole", "before", "behind", "outside"]  # of a section, by its layers

# Assumed exponent of Zipf's law for the loads of experts: the busiest of 8 parts of 128 experts then gets 1.2
# times its share.
DEFAULT_EXPERT_LOAD = 0.3
EXPERT_PARTS_ATTRIBUTE = "expert_parts"  # of a block: `SectionCost.expert_parts` of its mixtures, in a row
# Of a block with experts in lists: their rows for each row that enters, in permille.
LISTED_CHOICES_ATTRIBUTE = "listed_choices"
TP_WHOLE_ATTRIBUTE = "tp_whole"  # of a block: permille of its parameters that tp leaves whole in its layers
FLOAT32_BYTES = 4  # per entry of a parameter without a recorded dtype
# Backward FLOPs of attention over forward FLOPs: gradients of queries, keys, values and scores are computed
# whichever parameters train.
ATTENTION_BACKWARD_FLOPS_RATIO = 2
# Backward time over forward time: a fused kernel keeps no scores and computes them again.
ATTENTION_BACKWARD_TIME_RATIO = sympy.Rational(5, 2)
# Expressions on calls that are left out where they are zero.
OPTIONAL_EXPRESSIONS = (
    "peak", "working", "again", "again_moved", "unneeded", "attention", "attention_work", "moved", "routed",
    "routed_work", "exchanged", "queries", "pieces", "parts", "entries", "unshared",
)  # fmt: skip
MATMUL_OP_NAMES = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_EXPRESSION_FIELDS = (  # fields of SectionCost that are expressions over size symbols
    "flops",
    "backward_flops",
    "work",
    "backward_work",
    "saved",
    "outside_saved",
    "glue_bytes",
    "forward_ns",
    "backward_ns",
    "layer_input_bytes",
    "logits_saved",
    "logits_moved",
    "call_transient",
    "glue_transient",
    "logits_transient",
    "routed_work",
    "routed_backward_work",
    "routed_bytes",
    "exchanged_bytes",
    "query_bytes",
    "row_pieces",
    "attended_parts",
    "batch_entries",
    "unshared_bytes",
    "layer_work",
)


@dataclass(frozen=True, kw_only=True)
class SectionCost:
    """Cost of one micro-batch of a section (expressions over its size symbols), and the section's parameters.

    Computation, for one forward or backward:
        flops, backward_flops: FLOPs.
        work, backward_work: the same FLOPs without those of experts, weighted by how slow products of their
            shapes are (`secc.cost.model.gemm_efficiency`); times are computed from these.
        layer_work: the part of `work` that is products of layers with their weights, measured calls included.
        glue_bytes: bytes moved in forward by glue, and inside blocks by all operations but products.
        ops: operations issued in forward.
        forward_ns, backward_ns: measured nanoseconds. Calls with measured times are in these fields and not
            in `work` and `glue_bytes`.

    Memory of a micro-batch, in bytes:
        saved: kept from forward to backward. outside_saved: the part of it that no stack of layers keeps.
        streamed: activations of layers on their way to or from host memory, where they are kept there.
        kept_between: kept in addition between the two parts of a split backward.
        logits_saved, logits_moved: the parts of `saved` and `glue_bytes` in tensors with a vocabulary
            dimension. Tensor parallelism divides these by tokens.
        call_transient, glue_transient, logits_transient: what exists at once in addition to `saved`: results
            that are still needed, gradients, and what a call holds inside. In a forward by calls without a
            backward; in forwards and backwards of glue; and in those of glue on tensors with a vocabulary
            dimension (`secc.cost.model.glue_memory`).

    Parameters:
        params, trainable: entries. param_bytes, trainable_bytes: their bytes.
        trainable_tensors: number of parameters that train.
        master_bytes: float32 master weights that the optimizer updates; 0 without mixed precision.

    Layers, for pipeline stages, tensor parallelism and ZeRO-3:
        layers: layers of stacks that the calls run. layer_input_bytes: bytes entering all of them.
        exchanged_bytes: keys and values of all layers in forward, each head once, which ranks exchange under
            context parallelism. query_bytes: queries and results of all layers. key_heads: heads of keys of
            each layer, the largest common divisor; 0 if a layer cannot exchange heads.
        row_pieces: whole frames or windows that ranks of context parallelism get in a vision tower; "0" where
            they get rows. Only layers that attend to `attended_parts`, which are fewer, exchange anything.
            batch_entries: frames that ranks can get whole where a sample has several entries of the batch
            that layers work on; "0" elsewhere. entries_per_sample: of them, the mean, rounded.
            unshared_bytes: saved before the first layer, on each rank that has whole frames or windows.
        largest_layer_bytes: parameters of the largest layer. outside_layers_bytes: of everything else.
        narrowest_dim: smallest weight dimension of the call that issues most operations; 0 if unknown.
        whole_permille: permille of the parameters that `tp` leaves whole in layers.
        sequence_parallel: norms and residuals work on parts of the sequence.

    Experts that lie in stacked parameters:
        experts: their number (the largest common divisor, where mixtures differ); 0 for none.
        expert_params, expert_trainable, expert_bytes, expert_trainable_bytes: parameters, as above.
        routed_work, routed_backward_work: weighted FLOPs of their products
            (`secc.cost.model.grouped_products`).
        expert_row_work: weighted FLOPs of one row in each expert of all mixtures, in forward.
        routed_bytes: rows of all layers that enter experts in forward, one for each choice of a token.
        expert_layers: mixtures. expert_load: exponent of Zipf's law for the loads of experts.
        expert_parts: (number of parts, load of the busiest one over the mean one in permille) as counted on
            drawn samples; () where routers were not run.
        expert_replicas: replicas that have different experts and exchange rows.

    recompute: cost with activation recomputation, by kind ("selective", "full").
    dtype: short name of the dtype most calls compute in. label: where the numbers come from: "measured",
    "counted", or "default" if any part is an estimate.
    """

    flops: str
    backward_flops: str
    work: str
    backward_work: str
    saved: str
    glue_bytes: str
    ops: int
    params: int
    trainable: int
    param_bytes: int
    trainable_bytes: int
    dtype: str
    label: str
    recompute: Mapping[str, RecomputeCost] = field(default_factory=dict[str, RecomputeCost])
    layers: int = 0
    layer_input_bytes: str = "0"
    narrowest_dim: int = 0
    whole_permille: int = 0
    forward_ns: str = "0"
    backward_ns: str = "0"
    master_bytes: int = 0
    logits_saved: str = "0"
    outside_saved: str = "0"
    streamed: str = "0"
    kept_between: str = "0"
    logits_moved: str = "0"
    call_transient: str = "0"
    glue_transient: str = "0"
    logits_transient: str = "0"
    largest_layer_bytes: int = 0
    outside_layers_bytes: int = 0
    sequence_parallel: bool = False
    trainable_tensors: int = 0
    experts: int = 0
    expert_params: int = 0
    expert_trainable: int = 0
    expert_bytes: int = 0
    expert_trainable_bytes: int = 0
    routed_work: str = "0"
    routed_backward_work: str = "0"
    routed_bytes: str = "0"
    exchanged_bytes: str = "0"
    query_bytes: str = "0"
    row_pieces: str = "0"
    batch_entries: str = "0"
    entries_per_sample: int = 0
    attended_parts: str = "0"
    unshared_bytes: str = "0"
    layer_work: str = "0"
    key_heads: int = 0
    expert_row_work: int = 0
    expert_layers: int = 0
    expert_load: float = DEFAULT_EXPERT_LOAD
    expert_parts: tuple[tuple[int, int], ...] = ()
    expert_replicas: int = 1

    @property
    def expert_gradient_sum_bytes(self) -> int:
        """Bytes of the gradients of experts in the dtype in which ranks sum them."""
        return max(FLOAT32_BYTES * self.expert_trainable, self.expert_trainable_bytes)

    @property
    def gradient_sum_bytes(self) -> int:
        """Bytes of the gradients in the dtype in which ranks sum them: float32, or the parameters' dtype if
        that is wider."""
        return max(FLOAT32_BYTES * self.trainable, self.trainable_bytes)

    @property
    def optimizer_weight_bytes(self) -> int:
        """Bytes of the weights that the optimizer updates: float32 masters, or the trainable parameters."""
        return self.master_bytes or self.trainable_bytes


@dataclass
class _CostAccumulator:
    """Running sums over the operations of one case.

    Counters hold each addend (an expression as text) with its multiplicity, so that the equal layers of a
    stack are added once.
    """

    memory: GlueMemory
    flops: Counter[str] = field(default_factory=Counter[str])
    backward_flops: Counter[str] = field(default_factory=Counter[str])
    work: Counter[str] = field(default_factory=Counter[str])
    backward_work: Counter[str] = field(default_factory=Counter[str])
    saved: Counter[str] = field(default_factory=Counter[str])
    glue_bytes: Counter[str] = field(default_factory=Counter[str])
    forward_ns: Counter[str] = field(default_factory=Counter[str])
    backward_ns: Counter[str] = field(default_factory=Counter[str])
    routed_work: Counter[str] = field(default_factory=Counter[str])
    routed_backward_work: Counter[str] = field(default_factory=Counter[str])
    routed_bytes: Counter[str] = field(default_factory=Counter[str])
    exchanged_bytes: Counter[str] = field(default_factory=Counter[str])
    query_bytes: Counter[str] = field(default_factory=Counter[str])
    row_pieces: Counter[str] = field(default_factory=Counter[str])
    attended_parts: Counter[str] = field(default_factory=Counter[str])
    unshared_bytes: Counter[str] = field(default_factory=Counter[str])
    layer_work: Counter[str] = field(default_factory=Counter[str])
    expert_row_work: int = 0
    outside_saved: Counter[str] = field(default_factory=Counter[str])
    logits_moved: Counter[str] = field(default_factory=Counter[str])
    ops: int = 0
    layers: int = 0
    layer_input_bytes: Counter[str] = field(default_factory=Counter[str])
    recompute: RecomputeAccumulator = field(default_factory=RecomputeAccumulator)


def section_cost(graph: GraphOp, section: SectionOp, part: SectionPart = "whole") -> SectionCost:
    """Compute the cost of a section from the attributes on its calls, or by estimate where they are missing.

    part: "before" counts only what layers need and computes without them (embeddings), "behind" all else that
    no stack of layers computes (heads, losses), "outside" both.

    Symbols that depend on the values of inputs are replaced by their estimates, because ranks evaluate costs
    before they know those values.
    """
    cost = _section_cost_in_all_symbols(graph, section, part)
    estimates = size_estimates(graph)
    return _substitute_estimates(cost, estimates) if estimates else cost


def _substitute_estimates(cost: SectionCost, estimates: Mapping[str, Expr]) -> SectionCost:
    """Replace data-dependent symbols in all expressions by their estimates."""

    def substitute_fields(costs: SectionCost | RecomputeCost, fields: Iterable[str]) -> dict[str, Any]:
        return {field: substitute_estimates(getattr(costs, field), estimates) for field in fields}

    recompute = {
        kind: replace(costs, **substitute_fields(costs, ("saved", "working", "work", "moved", "unneeded")))
        for kind, costs in cost.recompute.items()
    }
    return replace(cost, recompute=recompute, **substitute_fields(cost, _EXPRESSION_FIELDS))


def _section_cost_in_all_symbols(graph: GraphOp, section: SectionOp, part: SectionPart) -> SectionCost:
    """The cost of a part of a section over all symbols, data-dependent ones included."""
    name, blocks = section.sym.data, graph.blocks
    recomputed = selectively_recomputed_blocks(graph, strings_of(section.blocks))
    ops_by_case = [ops for case in graph.cases if (ops := ops_in_section(case, name))]
    dtype = _compute_dtype([op for ops in ops_by_case for op in ops if isinstance(op, CallOp)])
    if part != "whole":
        ops_by_case = [_ops_outside_layers(ops, blocks)[part] for ops in ops_by_case]
    cases = [_accumulate_case(graph, blocks, ops, recomputed) for ops in ops_by_case]
    calls = [op for ops in ops_by_case for op in ops if isinstance(op, CallOp)]
    called_paths = _outermost_paths({call.target.data for call in calls})
    mode = _section_mode(section)
    has_backward = mode != "forward"
    params, trainable, param_bytes, trainable_bytes = _count_parameters(graph, ops_by_case, called_paths)
    largest_layer_bytes, outside_layers_bytes = _layer_bytes(graph, calls, param_bytes)
    batch_entries, entries_per_sample = _count_batch_entries(graph, calls, blocks)

    def largest(sums: Iterable[Counter[str]]) -> str:
        return max_expr(map(sum_counted_exprs, sums))

    return SectionCost(
        flops=largest(case.flops for case in cases),
        backward_flops=largest(case.backward_flops for case in cases) if has_backward else "0",
        work=largest(case.work for case in cases),
        backward_work=largest(case.backward_work for case in cases) if has_backward else "0",
        saved=largest(case.saved for case in cases) if has_backward else "0",
        glue_bytes=largest(case.glue_bytes for case in cases),
        ops=max((case.ops for case in cases), default=0),
        params=params,
        trainable=trainable,
        param_bytes=param_bytes,
        trainable_bytes=trainable_bytes,
        dtype=dtype,
        label=_section_label(calls),
        recompute=recompute_costs([case.recompute for case in cases]) if has_backward else {},
        layers=max((case.layers for case in cases), default=0),
        layer_input_bytes=largest(case.layer_input_bytes for case in cases),
        narrowest_dim=_narrowest_dim(calls),
        whole_permille=_whole_permille([blocks[path] for path in called_paths]),
        forward_ns=_max_measured_ns(case.forward_ns for case in cases),
        backward_ns=_max_measured_ns(case.backward_ns for case in cases) if has_backward else "0",
        master_bytes=FLOAT32_BYTES * trainable if "dtype" in graph.attributes else 0,
        logits_saved=largest(case.memory.kept_logits for case in cases) if has_backward else "0",
        streamed="0",
        kept_between="0",
        outside_saved=largest(case.outside_saved for case in cases) if has_backward else "0",
        logits_moved=largest(case.logits_moved for case in cases),
        call_transient=max_expr(text for case in cases for text in case.memory.call_transient),
        glue_transient=max_expr(text for case in cases for text in case.memory.glue_transient),
        logits_transient=max_expr(text for case in cases for text in case.memory.logits_transient),
        largest_layer_bytes=largest_layer_bytes,
        outside_layers_bytes=outside_layers_bytes,
        sequence_parallel=get_string(section, "norms") == "sequence",
        trainable_tensors=sum(integer_attribute(blocks[path], "tensors", 0) for path in called_paths),
        routed_work=largest(case.routed_work for case in cases),
        routed_backward_work=largest(case.routed_backward_work for case in cases) if has_backward else "0",
        routed_bytes=largest(case.routed_bytes for case in cases),
        exchanged_bytes=largest(case.exchanged_bytes for case in cases),
        query_bytes=largest(case.query_bytes for case in cases),
        row_pieces=largest(case.row_pieces for case in cases) if _share_pieces(calls, blocks) else "0",
        attended_parts=largest(case.attended_parts for case in cases),
        batch_entries=batch_entries,
        entries_per_sample=entries_per_sample,
        unshared_bytes=largest(case.unshared_bytes for case in cases) if has_backward else "0",
        layer_work=largest(case.layer_work for case in cases),
        key_heads=_common_key_heads(calls, blocks),
        expert_row_work=max((case.expert_row_work for case in cases), default=0),
        expert_load=float_attribute(section, "expert_load", DEFAULT_EXPERT_LOAD),
        expert_parts=counted_expert_parts(graph, section),
        **_count_experts([blocks[path] for path in called_paths]),
    )


def _share_pieces(calls: Iterable[CallOp], blocks: Mapping[str, BlockOp]) -> bool:
    """Whether ranks of context parallelism get whole pieces in all calls of a section with layers."""
    costs = [call_cost(call, blocks[call.target.data]) for call in calls]
    return all(cost.pieces != 0 for cost in costs if cost.exchanged != 0 or cost.pieces != 0)


def _count_batch_entries(
    graph: GraphOp, calls: Iterable[CallOp], blocks: Mapping[str, BlockOp]
) -> tuple[str, int]:
    """The fewest entries of a batch that any layers of a section work on, and how many a mean sample has; "0"
    and 0 if that is one, as in decoders, or if some layers have no batch."""
    costs = [call_cost(call, blocks[call.target.data]) for call in calls]
    texts = {size_expr.format_expr(c.entries) for c in costs if c.exchanged != 0 or c.entries != 0}
    if not texts or "0" in texts:
        return "0", 0
    estimates = size_estimates(graph)

    def count_in_mean_sample(text: str) -> Fraction:
        known = substitute_estimates(text, estimates) if estimates else text
        counts = [
            (p.share, n)
            for p in input_patterns(graph)
            if (n := evaluate_expr(known, micro_batch_sizes(graph, p.sizes, 1))) > 0
        ]
        share = sum((share for share, _ in counts), Fraction(0))
        return sum((share * n for share, n in counts), Fraction(0)) / share if share else Fraction(0)

    fewest, text = min((count_in_mean_sample(text), text) for text in sorted(texts))
    return (text, int(fewest)) if fewest >= 2 else ("0", 0)


def _common_key_heads(calls: Iterable[CallOp], blocks: Mapping[str, BlockOp]) -> int:
    """Heads of keys of all layers, the largest common divisor; 0 if a layer cannot exchange heads."""
    costs = [call_cost(call, blocks[call.target.data]) for call in calls]
    heads = [cost.key_heads for cost in costs if cost.exchanged != 0]
    return gcd(*heads) if all(heads) else 0


def _count_experts(blocks: list[BlockOp]) -> dict[str, int]:
    """The fields of a section's cost about the experts of these blocks."""
    numbers = [int(n.value.data) for b in blocks for n in _array_attribute(b, "experts")]
    keys = ("expert_params", "expert_trainable", "expert_layers")
    totals = {key: sum(integer_attribute(b, key, 0) for b in blocks) for key in keys}
    for key in ("expert_params", "expert_trainable"):
        totals[f"{key.removesuffix('_params')}_bytes"] = sum(
            integer_attribute(b, key, 0) * _parameter_itemsize(b) for b in blocks
        )
    return {"experts": gcd(*numbers), **totals}


def counted_expert_parts(graph: GraphOp, section: SectionOp) -> tuple[tuple[int, int], ...]:
    """(number of parts of experts, load of the busiest one over the mean one in permille), as counted on
    drawn samples, the mean over the section's mixtures; () where not all were counted, or where a choice of
    the user counts instead."""
    blocks = [graph.blocks[path] for path in strings_of(section.blocks)]
    mixtures = [b for b in blocks if "experts" in b.attributes]
    counted = [[int(n.value.data) for n in _array_attribute(b, EXPERT_PARTS_ATTRIBUTE)] for b in mixtures]
    if not counted or not all(counted) or "expert_load" in section.attributes:
        return ()
    weights = [integer_attribute(b, "expert_layers", 1) for b in mixtures]
    loads = [dict(zip(numbers[::2], numbers[1::2], strict=True)) for numbers in counted]
    common = set(loads[0]).intersection(*loads[1:])
    return tuple(
        (n, sum(w * load[n] for w, load in zip(weights, loads, strict=True)) // sum(weights))
        for n in sorted(common)
    )


def _parameter_itemsize(block: BlockOp) -> int:
    """Bytes of an entry of most of a block's parameters."""
    params, _, size, _ = _block_parameters(block)
    return -(-size // params) if params else 0


def _array_attribute(op: Operation, key: str) -> Iterable[Any]:
    attribute = op.attributes.get(key)
    return attribute if isinstance(attribute, ArrayAttr) else ()


def _runs_layers(op: Operation, blocks: Mapping[str, BlockOp]) -> bool:
    """Whether an operation calls a stack of layers, or a part of one."""
    if not isinstance(op, CallOp):
        return False
    block = blocks[op.target.data]
    return _layers_in_call(op, block, call_cost(op, block)) is not None


def _layers_in_call(call: CallOp, block: BlockOp, cost: CallCost) -> int | None:
    """The number of layers that a call runs, None for a call outside of layers. Of a layer in several blocks
    the largest one counts as the layer, the others as none."""
    if is_part_of_layer(block):
        return int(counts_as_layer(block))
    return integer_attribute(call, "layers", cost.units) or None


def _ops_outside_layers(
    ops: Sequence[Operation], blocks: Mapping[str, BlockOp]
) -> dict[SectionPart, list[Operation]]:
    """The operations before and behind the layers of a section, and both, of its operations in one case."""
    layers = {op for op in ops if _runs_layers(op, blocks)}
    behind = set(layers)  # layers, and what needs them
    for op in ops:
        if any(o.owner in behind for o in op.operands):
            behind.add(op)
    needed = set(layers)  # layers, and what they need
    for op in reversed(ops):
        if any(use.operation in needed for result in op.results for use in result.uses):
            needed.add(op)
    outside = [op for op in ops if op not in layers]
    before = needed - behind
    return {
        "before": [op for op in outside if op in before],
        "behind": [op for op in outside if op not in before],
        "outside": outside,
    }


def ops_in_section(case: CaseOp, section: str) -> list[Operation]:
    """The operations of a case that are assigned to the section of this name."""
    return [op for op in case.ops if section_of(op) == section]


def call_cost(call: CallOp, block: BlockOp) -> CallCost:
    """Read what `secc.cost.counting.annotate_calls` wrote on a call of a block; estimate what is missing."""
    estimate = _with_listed_experts(default_call_cost(call, block), call, block)
    if "flops" not in call.attributes:
        return estimate
    saved = _expression_attribute(call, "saved", estimate.saved)
    flops = _expression_attribute(call, "flops", estimate.flops)
    others = {key: _expression_attribute(call, key, ZERO) for key in OPTIONAL_EXPRESSIONS}
    found = CallCost(
        flops=flops,
        work=_expression_attribute(call, "work", flops),
        saved=saved,
        ops=integer_attribute(call, "ops", estimate.ops),
        label=_cost_label(call),
        units=integer_attribute(call, "units", 0),
        kept=_expression_attribute(call, "kept", saved),
        narrowest_dim=integer_attribute(call, "narrow", 0),
        units_in_order=OUT_OF_TURN_ATTRIBUTE not in call.attributes,
        key_heads=integer_attribute(call, "key_heads", 0),
        **others,
    )
    return _with_listed_experts(found, call, block)


def _with_listed_experts(cost: CallCost, call: CallOp, block: BlockOp) -> CallCost:
    """The cost with the part of experts in lists, if their rows were counted. An estimate by all parameters
    counts them as if every row entered every expert."""
    choices = integer_attribute(block, LISTED_CHOICES_ATTRIBUTE, 0)
    if not choices or cost.routed != 0:
        return cost
    rows = leading_rows(call)
    routed = 2 * integer_attribute(block, "expert_size", 0) * choices // 1000 * rows
    if cost.label == "default":
        others = 2 * (block.params.data - integer_attribute(block, "expert_params", 0)) * rows
        cost = replace(cost, flops=others + routed, work=others + routed, again=others + routed)
    return replace(cost, routed=routed, routed_work=routed)


def count_cost_origins(graph: GraphOp, section: SectionOp) -> dict[str, int]:
    """Count the section's blocks by the origin of their cost: measured, counted, sampled or default."""
    called = {
        op.target.data: op
        for case in graph.cases
        for op in ops_in_section(case, section.sym.data)
        if isinstance(op, CallOp)
    }
    return dict(Counter(map(_cost_origin, called.values())))


def _cost_origin(call: CallOp) -> str:
    if "forward_ns" in call.attributes:
        return "measured"
    return _cost_label(call) if "flops" in call.attributes else "default"


def _expression_attribute(op: Operation, key: str, default: Expr) -> Expr:
    attribute = op.attributes.get(key)
    return size_expr.parse_expr(attribute.data) if isinstance(attribute, StringAttr) else default


def _accumulate_case(
    graph: GraphOp, blocks: Mapping[str, BlockOp], ops: list[Operation], recomputed: Collection[str]
) -> _CostAccumulator:
    """Sum the costs of a section's operations in one case; `recomputed` holds the blocks that selective
    recomputation runs again."""
    spread = VocabSpread(ops, find_sharded_heads(graph, ops))
    costs = {op: call_cost(op, blocks[op.target.data]) for op in ops if isinstance(op, CallOp)}
    excess: dict[Operation, Expr] = {
        op: cost.peak - sum(map(value_bytes, op.results), ZERO)
        for op, cost in costs.items()
        if not op_has_backward(op) and cost.peak != 0
    }
    kept: dict[Operation, Expr] = {op: cost.kept for op, cost in costs.items() if op_has_backward(op)}
    sums = _CostAccumulator(memory=measure_glue(ops, _mean_sizes(graph), spread, excess, kept))
    for op in ops:
        if isinstance(op, CallOp):
            _add_call(op, costs[op], blocks[op.target.data], sums, op.target.data in recomputed)
        elif isinstance(op, GlueOp):
            _add_glue(op, sums)
            _add_logits_bytes(op, sums, spread)
    for text, count in sums.memory.kept.items():
        sums.saved[text] += count
        sums.outside_saved[text] += count
        sums.recompute.add_saved_bytes(text, count)
    return sums


def _mean_sizes(graph: GraphOp) -> list[dict[str, int]]:
    """The sizes of one mean sample of each input pattern, with estimates of those that values decide."""
    estimates = size_estimates(graph)
    found = [micro_batch_sizes(graph, pattern.sizes, 1) for pattern in input_patterns(graph)]
    for sizes in found:
        sizes |= {name: max(1, round(evaluate_at_means(text, sizes))) for name, text in estimates.items()}
    return found


def _add_logits_bytes(op: GlueOp, sums: _CostAccumulator, spread: VocabSpread) -> None:
    """Add the bytes of tensors with a vocabulary dimension, which tensor parallelism divides by tokens."""
    if op not in spread.steps or op.base_name in VIEW_OP_NAMES:
        return
    written = [result for result in op.results if result in spread.parts]
    read = [operand for operand in op.operands if operand in spread.parts]
    sums.logits_moved[_sum_of_bytes([*written, *read])] += 1


def _add_call(call: CallOp, cost: CallCost, block: BlockOp, sums: _CostAccumulator, recomputed: bool) -> None:
    sums.flops[size_expr.format_expr(cost.flops)] += 1
    measured = call.attributes.get("forward_ns")
    if isinstance(measured, StringAttr):
        sums.forward_ns[measured.data] += 1
    else:
        sums.work[_sum_to_text(cost.work - cost.routed_work, cost.attention_work)] += 1
        sums.routed_work[size_expr.format_expr(cost.routed_work)] += 1
        sums.glue_bytes[size_expr.format_expr(cost.moved)] += 1
        sums.ops += cost.ops
    result_bytes = sum(map(value_bytes, call.results), ZERO)
    if size := integer_attribute(block, "expert_size", 0):
        # Each row takes two FLOPs for each entry of one expert.
        width = integer_attribute(block, "expert_width", 0) * _parameter_itemsize(block)
        sums.routed_bytes[size_expr.format_expr(cost.routed * width / (2 * size))] += 1
        if cost.routed != 0:
            slowness = sympy.cancel(cost.routed_work / cost.routed)
            if slowness.is_Rational:
                params = integer_attribute(block, "expert_params", 0)
                sums.expert_row_work += int(2 * params * slowness)
    if (layers := _layers_in_call(call, block, cost)) is not None:
        sums.layers += layers
        if layers:
            entering = cost.kept if cost.kept != 0 else layers * result_bytes
            sums.layer_input_bytes[size_expr.format_expr(entering)] += 1
        sums.exchanged_bytes[size_expr.format_expr(cost.exchanged)] += 1
        sums.query_bytes[size_expr.format_expr(cost.queries)] += 1
        sums.row_pieces[size_expr.format_expr(cost.pieces)] += 1
        sums.attended_parts[size_expr.format_expr(cost.parts)] += 1
        sums.unshared_bytes[size_expr.format_expr(cost.unshared)] += 1
        sums.layer_work[size_expr.format_expr(cost.work - cost.routed_work)] += 1
    if op_has_backward(call):
        backward_flops, backward_work = _backward_flops_and_work(cost, _backward_forward_ratio(block))
        sums.backward_flops[backward_flops] += 1
        measured = call.attributes.get("backward_ns")
        if isinstance(measured, StringAttr):
            sums.backward_ns[measured.data] += 1
        else:
            sums.backward_work[backward_work] += 1
            ratio = _backward_forward_ratio(block)
            routed = cost.routed_work * sympy.Rational(ratio.numerator, ratio.denominator)
            sums.routed_backward_work[size_expr.format_expr(routed)] += 1
        sums.saved[size_expr.format_expr(cost.saved)] += 1
        if layers is None:
            sums.outside_saved[size_expr.format_expr(cost.saved)] += 1
        sums.recompute.add_call(cost, recomputed)


@cache
def _backward_flops_and_work(cost: CallCost, ratio: Fraction) -> tuple[str, str]:
    """FLOPs and work of a call's backward; `ratio` is backward over forward for everything but attention."""
    factor = sympy.Rational(ratio.numerator, ratio.denominator)
    flops = _sum_to_text(
        (cost.flops - cost.attention) * factor, cost.attention * ATTENTION_BACKWARD_FLOPS_RATIO
    )
    dense = (cost.work - cost.routed_work) * factor
    return flops, _sum_to_text(dense, cost.attention_work * ATTENTION_BACKWARD_TIME_RATIO)


def _backward_forward_ratio(block: BlockOp) -> Fraction:
    """Backward FLOPs over forward FLOPs: 1 for input gradients, plus the share of the weights that train."""
    return 1 + (Fraction(block.trainable.data, block.params.data) if block.params.data else Fraction(0))


def _add_glue(op: GlueOp, sums: _CostAccumulator) -> None:
    if (fused := fused_loss_cost(op)) is not None:
        _add_fused_loss(op, fused, sums)
        return
    sums.ops += 1
    if op.base_name in VIEW_OP_NAMES:
        return
    sums.glue_bytes[_sum_of_bytes([*op.results, *op.operands])] += 1
    flops = _matmul_flops(op) if op.base_name in MATMUL_OP_NAMES else None
    if flops is not None:
        sums.flops[size_expr.format_expr(flops)] += 1
        sums.work[size_expr.format_expr(flops)] += 1
    if flops is not None and op_has_backward(op):
        # One product of the same size for each of the two factors that needs a gradient.
        factors = sum(tensor_type(operand).requires_grad for operand in op.operands[-2:])
        backward = size_expr.format_expr(flops * factors)
        sums.backward_flops[backward] += 1
        sums.backward_work[backward] += 1


def _add_fused_loss(op: GlueOp, cost: FusedLossCost, sums: _CostAccumulator) -> None:
    sums.ops += cost.ops
    sums.flops[size_expr.format_expr(cost.flops)] += 1
    sums.work[size_expr.format_expr(cost.flops)] += 1
    sums.glue_bytes[size_expr.format_expr(cost.moved)] += 1
    if op_has_backward(op):
        sums.backward_flops[size_expr.format_expr(cost.backward)] += 1
        sums.backward_work[size_expr.format_expr(cost.backward)] += 1
        sums.saved[size_expr.format_expr(cost.saved)] += 1
        sums.outside_saved[size_expr.format_expr(cost.saved)] += 1
        sums.recompute.add_saved_bytes(size_expr.format_expr(cost.saved))


def _max_measured_ns(cases: Iterable[Counter[str]]) -> str:
    """The maximum over cases of the measured nanoseconds.

    Measured times contain floor divisions, so they are joined as text: expanding them as polynomials would
    change where they round.
    """
    texts = sorted(
        {" + ".join(f"{n}*({text})" for text, n in sorted(case.items())) for case in cases if case}
    )
    return texts[0] if len(texts) == 1 else f"max({', '.join(texts)})" if texts else "0"


@cache
def _sum_to_text(*parts: Expr) -> str:
    return size_expr.format_expr(sympy.expand(sum(parts, ZERO)))


def _sum_of_bytes(values: Iterable[SSAValue]) -> str:
    return size_expr.format_expr(sum(map(value_bytes, values), ZERO))


def _section_label(calls: list[CallOp]) -> str:
    """The weakest origin among the calls' costs: "default", "counted" or "measured"."""
    unmeasured = [call for call in calls if "forward_ns" not in call.attributes]
    if any("flops" not in call.attributes or "default" in _cost_label(call) for call in unmeasured):
        return "default"
    return "measured" if calls and not unmeasured else "counted"


def _whole_permille(blocks: Sequence[BlockOp]) -> int:
    """Permille of the blocks' parameters that `tp` leaves whole in layers."""
    whole = sum(integer_attribute(block, TP_WHOLE_ATTRIBUTE, 0) * block.params.data for block in blocks)
    return whole // max(1, sum(block.params.data for block in blocks))


def _narrowest_dim(calls: list[CallOp]) -> int:
    """Smallest weight dimension of the call that issues most operations; 0 if no call was counted."""
    by_ops = ((integer_attribute(call, "ops", 0), integer_attribute(call, "narrow", 0)) for call in calls)
    return max(by_ops, default=(0, 0))[1]


def _matmul_flops(op: GlueOp) -> Expr:
    """Two FLOPs for each entry of the result and each entry of the inner dimension."""
    return 2 * count_entries(tensor_type(op.results[0])) * tensor_type(op.operands[-2]).shape[-1]


def _cost_label(call: CallOp) -> str:
    label = call.attributes.get("cost")
    return label.data if isinstance(label, StringAttr) else "counted"


def _section_mode(section: SectionOp) -> str:
    return section.mode.data if section.mode is not None else "train"


def _compute_dtype(calls: list[CallOp]) -> str:
    """The dtype that most calls compute in: the autocast dtype if there is one, else that of the results."""
    counts = Counter(
        call.autocast.data if call.autocast is not None else tensor_type(call.results[0]).dtype.data
        for call in calls
        if call.results
    )
    name = max(sorted(counts), key=lambda n: counts[n], default="f32")
    return {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}.get(name, name)


def _count_parameters(
    graph: GraphOp, ops_by_case: Iterable[Iterable[Operation]], paths: list[str]
) -> tuple[int, int, int, int]:
    """(entries, trainable entries, bytes, trainable bytes) of the parameters of these operations.

    `paths` are the called blocks that are not inside another called block. A tied parameter counts once.
    """
    counts = [_block_parameters(graph.blocks[path]) for path in paths]
    counts += _glue_parameters(ops_by_case, paths)
    counts += [_tied_duplicates(op, paths) for op in graph.body.block.ops if isinstance(op, TieOp)]
    entries, trainable, size, trainable_bytes = (sum(count[i] for count in counts) for i in range(4))
    return entries, trainable, size, trainable_bytes


def _layer_bytes(graph: GraphOp, calls: list[CallOp], param_bytes: int) -> tuple[int, int]:
    """(bytes of the parameters of the largest layer of a stack, bytes of all parameters outside of stacks).

    Stacks that run a layer twice or out of order count as outside: ZeRO-3 cannot gather them layer by layer.
    A block inside a stack's block that is also called by itself, such as an embedding, is not a layer.
    """
    blocks, called = graph.blocks, {call.target.data for call in calls}
    out_of_order = {call.target.data for call in calls if OUT_OF_TURN_ATTRIBUTE in call.attributes}
    layers: dict[str, int] = {}
    for call in calls:
        path = call.target.data
        count = integer_attribute(call, "layers", integer_attribute(call, "units", 0))
        if count and path not in out_of_order:
            layers[path] = count
    sizes = Counter[str]()  # by layer, or by block with several layers
    for path in layers:
        separate = _outermost_paths(p for p in called if p.startswith(f"{path}."))
        own = _block_bytes(blocks[path]) - sum(_block_bytes(blocks[p]) for p in separate)
        sizes[layer_path(blocks[path])] += own
    largest_layer = max((-(-size // layers.get(path, 1)) for path, size in sizes.items()), default=0)
    return largest_layer, max(0, param_bytes - sum(sizes.values()))


def _outermost_paths(paths: Iterable[str]) -> list[str]:
    """The module paths that are not inside another one of them, sorted."""
    outermost: list[str] = []
    for path in sorted(paths, key=lambda p: p.split(".")):
        if not outermost or not path.startswith(f"{outermost[-1]}."):
            outermost.append(path)
    return outermost


def _block_bytes(block: BlockOp) -> int:
    return _block_parameters(block)[2]


def _block_parameters(block: BlockOp) -> tuple[int, int, int, int]:
    params, trainable = block.params.data, block.trainable.data
    size = integer_attribute(block, "bytes", FLOAT32_BYTES * params)
    trainable_bytes = integer_attribute(block, "trainable_bytes", FLOAT32_BYTES * trainable)
    return params, trainable, size, trainable_bytes


def _glue_parameters(
    ops_by_case: Iterable[Iterable[Operation]], paths: list[str]
) -> list[tuple[int, int, int, int]]:
    """Counts of the parameters that glue among the operations reads and that no block in `paths` holds."""
    read: dict[str, ParamOp] = {}
    for ops in ops_by_case:
        for op in ops:
            read |= {o.owner.path.data: o.owner for o in op.operands if isinstance(o.owner, ParamOp)}
    counts: list[tuple[int, int, int, int]] = []
    for path, op in sorted(read.items()):
        if not any(path.startswith(f"{p}.") for p in paths):
            type_ = tensor_type(op.result)
            entries = int(size_expr.evaluate_size(count_entries(type_), {}))
            trainable = entries * type_.requires_grad
            counts.append((entries, trainable, entries * type_.itemsize, trainable * type_.itemsize))
    return counts


def _tied_duplicates(tie: TieOp, paths: list[str]) -> tuple[int, int, int, int]:
    """Negative counts that correct for blocks of the section that each count the same tied parameter."""
    holders = sum(any(name.startswith(f"{p}.") for p in paths) for name in strings_of(tie.names))
    extra = max(holders - 1, 0)
    params, size, trainable = (
        integer_attribute(tie, key, 0) for key in ("params", "bytes", "trainable_bytes")
    )
    return -extra * params, -extra * params * (trainable > 0), -extra * size, -extra * trainable


def float_attribute(op: Operation, key: str, default: float) -> float:
    """The number at `key` in an operation's attribute dictionary, or `default` if there is none."""
    attribute = op.attributes.get(key)
    return float(attribute.value.data) if isinstance(attribute, FloatAttr) else default


def integer_attribute(op: Operation, key: str, default: int) -> int:
    """The integer at `key` in an operation's attribute dictionary, or `default` if there is none."""
    attribute = op.attributes.get(key)
    return attribute.value.data if isinstance(attribute, IntegerAttr) else default
