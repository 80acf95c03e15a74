"""What a section costs: the sums of its calls and glue, per case, and the parameters that it holds.

Cases differ in what they compute, so a section's cost is the largest of its cases' costs. A case with more
optional inputs usually contains the others (its symbols are 0 where an input is missing), which makes that
exact. Costs are texts that `secc.runtime.plan.expr_eval` evaluates, because ranks evaluate them, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from typing import Any

import sympy
from xdsl.dialects.builtin import IntegerAttr, StringAttr
from xdsl.ir import Operation, SSAValue

from secc.cost.model.cost_expressions import max_expr, substitute_estimates, sum_counted_exprs
from secc.cost.model.default_estimate import ZERO, CallCost, count_entries, default_call_cost
from secc.cost.model.linear_loss import FusedLossCost, fused_loss_cost
from secc.cost.model.patterns_and_transfers import input_patterns, micro_batch_sizes
from secc.cost.model.recompute_cost import (
    RecomputeAccumulator,
    RecomputeCost,
    recompute_costs,
    selectively_recomputed_blocks,
)
from secc.ir.analysis.dataflow import get_string, size_estimates
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

FLOAT32_BYTES = 4  # of a parameter whose dtype nobody noted
# Views move no data.
VIEW_OPS = frozenset({
    "view", "_unsafe_view", "reshape", "slice", "select", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "detach", "alias",
    "split", "split_with_sizes", "unbind", "as_strided", "unfold", "diagonal", "narrow", "chunk",
})  # fmt: skip
ATTENTION_BACKWARD_FLOPS_RATIO = (
    2  # FLOPs over those of forward: gradients of queries, keys, values and scores, whatever trains
)
ATTENTION_BACKWARD_TIME_RATIO = sympy.Rational(
    5, 2
)  # time over forward's: a kernel that keeps no scores computes them again
_EXPRESSION_FIELDS = (
    "flops",
    "backward_flops",
    "saved",
    "glue_bytes",
    "layer_input_bytes",
    "logits_saved",
    "logits_moved",
    "backward_transient",
    "logits_backward_transient",
    "forward_transient",
)
MATMUL_OPS = frozenset({"mm", "addmm", "bmm", "baddbmm"})


@dataclass(frozen=True)
class SectionCost:
    """Costs of one micro-batch (texts over its symbols) and the section's parameters.

    flops, backward_flops: FLOPs; work, backward_work: the same as FLOPs of large products
    (`secc.cost.model.gemm_efficiency`), what times come from. saved: bytes kept from forward to backward.
    glue_bytes: bytes that glue, and operations in blocks other than products, move in forward. ops:
    operations issued in forward. params, trainable: entries; param_bytes, trainable_bytes: their bytes.
    dtype: short name of what the blocks compute in. label: "counted", or "default" where any part was
    estimated. again: what recomputation changes, for each way but "none". layers: how many layers of stacks
    the calls run, summed: bytes of what enters them. narrow: the smallest dim of the weights that take
    longest. forward_ns, backward_ns: what was measured of calls, whose work and bytes are then not in the
    sums above. master_bytes: of the float32 weights that the optimizer updates where modules compute in fewer
    bits, 0 where they do not. logits_saved, logits_moved: the parts of `saved` and `glue_bytes` that run
    along a vocabulary, of which each rank of tp has its tokens'. passing, logits_passing: bytes of the
    gradients that the backward of the largest operation in glue has at once, beside what is saved. transient:
    bytes that a forward without backward has at once beside what is saved and sent: what a call holds, what
    glue makes. unit_bytes: parameters of the largest layer. rest_bytes: of what is in no layer. sequence:
    whether ranks of tp have parts of the sequence between the products that are cut. tensors: parameters that
    train.
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
    forward_ns: str = "0"
    backward_ns: str = "0"
    master_bytes: int = 0
    logits_saved: str = "0"
    logits_moved: str = "0"
    backward_transient: str = "0"
    logits_backward_transient: str = "0"
    forward_transient: str = "0"
    largest_layer_bytes: int = 0
    outside_layers_bytes: int = 0
    sequence_parallel: bool = False
    trainable_tensors: int = 0

    @property
    def gradient_sum_bytes(self) -> int:
        """Bytes of the gradients as ranks sum them: in float32, or in more bits where the parameters have
        more."""
        return max(FLOAT32_BYTES * self.trainable, self.trainable_bytes)

    @property
    def optimizer_weight_bytes(self) -> int:
        """Bytes of the trainable weights as a rank adds up their gradients and keeps optimizer states."""
        return self.master_bytes or self.trainable_bytes


