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

from secc.cost.model.cost_expressions import estimated, largest, total
from secc.cost.model.default_estimate import ZERO, CallCost, default, entries
from secc.cost.model.linear_loss import FusedCost, fused_cost
from secc.cost.model.patterns_and_transfers import micro_batch, patterns
from secc.cost.model.recompute_cost import Again, AgainSum, recomputed, selected
from secc.ir.analysis.dataflow import abouts, text_of
from secc.ir.analysis.vocab_sharding import Spread, heads
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
    strings,
)
from secc.ir.dialect.readable_names import OUT_OF_TURN
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import tensor
from secc.runtime.plan.expr_eval import evaluate

FLOAT_BYTES = 4  # of a parameter whose dtype nobody noted
# Views move no data.
VIEWS = frozenset({
    "view", "_unsafe_view", "reshape", "slice", "select", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "detach", "alias",
    "split", "split_with_sizes", "unbind", "as_strided", "unfold", "diagonal", "narrow", "chunk",
})  # fmt: skip
ATTENTION_BACKWARD = (
    2  # FLOPs over those of forward: gradients of queries, keys, values and scores, whatever trains
)
ATTENTION_AGAIN = sympy.Rational(
    5, 2
)  # time over forward's: a kernel that keeps no scores computes them again
_TEXTS = (
    "flops",
    "backward_flops",
    "saved",
    "glue_bytes",
    "summed",
    "logits_saved",
    "logits_moved",
    "passing",
    "logits_passing",
    "transient",
)
MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm"})


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
    again: Mapping[str, Again] = field(default_factory=dict[str, Again])
    layers: int = 0
    summed: str = "0"
    narrow: int = 0
    forward_ns: str = "0"
    backward_ns: str = "0"
    master_bytes: int = 0
    logits_saved: str = "0"
    logits_moved: str = "0"
    passing: str = "0"
    logits_passing: str = "0"
    transient: str = "0"
    unit_bytes: int = 0
    rest_bytes: int = 0
    sequence: bool = False
    tensors: int = 0

    @property
    def wide_bytes(self) -> int:
        """Bytes of the gradients as ranks sum them: in float32, or in more bits where the parameters have
        more."""
        return max(FLOAT_BYTES * self.trainable, self.trainable_bytes)

    @property
    def summed_bytes(self) -> int:
        """Bytes of the trainable weights as a rank adds up their gradients and keeps optimizer states."""
        return self.master_bytes or self.trainable_bytes


@dataclass
class _Sum:
    """Running sums over one case; equal addends are counted, not added one by one."""

    flops: Counter[str] = field(default_factory=Counter[str])
    backward: Counter[str] = field(default_factory=Counter[str])
    work: Counter[str] = field(default_factory=Counter[str])
    backward_work: Counter[str] = field(default_factory=Counter[str])
    saved: Counter[str] = field(default_factory=Counter[str])
    glue: Counter[str] = field(default_factory=Counter[str])
    forward_ns: Counter[str] = field(default_factory=Counter[str])
    backward_ns: Counter[str] = field(default_factory=Counter[str])
    logits_saved: Counter[str] = field(default_factory=Counter[str])
    logits_moved: Counter[str] = field(default_factory=Counter[str])
    passing: set[str] = field(default_factory=set[str])
    logits_passing: set[str] = field(default_factory=set[str])
    held: set[str] = field(default_factory=set[str])
    beside: set[str] = field(default_factory=set[str])
    made: Counter[str] = field(default_factory=Counter[str])
    ops: int = 0
    layers: int = 0
    summed: Counter[str] = field(default_factory=Counter[str])
    again: AgainSum = field(default_factory=AgainSum)


def section_cost(graph: GraphOp, section: SectionOp) -> SectionCost:
    """The cost of a section from its calls' measured attributes, by estimate where they are missing.

    Sizes that inputs' values decide are not in it: ranks, which evaluate it, know them too late.
    """
    known = abouts(graph)
    return _without(_section_cost(graph, section), known) if known else _section_cost(graph, section)


