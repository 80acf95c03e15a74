"""Memory of glue in a section that trains: what its backward keeps, and what exists for a time.

Which tensors the backward of an operation keeps and makes is seen by running it, forward and backward, on
the meta device, which has shapes and no values. What a section holds at once follows from the order of its
operations: its code deletes each tensor after the last operation that needs it, and a gradient exists from
the backward of the last user of a tensor to that of the operation which made it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from xdsl.ir import Operation, SSAValue

from secc.cost.model.cost_expressions import sum_counted_exprs
from secc.cost.model.linear_loss import fused_loss_cost
from secc.cost.model.live_bytes import LiveBytesTracker, storage_key
from secc.ir.analysis.dataflow import value_bytes
from secc.ir.analysis.run_glue import run_glue
from secc.ir.analysis.vocab_sharding import VocabSpread
from secc.ir.dialect import size_expr
from secc.ir.dialect.ops import CallOp, GlueOp, ParamOp
from secc.ir.dialect.size_expr import Expr
from secc.ir.dialect.tensor_type import TensorType, tensor_type

VIEW_OP_NAMES = frozenset({  # views move no data
    "view", "_unsafe_view", "reshape", "slice", "select", "permute", "transpose", "t", "unsqueeze", "squeeze",
    "expand", "detach", "alias", "split", "split_with_sizes", "unbind", "as_strided", "unfold", "diagonal",
    "narrow", "chunk",
})  # fmt: skip
# Backwards that copy a gradient which repeats few numbers, inside of their kernels.
COPY_GRADIENT_OP_NAMES = frozenset({"_softmax", "_log_softmax"})


@dataclass(frozen=True)
class BackwardNeeds:
    """What the backward of an operation needs.

    operands, results: indices of those that it keeps.
    inside: bytes of other tensors that it keeps. working: bytes that exist for a time in it, next to the
    gradients of operands and results. Both are per byte of its largest tensor, which has the index `largest`
    in its operands and results.
    passed: indices of operands with the same gradient as the result, without a copy.
    thin: indices of operands with a gradient that repeats few numbers without a copy, as that of a sum.
    """

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    largest: int = 0
    inside: Fraction = Fraction(0)
    working: Fraction = Fraction(0)
    passed: tuple[int, ...] = ()
    thin: tuple[int, ...] = ()


@dataclass
class GlueMemory:
    """Bytes of one case, as expressions with their multiplicities or as alternatives.

    kept: from forward to backward. kept_logits: the part in tensors with a vocabulary dimension.
    call_transient, glue_transient, logits_transient: what exists at once in addition to all that is kept, in
        calls without a backward, in glue, and in glue with a vocabulary dimension.
    """

    kept: Counter[str] = field(default_factory=Counter[str])
    kept_logits: Counter[str] = field(default_factory=Counter[str])
    call_transient: set[str] = field(default_factory=set[str])
    glue_transient: set[str] = field(default_factory=set[str])
    logits_transient: set[str] = field(default_factory=set[str])


_known_needs = dict[object, BackwardNeeds]()  # by all that a run depends on


def op_has_backward(op: Operation) -> bool:
    """Whether a backward runs for this operation: it ran with gradients on, and a result requires one."""
    return "no_grad" not in op.properties and any(tensor_type(r).requires_grad for r in op.results)


def measure_glue(
    ops: Sequence[Operation],
    patterns: Sequence[Mapping[str, int]],
    spread: VocabSpread,
    excess: Mapping[Operation, Expr],
    kept_by_calls: Mapping[Operation, Expr],
) -> GlueMemory:
    """Measures the glue of one case of a section that trains.

    ops: the section's operations, in order. patterns: sizes of a micro-batch, for each input pattern.
    spread: the operations on tensors with a vocabulary dimension. excess: bytes that calls without a backward
    hold for a time, in addition to their results. kept_by_calls: bytes that calls keep under any
    recomputation.
    """
    walk = _Walk([op for op in ops if isinstance(op, (CallOp, GlueOp))], patterns[0], kept_by_calls)
    found = GlueMemory()
    for source, kept in walk.kept.items():
        text = size_expr.format_expr(kept.size)
        found.kept[text] += 1
        found.kept_logits[text] += source in spread.parts or source in spread.steps
    moments = [*walk.forward_moments(excess), *walk.backward_moments()]
    found.call_transient = _largest([m for m in moments if isinstance(m.op, CallOp)], patterns)
    found.logits_transient = _largest([m for m in moments if m.op in spread.steps], patterns)
    glue = [m for m in moments if isinstance(m.op, GlueOp) and m.op not in spread.steps]
    found.glue_transient = _largest(glue, patterns)
    return found


class _Kept(NamedTuple):
    """A tensor that backwards keep: its bytes, the place where it is made, and the first operation that needs
    it."""

    size: Expr
    made: int
    op: Operation


class _Span(NamedTuple):
    """Bytes that exist from one place to another, both included; negative bytes are missing there."""

    first: int
    last: int
    size: Expr


class _Moment(NamedTuple):
    """Bytes that exist during an operation, with their multiplicities."""

    op: Operation
    held: Mapping[Expr, int]


class _Walk:
    """The tensors of one case, with the operations from and to which they exist."""

    def __init__(
        self,
        ops: Sequence[CallOp | GlueOp],
        sizes: Mapping[str, int],
        kept_by_calls: Mapping[Operation, Expr],
    ) -> None:
        self._ops, self._kept_by_calls = ops, kept_by_calls
        self._place: dict[object, int] = {op: i for i, op in enumerate(ops)}
        self._shown = dict[SSAValue, SSAValue]()  # of a view, the value that has the memory
        for op in ops:
            if is_view(op):
                self._shown |= dict.fromkeys(op.results, self._memory_of(op.operands[0]))
        self._needs: dict[Operation, BackwardNeeds] = {
            op: backward_needs(op, sizes) for op in ops if _is_measured(op)
        }
        self.kept = dict[object, _Kept]()  # by value, or by operation for what it keeps inside
        for op, needs in self._needs.items():
            values = [op.operands[k] for k in needs.operands] + [op.results[k] for k in needs.results]
            for value in map(self._memory_of, values):
                if value.owner in self._place:
                    made = self._place[value.owner]
                    self.kept.setdefault(value, _Kept(value_bytes(value), made, op))
            if needs.inside:
                self.kept[op] = _Kept(needs.inside * _unit_bytes(op, needs), self._place[op], op)

    def _memory_of(self, value: SSAValue) -> SSAValue:
        return self._shown.get(value, value)

    def forward_moments(self, excess: Mapping[Operation, Expr]) -> list[_Moment]:
        """What exists during each forward. Blocks count what they keep of their arguments."""
        last = dict[SSAValue, int]()
        for i, op in enumerate(self._ops):
            for value in (*op.results, *op.operands):
                last[self._memory_of(value)] = i
        of_blocks = {
            self._memory_of(o)
            for op in self._ops
            if isinstance(op, CallOp) and op_has_backward(op)
            for o in op.operands
        }
        spans = [_Span(0, kept.made - 1, -kept.size) for kept in self.kept.values()]
        for op in self._ops:
            for value in op.results:
                if value not in self.kept and value not in of_blocks and self._memory_of(value) is value:
                    spans.append(_Span(self._place[op], last[value], value_bytes(value)))
        spans += [_Span(self._place[op], self._place[op], size) for op, size in excess.items()]
        ops = [op for op in self._ops if isinstance(op, GlueOp) or not op_has_backward(op)]
        return self._moments(spans, ops)

    def backward_moments(self) -> list[_Moment]:
        """What exists during each backward: gradients of tensors of the section, not of parameters."""
        with_backward = [op for op in self._ops if op_has_backward(op)]
        users = defaultdict[SSAValue, list[int]](list)
        for op in with_backward:
            for value in dict.fromkeys(o for o in op.operands if tensor_type(o).requires_grad):
                users[value].append(self._place[op])
        same = self._same_gradients(with_backward, users)
        first, last = dict[SSAValue, int](), dict[SSAValue, int]()
        for value, places in users.items():
            if not isinstance(value.owner, ParamOp):
                gradient, made = same.get(value, value), self._place.get(value.owner, 0)
                first[gradient] = min(first.get(gradient, made), made)
                last[gradient] = max(last.get(gradient, 0), *places)
        spans = [_Span(0, self._place[kept.op] - 1, -kept.size) for kept in self.kept.values()]
        for value in first:
            if not self._has_thin_gradient(value, users[value]):
                spans.append(_Span(first[value], last[value], value_bytes(value)))
            # The gradients by several users are added one by one.
            spans += [_Span(i, i, value_bytes(value)) for i in users[value] if i != last[value]]
        for op, needs in self._needs.items():
            if needs.working:
                spans.append(_Span(self._place[op], self._place[op], needs.working * _unit_bytes(op, needs)))
        return self._moments(spans, [op for op in with_backward if isinstance(op, GlueOp)])

    def _has_thin_gradient(self, value: SSAValue, users: Sequence[int]) -> bool:
        """Whether the gradient of a value with these users takes no memory worth counting."""
        maker = value.owner
        if len(users) != 1 or (isinstance(maker, GlueOp) and maker.base_name in COPY_GRADIENT_OP_NAMES):
            return False
        user = self._ops[users[0]]
        return user in self._needs and any(user.operands[k] == value for k in self._needs[user].thin)

    def _same_gradients(
        self, with_backward: Sequence[Operation], users: Mapping[SSAValue, Sequence[int]]
    ) -> dict[SSAValue, SSAValue]:
        """Maps a value to a later one that has the same gradient tensor. That is so where the only user of
        the value passes the gradient of its result on; in a chain of such users, the last result counts."""
        same = dict[SSAValue, SSAValue]()
        for op in reversed(with_backward):
            needs = self._needs.get(op)
            passed = needs.passed if needs is not None else (0,) if is_view(op) else ()
            for value in (op.operands[k] for k in passed):
                if len(users[value]) == 1 and value_bytes(value) == value_bytes(op.results[0]):
                    same[value] = same.get(op.results[0], op.results[0])
        return same

    def _moments(self, spans: Iterable[_Span], ops: Collection[Operation]) -> list[_Moment]:
        """What exists during each of `ops`, when the calls behind it keep nothing yet, or no longer."""
        changes = defaultdict[int, Counter[Expr]](Counter)
        of_calls = [_Span(0, self._place[op] - 1, -size) for op, size in self._kept_by_calls.items()]
        for span in (*spans, *of_calls):
            if span.first <= span.last:
                changes[span.first][span.size] += 1
                changes[span.last + 1][span.size] -= 1
        held, moments, wanted = Counter[Expr](), list[_Moment](), set(ops)
        for i, op in enumerate(self._ops):
            for size, count in changes[i].items():
                held[size] += count
            if op in wanted:
                moments.append(_Moment(op, {size: count for size, count in held.items() if count}))
        return moments


def _largest(moments: Sequence[_Moment], patterns: Sequence[Mapping[str, int]]) -> set[str]:
    """The bytes of the moment that holds most, for each pattern."""
    sizes = {size for moment in moments for size in moment.held}
    texts = set[str]()
    for pattern in patterns if moments else ():
        known = {size: size_expr.evaluate_size(size, pattern) for size in sizes}
        most = max(moments, key=lambda m: sum(n * known[size] for size, n in m.held.items()))
        texts.add(sum_counted_exprs({size_expr.format_expr(size): n for size, n in most.held.items()}))
    return texts


def is_view(op: Operation) -> bool:
    """Whether an operation moves no data: its results show the memory of its first operand."""
    return isinstance(op, GlueOp) and op.base_name in VIEW_OP_NAMES and bool(op.operands)


def _is_measured(op: Operation) -> TypeGuard[GlueOp]:
    return isinstance(op, GlueOp) and op_has_backward(op) and not is_view(op) and fused_loss_cost(op) is None


def _unit_bytes(op: Operation, needs: BackwardNeeds) -> Expr:
    return value_bytes([*op.operands, *op.results][needs.largest])


def backward_needs(op: GlueOp, sizes: Mapping[str, int]) -> BackwardNeeds:
    """What the backward of an operation needs, by a run at these sizes. Where torch cannot run it without
    values, its results are taken to be kept."""
    types = tuple(tensor_type(value) for value in (*op.operands, *op.results))
    key = op.target.data, op.args.data, types, tuple(sorted(sizes.items()))
    if key not in _known_needs:
        try:
            _known_needs[key] = _run_backward(op, sizes)
        except Exception:  # whatever an operation raises without values
            _known_needs[key] = BackwardNeeds(results=tuple(range(len(op.results))))
    return _known_needs[key]


def _run_backward(op: GlueOp, sizes: Mapping[str, int]) -> BackwardNeeds:
    operands = [_empty_tensor(tensor_type(value), sizes) for value in op.operands]
    saved = list[torch.Tensor]()

    def record(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        results = run_glue(op, operands, sizes, "meta")
    tensors = [*operands, *results]
    kept = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
    inside = sum(size for key, size in kept.items() if key not in set(map(storage_key, tensors)))
    gradients = [(result, torch.empty_like(result)) for result in results if result.requires_grad]
    tracker = LiveBytesTracker([*tensors, *saved, *(gradient for _, gradient in gradients)])
    needing = [k for k, operand in enumerate(operands) if operand.requires_grad]
    with _Recorder(tracker):
        found = torch.autograd.grad(
            [result for result, _ in gradients],
            [operands[k] for k in needing],
            [gradient for _, gradient in gradients],
            materialize_grads=True,
        )
    given = {storage_key(gradient) for _, gradient in gradients}
    by_operand = dict(zip(needing, found, strict=True))
    made = {storage_key(g): g.untyped_storage().nbytes() for g in by_operand.values()}
    new = sum(size for key, size in made.items() if key not in given)
    working = max(0, max(tracker.bytes_after_op, default=0) - new)
    sizes_of_tensors = [tensor.untyped_storage().nbytes() for tensor in tensors]
    largest = max(range(len(tensors)), key=sizes_of_tensors.__getitem__)
    unit = max(1, sizes_of_tensors[largest])
    return BackwardNeeds(
        tuple(k for k, operand in enumerate(operands) if storage_key(operand) in kept),
        tuple(k for k, result in enumerate(results) if storage_key(result) in kept),
        largest,
        Fraction(inside, unit),
        Fraction(working, unit),
        tuple(k for k, g in by_operand.items() if storage_key(g) in given),
        tuple(k for k, g in by_operand.items() if 2 * g.untyped_storage().nbytes() < g.nbytes),
    )


class _Recorder(TorchDispatchMode):
    """Records the results of all operations."""

    def __init__(self, tracker: LiveBytesTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._tracker.record_results(t for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        return result


def _empty_tensor(type_: TensorType, sizes: Mapping[str, int]) -> torch.Tensor:
    shape = [int(size_expr.evaluate_size(dim, sizes)) for dim in type_.shape]
    dtype = getattr(torch, type_.torch_dtype)
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=type_.requires_grad)