@dataclass
class _CostAccumulator:
    """Running sums over one case; equal addends are counted, not added one by one."""

    flops: Counter[str] = field(default_factory=Counter[str])
    backward_flops: Counter[str] = field(default_factory=Counter[str])
    work: Counter[str] = field(default_factory=Counter[str])
    backward_work: Counter[str] = field(default_factory=Counter[str])
    saved: Counter[str] = field(default_factory=Counter[str])
    glue_bytes: Counter[str] = field(default_factory=Counter[str])
    forward_ns: Counter[str] = field(default_factory=Counter[str])
    backward_ns: Counter[str] = field(default_factory=Counter[str])
    logits_saved: Counter[str] = field(default_factory=Counter[str])
    logits_moved: Counter[str] = field(default_factory=Counter[str])
    backward_transient: set[str] = field(default_factory=set[str])
    logits_backward_transient: set[str] = field(default_factory=set[str])
    call_peak: set[str] = field(default_factory=set[str])
    peak_without_outputs: set[str] = field(default_factory=set[str])
    outputs: Counter[str] = field(default_factory=Counter[str])
    ops: int = 0
    layers: int = 0
    layer_input_bytes: Counter[str] = field(default_factory=Counter[str])
    recompute: RecomputeAccumulator = field(default_factory=RecomputeAccumulator)


def section_cost(graph: GraphOp, section: SectionOp) -> SectionCost:
    """The cost of a section from its calls' measured attributes, by estimate where they are missing.

    Sizes that inputs' values decide are not in it: ranks, which evaluate it, know them too late.
    """
    known = size_estimates(graph)
    return (
        _substitute_estimates(_section_cost_in_all_symbols(graph, section), known)
        if known
        else _section_cost_in_all_symbols(graph, section)
    )


def _substitute_estimates(cost: SectionCost, known: Mapping[str, Expr]) -> SectionCost:
    """The cost with what some symbols are about in their place."""

    def texts(of: SectionCost | RecomputeCost, *fields: str) -> dict[str, Any]:
        return {field: substitute_estimates(getattr(of, field), known) for field in fields}

    again = {
        way: replace(a, **texts(a, "saved", "working", "work", "moved")) for way, a in cost.recompute.items()
    }
    times = texts(cost, "work", "backward_work", "forward_ns", "backward_ns")
    return replace(cost, recompute=again, **times, **texts(cost, *_EXPRESSION_FIELDS))