def _without(cost: SectionCost, known: Mapping[str, Expr]) -> SectionCost:
    """The cost with what some symbols are about in their place."""

    def texts(of: SectionCost | Again, *fields: str) -> dict[str, Any]:
        return {field: estimated(getattr(of, field), known) for field in fields}

    again = {
        way: replace(a, **texts(a, "saved", "working", "work", "moved")) for way, a in cost.again.items()
    }
    times = texts(cost, "work", "backward_work", "forward_ns", "backward_ns")
    return replace(cost, again=again, **times, **texts(cost, *_TEXTS))


def _section_cost(graph: GraphOp, section: SectionOp) -> SectionCost:
    name = section.sym.data
    paths = strings(section.blocks)
    picked, blocks = selected(graph, paths), graph.blocks
    cases = [ops for case in graph.cases if (ops := ops_in(case, name))]
    sums = [_case_sum(graph, blocks, ops, picked) for ops in cases]
    calls = [op for ops in cases for op in ops if isinstance(op, CallOp)]
    guessed = [call for call in calls if "forward_ns" not in call.attributes]
    estimated = any("flops" not in call.attributes or "default" in _label(call) for call in guessed)
    params, trainable, param_bytes, trainable_bytes = _parameters(graph, name, calls)
    return SectionCost(
        largest(total(s.flops) for s in sums),
        largest(total(s.backward) for s in sums) if _mode(section) != "forward" else "0",
        largest(total(s.work) for s in sums),
        largest(total(s.backward_work) for s in sums) if _mode(section) != "forward" else "0",
        largest(total(s.saved) for s in sums) if _mode(section) != "forward" else "0",
        largest(total(s.glue) for s in sums),
        max((s.ops for s in sums), default=0),
        params,
        trainable,
        param_bytes,
        trainable_bytes,
        _dtype(calls),
        "default" if estimated else _counted(calls),
        recomputed([s.again for s in sums]) if _mode(section) != "forward" else {},
        max((s.layers for s in sums), default=0),
        largest(total(s.summed) for s in sums),
        _narrow(calls),
        _timed(s.forward_ns for s in sums),
        _timed(s.backward_ns for s in sums) if _mode(section) != "forward" else "0",
        FLOAT_BYTES * trainable if "dtype" in graph.attributes else 0,
        largest(total(s.logits_saved) for s in sums) if _mode(section) != "forward" else "0",
        largest(total(s.logits_moved) for s in sums),
        _largest_of_dataset(graph, {text for s in sums for text in s.passing}),
        _largest_of_dataset(graph, {text for s in sums for text in s.logits_passing}),
        _largest_of_dataset(graph, {_transient(s, _mode(section)) for s in sums}),
        *_unit_bytes(graph, calls, param_bytes),
        text_of(section, "norms") == "sequence",
        sum(number(blocks[path], "tensors", 0) for path in _outermost({call.target.data for call in calls})),
    )


def _transient(of: _Sum, mode: str) -> str:
    """What a forward without backward holds at once. A section's code lets go of what its calls and glue make
    when it ends; in one with a backward that is saved, or little."""
    if mode != "forward":
        return largest(of.held)
    return _sum(size_expr.parse(largest(of.beside)), size_expr.parse(total(of.made)))


def ops_in(case: CaseOp, section: str) -> list[Operation]:
    """The ops of a case that are in a section."""
    return [op for op in case.ops if section_of(op) == section]


def call_cost(call: CallOp, block: BlockOp) -> CallCost:
    """What `secc.cost.counting.annotate_calls` noted at a call of a block, or the estimate."""
    estimate = default(call, block)
    if "flops" not in call.attributes:
        return estimate
    saved = _text(call, "saved", estimate.saved)
    ops, units = number(call, "ops", estimate.ops), number(call, "units", 0)
    flops = _text(call, "flops", estimate.flops)
    rest = {
        key: _text(call, key, ZERO)
        for key in ("peak", "working", "again", "again_moved", "attention", "attention_work", "moved")
    }
    kept, work = _text(call, "kept", saved), _text(call, "work", flops)
    narrow, in_turn = number(call, "narrow", 0), OUT_OF_TURN not in call.attributes
    return CallCost(
        flops, work, saved, ops, _label(call), units, kept, narrow=narrow, in_turn=in_turn, **rest
    )