def _section_cost_in_all_symbols(graph: GraphOp, section: SectionOp) -> SectionCost:
    name = section.sym.data
    paths = strings_of(section.blocks)
    picked, blocks = selectively_recomputed_blocks(graph, paths), graph.blocks
    cases = [ops for case in graph.cases if (ops := ops_in_section(case, name))]
    sums = [_accumulate_case(graph, blocks, ops, picked) for ops in cases]
    calls = [op for ops in cases for op in ops if isinstance(op, CallOp)]
    guessed = [call for call in calls if "forward_ns" not in call.attributes]
    estimated = any("flops" not in call.attributes or "default" in _cost_label(call) for call in guessed)
    params, trainable, param_bytes, trainable_bytes = _count_parameters(graph, name, calls)
    return SectionCost(
        max_expr(sum_counted_exprs(s.flops) for s in sums),
        max_expr(sum_counted_exprs(s.backward_flops) for s in sums)
        if _section_mode(section) != "forward"
        else "0",
        max_expr(sum_counted_exprs(s.work) for s in sums),
        max_expr(sum_counted_exprs(s.backward_work) for s in sums)
        if _section_mode(section) != "forward"
        else "0",
        max_expr(sum_counted_exprs(s.saved) for s in sums) if _section_mode(section) != "forward" else "0",
        max_expr(sum_counted_exprs(s.glue_bytes) for s in sums),
        max((s.ops for s in sums), default=0),
        params,
        trainable,
        param_bytes,
        trainable_bytes,
        _compute_dtype(calls),
        "default" if estimated else _measured_or_counted(calls),
        recompute_costs([s.recompute for s in sums]) if _section_mode(section) != "forward" else {},
        max((s.layers for s in sums), default=0),
        max_expr(sum_counted_exprs(s.layer_input_bytes) for s in sums),
        _narrowest_dim(calls),
        _max_measured_ns(s.forward_ns for s in sums),
        _max_measured_ns(s.backward_ns for s in sums) if _section_mode(section) != "forward" else "0",
        FLOAT32_BYTES * trainable if "dtype" in graph.attributes else 0,
        max_expr(sum_counted_exprs(s.logits_saved) for s in sums)
        if _section_mode(section) != "forward"
        else "0",
        max_expr(sum_counted_exprs(s.logits_moved) for s in sums),
        _max_over_patterns(graph, {text for s in sums for text in s.backward_transient}),
        _max_over_patterns(graph, {text for s in sums for text in s.logits_backward_transient}),
        _max_over_patterns(graph, {_forward_transient(s, _section_mode(section)) for s in sums}),
        *_layer_bytes(graph, calls, param_bytes),
        get_string(section, "norms") == "sequence",
        sum(
            integer_attribute(blocks[path], "tensors", 0)
            for path in _outermost_paths({call.target.data for call in calls})
        ),
    )


def _forward_transient(of: _CostAccumulator, mode: str) -> str:
    """What a forward without backward holds at once. A section's code lets go of what its calls and glue make
    when it ends; in one with a backward that is saved, or little."""
    if mode != "forward":
        return max_expr(of.call_peak)
    return _sum_to_text(
        size_expr.parse_expr(max_expr(of.peak_without_outputs)),
        size_expr.parse_expr(sum_counted_exprs(of.outputs)),
    )


def ops_in_section(case: CaseOp, section: str) -> list[Operation]:
    """The ops of a case that are in a section."""
    return [op for op in case.ops if section_of(op) == section]


def call_cost(call: CallOp, block: BlockOp) -> CallCost:
    """What `secc.cost.counting.annotate_calls` noted at a call of a block, or the estimate."""
    estimate = default_call_cost(call, block)
    if "flops" not in call.attributes:
        return estimate
    saved = _expression_attribute(call, "saved", estimate.saved)
    ops, units = integer_attribute(call, "ops", estimate.ops), integer_attribute(call, "units", 0)
    flops = _expression_attribute(call, "flops", estimate.flops)
    rest = {
        key: _expression_attribute(call, key, ZERO)
        for key in ("peak", "working", "again", "again_moved", "attention", "attention_work", "moved")
    }
    kept, work = _expression_attribute(call, "kept", saved), _expression_attribute(call, "work", flops)
    narrow, in_turn = integer_attribute(call, "narrow", 0), OUT_OF_TURN_ATTRIBUTE not in call.attributes
    return CallCost(
        flops,
        work,
        saved,
        ops,
        _cost_label(call),
        units,
        kept,
        narrowest_dim=narrow,
        units_in_order=in_turn,
        **rest,
    )


def count_cost_origins(graph: GraphOp, section: SectionOp) -> dict[str, int]:
    """How many of a section's blocks have costs of which kind: measured, counted, sampled or default."""
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
    found = op.attributes.get(key)
    return size_expr.parse_expr(found.data) if isinstance(found, StringAttr) else default


def _accumulate_case(
    graph: GraphOp, blocks: Mapping[str, BlockOp], ops: list[Operation], picked: Collection[str]
) -> _CostAccumulator:
    total, spread = _CostAccumulator(), VocabSpread(ops, find_sharded_heads(graph, ops))
    for op in ops:
        if isinstance(op, CallOp):
            _add_call(op, blocks[op.target.data], total, op.target.data in picked)
        elif isinstance(op, GlueOp):
            _add_glue(op, total)
            _add_logits_bytes(op, total, spread)
            _add_backward_transient(op, total, spread)
    return total