def origins(graph: GraphOp, section: SectionOp) -> dict[str, int]:
    """How many of a section's blocks have costs of which kind: measured, counted, sampled or default."""
    called = {
        op.target.data: op
        for case in graph.cases
        for op in ops_in(case, section.sym.data)
        if isinstance(op, CallOp)
    }
    return dict(Counter(map(_origin, called.values())))


def _origin(call: CallOp) -> str:
    if "forward_ns" in call.attributes:
        return "measured"
    return _label(call) if "flops" in call.attributes else "default"


def _text(op: Operation, key: str, default: Expr) -> Expr:
    found = op.attributes.get(key)
    return size_expr.parse(found.data) if isinstance(found, StringAttr) else default


def _case_sum(
    graph: GraphOp, blocks: Mapping[str, BlockOp], ops: list[Operation], picked: Collection[str]
) -> _Sum:
    total, spread = _Sum(), Spread(ops, heads(graph, ops))
    for op in ops:
        if isinstance(op, CallOp):
            _add_call(op, blocks[op.target.data], total, op.target.data in picked)
        elif isinstance(op, GlueOp):
            _add_glue(op, total)
            _add_logits(op, total, spread)
            _add_passing(op, total, spread)
    return total


def _add_passing(op: GlueOp, total: _Sum, spread: Spread) -> None:
    """The gradients that an operation's backward gets and makes; those of parameters stay."""
    if not owes_backward(op) or op.base in VIEWS or fused_cost(op) is not None:
        return
    texts = total.logits_passing if op in spread.steps else total.passing
    passing = (
        v for v in (*op.results, *op.operands) if tensor(v).requires_grad and not isinstance(v.owner, ParamOp)
    )
    texts.add(size_expr.text(sum(map(_bytes, passing), ZERO)))


def _largest_of_dataset(graph: GraphOp, found: Collection[str]) -> str:
    """The largest of many expressions at the sizes that samples have in the mean, of those that inputs'
    values do not decide."""
    known = {str(name) for name in abouts(graph)}
    texts = [
        text for text in found if not any(str(s) in known for s in size_expr.symbols(size_expr.parse(text)))
    ]
    if len(texts) < 2:
        return largest(texts)
    sizes = [micro_batch(graph, p.sizes, 1) for p in patterns(graph)]
    return largest(max(texts, key=lambda text: evaluate(text, at)) for at in sizes)


def _add_logits(op: GlueOp, total: _Sum, spread: Spread) -> None:
    """What of a glue's bytes tp cuts by tokens."""
    if op not in spread.steps or op.base in VIEWS:
        return
    written = sum((_bytes(r) for r in op.results if r in spread.parts), ZERO)
    total.logits_moved[
        size_expr.text(written + sum((_bytes(o) for o in op.operands if o in spread.parts), ZERO))
    ] += 1
    if owes_backward(op):
        total.logits_saved[size_expr.text(written)] += 1


def _add_call(call: CallOp, block: BlockOp, total: _Sum, picked: bool) -> None:
    cost = call_cost(call, block)
    total.flops[size_expr.text(cost.flops)] += 1
    timed = call.attributes.get("forward_ns")
    if isinstance(timed, StringAttr):
        total.forward_ns[timed.data] += 1
    else:
        total.work[_sum(cost.work, cost.attention_work)] += 1
        total.glue[size_expr.text(cost.moved)] += 1
        total.ops += cost.ops
    layers = number(call, "layers", cost.units)
    if layers:
        total.layers += layers
        total.summed[
            size_expr.text(
                cost.kept
                if cost.kept != 0
                else layers * sum((_bytes(r) for r in call.results), size_expr.parse("0"))
            )
        ] += 1
    if owes_backward(call):
        backward, backward_work = _backward(cost, _backward_share(block))
        total.backward[backward] += 1
        timed = call.attributes.get("backward_ns")
        if isinstance(timed, StringAttr):
            total.backward_ns[timed.data] += 1
        else:
            total.backward_work[backward_work] += 1
        total.saved[size_expr.text(cost.saved)] += 1
        total.again.add_call(cost, picked)
    else:
        made = sum(map(_bytes, call.results), ZERO)
        total.made[size_expr.text(made)] += 1
        total.held.add(size_expr.text(cost.peak))
        total.beside.add(size_expr.text(cost.peak - made if cost.peak != 0 else ZERO))