def _add_backward_transient(op: GlueOp, total: _CostAccumulator, spread: VocabSpread) -> None:
    """The gradients that an operation's backward gets and makes; those of parameters stay."""
    if not owes_backward(op) or op.base_name in VIEW_OPS or fused_loss_cost(op) is not None:
        return
    texts = total.logits_backward_transient if op in spread.steps else total.backward_transient
    passing = (
        v
        for v in (*op.results, *op.operands)
        if tensor_type(v).requires_grad and not isinstance(v.owner, ParamOp)
    )
    texts.add(size_expr.format_expr(sum(map(_tensor_bytes, passing), ZERO)))


def _max_over_patterns(graph: GraphOp, found: Collection[str]) -> str:
    """The largest of many expressions at the sizes that samples have in the mean, of those that inputs'
    values do not decide."""
    known = {str(name) for name in size_estimates(graph)}
    texts = [
        text
        for text in found
        if not any(str(s) in known for s in size_expr.symbol_names(size_expr.parse_expr(text)))
    ]
    if len(texts) < 2:
        return max_expr(texts)
    sizes = [micro_batch_sizes(graph, p.sizes, 1) for p in input_patterns(graph)]
    return max_expr(max(texts, key=lambda text: evaluate_expr(text, at)) for at in sizes)


def _add_logits_bytes(op: GlueOp, total: _CostAccumulator, spread: VocabSpread) -> None:
    """What of a glue's bytes tp cuts by tokens."""
    if op not in spread.steps or op.base_name in VIEW_OPS:
        return
    written = sum((_tensor_bytes(r) for r in op.results if r in spread.parts), ZERO)
    total.logits_moved[
        size_expr.format_expr(
            written + sum((_tensor_bytes(o) for o in op.operands if o in spread.parts), ZERO)
        )
    ] += 1
    if owes_backward(op):
        total.logits_saved[size_expr.format_expr(written)] += 1


def _add_call(call: CallOp, block: BlockOp, total: _CostAccumulator, picked: bool) -> None:
    cost = call_cost(call, block)
    total.flops[size_expr.format_expr(cost.flops)] += 1
    timed = call.attributes.get("forward_ns")
    if isinstance(timed, StringAttr):
        total.forward_ns[timed.data] += 1
    else:
        total.work[_sum_to_text(cost.work, cost.attention_work)] += 1
        total.glue_bytes[size_expr.format_expr(cost.moved)] += 1
        total.ops += cost.ops
    layers = integer_attribute(call, "layers", cost.units)
    if layers:
        total.layers += layers
        total.layer_input_bytes[
            size_expr.format_expr(
                cost.kept
                if cost.kept != 0
                else layers * sum((_tensor_bytes(r) for r in call.results), size_expr.parse_expr("0"))
            )
        ] += 1
    if owes_backward(call):
        backward, backward_work = _backward_flops_and_work(cost, _backward_forward_ratio(block))
        total.backward_flops[backward] += 1
        timed = call.attributes.get("backward_ns")
        if isinstance(timed, StringAttr):
            total.backward_ns[timed.data] += 1
        else:
            total.backward_work[backward_work] += 1
        total.saved[size_expr.format_expr(cost.saved)] += 1
        total.recompute.add_call(cost, picked)
    else:
        made = sum(map(_tensor_bytes, call.results), ZERO)
        total.outputs[size_expr.format_expr(made)] += 1
        total.call_peak.add(size_expr.format_expr(cost.peak))
        total.peak_without_outputs.add(size_expr.format_expr(cost.peak - made if cost.peak != 0 else ZERO))


@cache
def _backward_flops_and_work(cost: CallCost, share: Fraction) -> tuple[str, str]:
    """FLOPs and work of a call's backward, which takes `share` times as long as its forward."""
    part = sympy.Rational(share.numerator, share.denominator)
    flops = _sum_to_text(
        (cost.flops - cost.attention) * part, cost.attention * ATTENTION_BACKWARD_FLOPS_RATIO
    )
    return flops, _sum_to_text(cost.work * part, cost.attention_work * ATTENTION_BACKWARD_TIME_RATIO)


def _backward_forward_ratio(block: BlockOp) -> Fraction:
    """Backward FLOPs over forward FLOPs: one part for gradients that pass through the block, one for those of
    the weights that train."""
    return 1 + (Fraction(block.trainable.data, block.params.data) if block.params.data else Fraction(0))


def _add_fused_loss(op: GlueOp, cost: FusedLossCost, total: _CostAccumulator) -> None:
    total.ops += cost.ops
    total.flops[size_expr.format_expr(cost.flops)] += 1
    total.work[size_expr.format_expr(cost.flops)] += 1
    total.glue_bytes[size_expr.format_expr(cost.moved)] += 1
    if owes_backward(op):
        total.backward_flops[size_expr.format_expr(cost.backward)] += 1
        total.backward_work[size_expr.format_expr(cost.backward)] += 1
        total.saved[size_expr.format_expr(cost.saved)] += 1
        total.recompute.add_saved_bytes(size_expr.format_expr(cost.saved))


def _add_glue(op: GlueOp, total: _CostAccumulator) -> None:
    if (fused := fused_loss_cost(op)) is not None:
        _add_fused_loss(op, fused, total)
        return
    total.ops += 1
    kind = op.base_name
    if kind in VIEW_OPS:
        return
    written = sum((_tensor_bytes(r) for r in op.results), size_expr.parse_expr("0"))
    read = sum((_tensor_bytes(o) for o in op.operands), size_expr.parse_expr("0"))
    total.glue_bytes[size_expr.format_expr(written + read)] += 1
    total.outputs[size_expr.format_expr(written)] += 1
    flops = _matmul_flops(op) if kind in MATMUL_OPS else None
    if flops is not None:
        total.flops[size_expr.format_expr(flops)] += 1
        total.work[size_expr.format_expr(flops)] += 1
    if owes_backward(op):
        total.saved[size_expr.format_expr(written)] += 1
        total.recompute.add_saved_bytes(size_expr.format_expr(written))
        if flops is not None:
            back = size_expr.format_expr(flops * sum(tensor_type(o).requires_grad for o in op.operands[-2:]))
            total.backward_flops[back] += 1
            total.backward_work[back] += 1


def _max_measured_ns(cases: Iterable[Counter[str]]) -> str:
    """The largest of the cases' measured nanoseconds; texts with whole divisions, which no polynomial sum
    keeps."""
    texts = sorted({" + ".join(f"{n}*({text})" for text, n in sorted(c.items())) for c in cases if c})
    return texts[0] if len(texts) == 1 else f"max({', '.join(texts)})" if texts else "0"


@cache
def _sum_to_text(*parts: Expr) -> str:
    return size_expr.format_expr(sympy.expand(sum(parts, ZERO)))


def _measured_or_counted(calls: list[CallOp]) -> str:
    return "measured" if calls and all("forward_ns" in c.attributes for c in calls) else "counted"


def _narrowest_dim(calls: list[CallOp]) -> int:
    """That of the call with the most parameters' worth of operations; 0 where nobody counted."""
    return max(
        ((integer_attribute(c, "ops", 0), integer_attribute(c, "narrow", 0)) for c in calls), default=(0, 0)
    )[1]


def _matmul_flops(op: GlueOp) -> Expr:
    """Two FLOPs for each entry of the result and of the inner dim."""
    return 2 * count_entries(tensor_type(op.results[0])) * tensor_type(op.operands[-2]).shape[-1]


def owes_backward(op: Operation) -> bool:
    return "no_grad" not in op.properties and any(tensor_type(r).requires_grad for r in op.results)


def _tensor_bytes(value: SSAValue) -> Expr:
    kind = tensor_type(value)
    return count_entries(kind) * kind.itemsize


def _cost_label(call: CallOp) -> str:
    found = call.attributes.get("cost")
    return found.data if isinstance(found, StringAttr) else "counted"


def _section_mode(section: SectionOp) -> str:
    return section.mode.data if section.mode is not None else "train"


def _compute_dtype(calls: list[CallOp]) -> str:
    """What most calls compute in: the autocast dtype where there is one, else that of their results."""
    found = Counter(
        call.autocast.data if call.autocast is not None else tensor_type(call.results[0]).dtype.data
        for call in calls
        if call.results
    )
    name = max(sorted(found), key=lambda n: found[n], default="f32")
    return {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}.get(name, name)