@cache
def _backward(cost: CallCost, share: Fraction) -> tuple[str, str]:
    """FLOPs and work of a call's backward, which takes `share` times as long as its forward."""
    part = sympy.Rational(share.numerator, share.denominator)
    flops = _sum((cost.flops - cost.attention) * part, cost.attention * ATTENTION_BACKWARD)
    return flops, _sum(cost.work * part, cost.attention_work * ATTENTION_AGAIN)


def _backward_share(block: BlockOp) -> Fraction:
    """Backward FLOPs over forward FLOPs: one part for gradients that pass through the block, one for those of
    the weights that train."""
    return 1 + (Fraction(block.trainable.data, block.params.data) if block.params.data else Fraction(0))


def _add_fused(op: GlueOp, cost: FusedCost, total: _Sum) -> None:
    total.ops += cost.ops
    total.flops[size_expr.text(cost.flops)] += 1
    total.work[size_expr.text(cost.flops)] += 1
    total.glue[size_expr.text(cost.moved)] += 1
    if owes_backward(op):
        total.backward[size_expr.text(cost.backward)] += 1
        total.backward_work[size_expr.text(cost.backward)] += 1
        total.saved[size_expr.text(cost.saved)] += 1
        total.again.add_saved(size_expr.text(cost.saved))


def _add_glue(op: GlueOp, total: _Sum) -> None:
    if (fused := fused_cost(op)) is not None:
        _add_fused(op, fused, total)
        return
    total.ops += 1
    kind = op.base
    if kind in VIEWS:
        return
    written = sum((_bytes(r) for r in op.results), size_expr.parse("0"))
    read = sum((_bytes(o) for o in op.operands), size_expr.parse("0"))
    total.glue[size_expr.text(written + read)] += 1
    total.made[size_expr.text(written)] += 1
    flops = _matmul_flops(op) if kind in MATMULS else None
    if flops is not None:
        total.flops[size_expr.text(flops)] += 1
        total.work[size_expr.text(flops)] += 1
    if owes_backward(op):
        total.saved[size_expr.text(written)] += 1
        total.again.add_saved(size_expr.text(written))
        if flops is not None:
            back = size_expr.text(flops * sum(tensor(o).requires_grad for o in op.operands[-2:]))
            total.backward[back] += 1
            total.backward_work[back] += 1


def _timed(cases: Iterable[Counter[str]]) -> str:
    """The largest of the cases' measured nanoseconds; texts with whole divisions, which no polynomial sum
    keeps."""
    texts = sorted({" + ".join(f"{n}*({text})" for text, n in sorted(c.items())) for c in cases if c})
    return texts[0] if len(texts) == 1 else f"max({', '.join(texts)})" if texts else "0"


@cache
def _sum(*parts: Expr) -> str:
    return size_expr.text(sympy.expand(sum(parts, ZERO)))


def _counted(calls: list[CallOp]) -> str:
    return "measured" if calls and all("forward_ns" in c.attributes for c in calls) else "counted"


def _narrow(calls: list[CallOp]) -> int:
    """That of the call with the most parameters' worth of operations; 0 where nobody counted."""
    return max(((number(c, "ops", 0), number(c, "narrow", 0)) for c in calls), default=(0, 0))[1]


def _matmul_flops(op: GlueOp) -> Expr:
    """Two FLOPs for each entry of the result and of the inner dim."""
    return 2 * entries(tensor(op.results[0])) * tensor(op.operands[-2]).shape[-1]


def owes_backward(op: Operation) -> bool:
    return "no_grad" not in op.properties and any(tensor(r).requires_grad for r in op.results)


def _bytes(value: SSAValue) -> Expr:
    kind = tensor(value)
    return entries(kind) * kind.itemsize


def _label(call: CallOp) -> str:
    found = call.attributes.get("cost")
    return found.data if isinstance(found, StringAttr) else "counted"


def _mode(section: SectionOp) -> str:
    return section.mode.data if section.mode is not None else "train"