def _count_parameters(graph: GraphOp, name: str, calls: list[CallOp]) -> tuple[int, int, int, int]:
    """(entries, trainable entries, bytes, trainable bytes), a tied parameter once, and one of a block within
    another, too."""
    paths = _outermost_paths({call.target.data for call in calls})
    blocks = graph.blocks
    counts = [_block_parameters(blocks[path]) for path in paths]
    counts += _glue_parameters(graph, name, paths)
    counts += [_tied_duplicates(op, paths) for op in graph.body.block.ops if isinstance(op, TieOp)]
    return (
        sum(c[0] for c in counts),
        sum(c[1] for c in counts),
        sum(c[2] for c in counts),
        sum(c[3] for c in counts),
    )


def _layer_bytes(graph: GraphOp, calls: list[CallOp], param_bytes: int) -> tuple[int, int]:
    """Bytes of the parameters of the largest layer of a stack, and of what no stack has, or one whose layers
    run twice or out of turn.

    Blocks within a block of layers that are called beside it, such as its embedding, are none of its layers.
    """
    turned = {c.target.data for c in calls if OUT_OF_TURN_ATTRIBUTE in c.attributes}
    layers = {
        c.target.data: n
        for c in calls
        if (n := integer_attribute(c, "layers", integer_attribute(c, "units", 0)))
        and c.target.data not in turned
    }
    blocks, called = graph.blocks, {call.target.data for call in calls}
    beside = {path: _outermost_paths(p for p in called if p.startswith(f"{path}.")) for path in layers}
    sizes = {
        path: _block_bytes(blocks[path]) - sum(_block_bytes(blocks[p]) for p in beside[path])
        for path in layers
    }
    largest_layer = max((-(-size // layers[path]) for path, size in sizes.items()), default=0)
    return largest_layer, max(0, param_bytes - sum(sizes.values()))


def _outermost_paths(paths: Iterable[str]) -> list[str]:
    """The module paths that are not inside another one of them, in order."""
    found: list[str] = []
    for path in sorted(paths, key=lambda p: p.split(".")):
        if not found or not path.startswith(f"{found[-1]}."):
            found.append(path)
    return found


def _block_bytes(block: BlockOp) -> int:
    return _block_parameters(block)[2]


def _block_parameters(block: BlockOp) -> tuple[int, int, int, int]:
    params, trainable = block.params.data, block.trainable.data
    return (
        params,
        trainable,
        integer_attribute(block, "bytes", FLOAT32_BYTES * params),
        integer_attribute(block, "trainable_bytes", FLOAT32_BYTES * trainable),
    )


def _glue_parameters(graph: GraphOp, name: str, paths: list[str]) -> list[tuple[int, int, int, int]]:
    """Parameters that the section's glue reads and that none of its blocks holds."""
    read: dict[str, ParamOp] = {}
    for case in graph.cases:
        for op in ops_in_section(case, name):
            read |= {o.owner.path.data: o.owner for o in op.operands if isinstance(o.owner, ParamOp)}
    counts: list[tuple[int, int, int, int]] = []
    for path, op in sorted(read.items()):
        if not any(path.startswith(f"{p}.") for p in paths):
            kind = tensor_type(op.result)
            size = int(size_expr.evaluate_expr(count_entries(kind), {}))
            train = size * kind.requires_grad
            counts.append((size, train, size * kind.itemsize, train * kind.itemsize))
    return counts


def _tied_duplicates(tie: TieOp, paths: list[str]) -> tuple[int, int, int, int]:
    """What several blocks of the section count of one tied parameter, less once."""
    again = max(sum(any(n.startswith(f"{p}.") for p in paths) for n in strings_of(tie.names)) - 1, 0)
    params, size, trainable = (
        integer_attribute(tie, key, 0) for key in ("params", "bytes", "trainable_bytes")
    )
    return -again * params, -again * params * (trainable > 0), -again * size, -again * trainable


def integer_attribute(op: Operation, key: str, default: int) -> int:
    """An integer of an op's attribute dictionary."""
    found = op.attributes.get(key)
    return found.value.data if isinstance(found, IntegerAttr) else default