def _dtype(calls: list[CallOp]) -> str:
    """What most calls compute in: the autocast dtype where there is one, else that of their results."""
    found = Counter(
        call.autocast.data if call.autocast is not None else tensor(call.results[0]).dtype.data
        for call in calls
        if call.results
    )
    name = max(sorted(found), key=lambda n: found[n], default="f32")
    return {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}.get(name, name)


def _parameters(graph: GraphOp, name: str, calls: list[CallOp]) -> tuple[int, int, int, int]:
    """(entries, trainable entries, bytes, trainable bytes), a tied parameter once, and one of a block within
    another, too."""
    paths = _outermost({call.target.data for call in calls})
    blocks = graph.blocks
    counts = [_block_parameters(blocks[path]) for path in paths]
    counts += _glue_parameters(graph, name, paths)
    counts += [_repeated(op, paths) for op in graph.body.block.ops if isinstance(op, TieOp)]
    return (
        sum(c[0] for c in counts),
        sum(c[1] for c in counts),
        sum(c[2] for c in counts),
        sum(c[3] for c in counts),
    )


def _unit_bytes(graph: GraphOp, calls: list[CallOp], param_bytes: int) -> tuple[int, int]:
    """Bytes of the parameters of the largest layer of a stack, and of what no stack has, or one whose layers
    run twice or out of turn.

    Blocks within a block of layers that are called beside it, such as its embedding, are none of its layers.
    """
    turned = {c.target.data for c in calls if OUT_OF_TURN in c.attributes}
    layers = {
        c.target.data: n
        for c in calls
        if (n := number(c, "layers", number(c, "units", 0))) and c.target.data not in turned
    }
    blocks, called = graph.blocks, {call.target.data for call in calls}
    beside = {path: _outermost(p for p in called if p.startswith(f"{path}.")) for path in layers}
    sizes = {
        path: _bytes_of(blocks[path]) - sum(_bytes_of(blocks[p]) for p in beside[path]) for path in layers
    }
    largest_layer = max((-(-size // layers[path]) for path, size in sizes.items()), default=0)
    return largest_layer, max(0, param_bytes - sum(sizes.values()))


def _outermost(paths: Iterable[str]) -> list[str]:
    """The module paths that are not inside another one of them, in order."""
    found: list[str] = []
    for path in sorted(paths, key=lambda p: p.split(".")):
        if not found or not path.startswith(f"{found[-1]}."):
            found.append(path)
    return found


def _bytes_of(block: BlockOp) -> int:
    return _block_parameters(block)[2]


def _block_parameters(block: BlockOp) -> tuple[int, int, int, int]:
    params, trainable = block.params.data, block.trainable.data
    return (
        params,
        trainable,
        number(block, "bytes", FLOAT_BYTES * params),
        number(block, "trainable_bytes", FLOAT_BYTES * trainable),
    )


def _glue_parameters(graph: GraphOp, name: str, paths: list[str]) -> list[tuple[int, int, int, int]]:
    """Parameters that the section's glue reads and that none of its blocks holds."""
    read: dict[str, ParamOp] = {}
    for case in graph.cases:
        for op in ops_in(case, name):
            read |= {o.owner.path.data: o.owner for o in op.operands if isinstance(o.owner, ParamOp)}
    counts: list[tuple[int, int, int, int]] = []
    for path, op in sorted(read.items()):
        if not any(path.startswith(f"{p}.") for p in paths):
            kind = tensor(op.result)
            size = int(size_expr.evaluate(entries(kind), {}))
            train = size * kind.requires_grad
            counts.append((size, train, size * kind.itemsize, train * kind.itemsize))
    return counts


def _repeated(tie: TieOp, paths: list[str]) -> tuple[int, int, int, int]:
    """What several blocks of the section count of one tied parameter, less once."""
    again = max(sum(any(n.startswith(f"{p}.") for p in paths) for n in strings(tie.names)) - 1, 0)
    params, size, trainable = (number(tie, key, 0) for key in ("params", "bytes", "trainable_bytes"))
    return -again * params, -again * params * (trainable > 0), -again * size, -again * trainable


def number(op: Operation, key: str, default: int) -> int:
    """An integer of an op's attribute dictionary."""
    found = op.attributes.get(key)
    return found.value.data if isinstance(found, IntegerAttr) else default
