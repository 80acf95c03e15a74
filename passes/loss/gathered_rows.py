"""Losses that compare the samples of a batch with each other, `--gather NAME`: contrastive losses with
in-batch negatives, variances and covariances over the batch.

Such an op needs the rows of all samples at once, while a micro-batch has its own. So it is computed on the
rows of the global batch, one vector a sample, in each micro-batch again. Gathered rows are, for b of the
batch's B samples,

    all rows  +  (own - detach(own)) * B / b    at the places of the micro-batch's samples

The values are those of the global batch; the loss g of all rows counts by the micro-batch's share b / B of
the samples. So the gradient of its rows is that of g, and parameters that g reads (a temperature) get their
gradient in B / b parts. Values and gradients are those of plain PyTorch, for any g (the first of the two
passes is that of gradient caching, Gao et al. 2021).

All rows have to be known before the first backward: a step begins with a forward of all micro-batches
(`secc.runtime.training.first_pass`), and the rows are a term `rows:NAME` that is part of no loss.

Ops on gathered rows have the size `all_samples` where they had `B`. No edge carries a tensor of that size, so
they stay in one section.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from xdsl.dialects.builtin import IntAttr, StringAttr
from xdsl.ir import SSAValue

from secc.errors import UserError
from secc.ir.analysis.dataflow import is_random_op, producer_of
from secc.ir.analysis.whole_batch import find_named_blocks
from secc.ir.dialect.argument_template import format_arguments
from secc.ir.dialect.ops import CallOp, Computation, GlueOp, GraphOp, SymbolOp
from secc.ir.dialect.size_expr import Expr, size_symbol, symbol_names
from secc.ir.dialect.tensor_type import TensorType, tensor_type
from secc.passes.loss.loss_context import DATA_KIND, LossContext
from secc.passes.loss.value_states import LOCAL_STATE, BadState, GatheredRows, LocalState, ValueState
from secc.runtime.plan.schema import ALL_SAMPLES

GATHER_TARGET = "batch.gathered"  # glue that `SectionModule.gathered` computes
_OWN, _ALL = size_symbol("B"), size_symbol(ALL_SAMPLES)
_ADDING_OPS = frozenset({"add", "sub", "rsub", "stack", "cat"})


class _NotGathered(Exception):
    """Raised for an op that cannot be computed on gathered rows."""


@dataclass
class _WholeBatchOp:
    """Builds the ops that compute one op on the rows of the global batch, without inserting them."""

    ctx: LossContext
    rows: dict[SSAValue, GatheredRows] = field(default_factory=dict[SSAValue, GatheredRows])
    versions: dict[SSAValue, SSAValue] = field(default_factory=dict[SSAValue, SSAValue])

    def copy(self, op: Computation) -> GlueOp:
        """A copy of `op` on all rows. Raises _NotGathered."""
        if not isinstance(op, GlueOp) or is_random_op(op):
            raise _NotGathered
        operands = [self._over_all_samples(o) for o in op.operands]
        arguments = op.arguments.map_leaves(
            lambda leaf: self._resize(leaf) if isinstance(leaf, Expr) else leaf
        )
        types = [self._whole_type(tensor_type(r)) for r in op.results]
        properties = dict(op.properties) | {"args": StringAttr(format_arguments(arguments))}
        made = GlueOp.create(
            operands=operands, result_types=types, properties=properties, attributes=dict(op.attributes)
        )
        assert isinstance(made, GlueOp)
        return self.ctx.pending.add_op(made)

    def _over_all_samples(self, value: SSAValue) -> SSAValue:
        """The value for the global batch."""
        ctx = self.ctx
        if value in ctx.whole:
            return value
        known = self.versions.get(value) or ctx.whole_versions.get(value)
        if known is not None:
            return known
        if not isinstance(ctx.state_of(value), LocalState) or self._tells_places(value):
            return self._compute_again(value)
        if not ctx.carries_samples(value):
            return value
        if not self._is_gatherable(tensor_type(value)):  # rows of two encoders one after the other
            return self._compute_again(value)
        self.versions[value] = self._gather(value)
        return self.versions[value]

    def _compute_again(self, value: SSAValue) -> SSAValue:
        """The value for the global batch, from its operands for the global batch."""
        made = self.copy(_glue_behind(value))
        for old, new in zip(_glue_behind(value).results, made.results, strict=True):
            self.versions[old] = new
        return self.versions[value]

    def _is_gatherable(self, type: TensorType) -> bool:
        """Whether a tensor has one row of fixed size for each sample."""
        dims = self.ctx.sample_dims(type)
        sizes = [d for i, d in enumerate(type.shape) if i not in dims]
        return len(dims) == 1 and type.shape[dims[0]] == _OWN and all(d.is_Integer for d in sizes)

    def _tells_places(self, value: SSAValue) -> bool:
        """Whether a value made of inputs depends on where samples stand in the batch, or pairs them: a
        micro-batch's part of it is not its rows of the whole."""
        ctx, op = self.ctx, producer_of(value)
        if not ctx.is_input_only(value) or not ctx.carries_samples(value) or not isinstance(op, GlueOp):
            return False
        pairs = len(ctx.sample_dims(tensor_type(value))) > 1
        return pairs or value in ctx.given_values or any(self._tells_places(o) for o in op.operands)

    def _gather(self, value: SSAValue) -> SSAValue:
        """The rows of all samples of a value that has one row of fixed size for each."""
        pending, type, like = self.ctx.pending, tensor_type(value), producer_of(value)
        dims = self.ctx.sample_dims(type)
        sizes = [d for i, d in enumerate(type.shape) if i not in dims]
        if not isinstance(like, Computation):
            like = next(iter(self.ctx.case_computations()))
        rows, dim = value, dims[0]
        if dim:
            first = TensorType.from_dims([_OWN, *sizes], type.dtype.data, type.requires_grad)
            rows = pending.make_glue(like, "aten.movedim.int", [rows], f"$0, {dim}, 0", first)
        whole = TensorType.from_dims([_ALL, *sizes], type.dtype.data, type.requires_grad)
        gathered = pending.make_glue(like, GATHER_TARGET, [rows], '$0, ""', whole)
        assert isinstance(gathered.owner, GlueOp)
        self.rows[value] = GatheredRows(gathered.owner, rows, tuple(_blocks_behind(value)))
        if dim:
            back = TensorType.from_dims(self._whole_shape(type), type.dtype.data, type.requires_grad)
            gathered = pending.make_glue(like, "aten.movedim.int", [gathered], f"$0, 0, {dim}", back)
        return gathered

    def _whole_type(self, type: TensorType) -> TensorType:
        return TensorType.from_dims(self._whole_shape(type), type.dtype.data, type.requires_grad)

    def _whole_shape(self, type: TensorType) -> list[Expr]:
        return [self._resize(d) for d in type.shape]

    def _resize(self, size: Expr) -> Expr:
        """A size for all samples. Raises _NotGathered where other sizes of the inputs occur in it."""
        whole = size.subs(_OWN, _ALL)
        if symbol_names(whole) & self.ctx.sample_symbols:
            raise _NotGathered
        return whole


def compute_on_gathered(ctx: LossContext, op: Computation, bad: BadState) -> Sequence[ValueState] | None:
    """The states of the results of `op`, which mixes samples as `bad` says, computed on gathered rows; None
    where that is impossible, or the user did not name all blocks that the rows come from."""
    building = _WholeBatchOp(ctx)
    try:
        made = building.copy(op)
    except _NotGathered:
        return None
    needed = dict.fromkeys(name for rows in building.rows.values() for name in rows.blocks)
    if missing := [n for n in needed if not any(_covers(g, n) for g in ctx.gather)]:
        if not ctx.collects_names:
            return None
        ctx.unnamed += [(bad, n) for n in missing]
    if not needed and not ctx.gather and not ctx.unnamed:
        return None
    for own, whole in building.versions.items():  # where ops that are followed later find them, too
        ctx.pending.commit_after(producer_of(own), [whole])
    ctx.pending.commit_before(op, made.results)
    ctx.gathers += building.rows.values()
    ctx.whole_versions |= building.versions
    ctx.whole.update(made.results)
    ctx.whole.update(building.versions.values())
    for old, new in zip(op.results, made.results, strict=True):
        old.replace_all_uses_with(new)
    ctx.states |= dict.fromkeys(made.results, LOCAL_STATE)
    return [LOCAL_STATE] * len(op.results)


def offer_names(ctx: LossContext, state: ValueState) -> BadState | None:
    """The bad state of a loss, with the blocks to name, where rows of all samples make it `state`; None where
    they do not help."""
    if isinstance(state, BadState) or not ctx.unnamed:
        return None
    first = ctx.unnamed[0][0]
    flags = " ".join(f"--gather {n}" for n in dict.fromkeys([*ctx.gather, *(n for _, n in ctx.unnamed)]))
    offer = f"; where samples are to be compared with each other, {flags} computes it exactly on the rows"
    offer += " of the global batch, with one more forward in each step"
    return BadState(first.reason, first.op, first.remedy + offer)


def states_on_gathered(ctx: LossContext, op: Computation) -> Sequence[ValueState] | None:
    """The states of the results of an op that takes values of the whole batch; None where other rules give
    them, because it adds such a value to others."""
    if isinstance(op, GlueOp) and op.target.data == GATHER_TARGET:  # made for the loss, logged as well
        ctx.whole.update(op.results)
        return [LOCAL_STATE]
    if not any(o in ctx.whole for o in op.operands):
        return None
    if all(r in ctx.whole for r in op.results):
        return [LOCAL_STATE] * len(op.results)
    others = [o for o in op.operands if o not in ctx.whole]
    sizes = [d for o in op.operands for d in tensor_type(o).shape]
    sizes += [leaf for leaf in op.arguments.leaves() if isinstance(leaf, Expr)]  # a mean's `B`, for one
    over_all = any(symbol_names(d) & {ALL_SAMPLES, str(_OWN)} for d in sizes)
    if not over_all and not any(ctx.carries_samples(o) for o in others):
        if all(isinstance(ctx.state_of(o), LocalState) for o in others):
            ctx.whole.update(op.results)
            return [LOCAL_STATE] * len(op.results)
        if op.base_name in _ADDING_OPS or all(ctx.coefficient_of(o) is not None for o in others):
            return None
    bad = ctx.refuse_op(op, "takes a value of the whole batch together with what only a micro-batch has")
    return compute_on_gathered(ctx, op, bad) or [bad] * len(op.results)


def declare_all_samples(graph: GraphOp, global_batch: int) -> None:
    """Declares the size `all_samples`; costs take `global_batch` for it."""
    if ALL_SAMPLES in graph.symbols:
        return
    named: dict[str, Any] = {"sym": StringAttr(ALL_SAMPLES), "kind": StringAttr(DATA_KIND)}
    named |= {"key": StringAttr(""), "dim": IntAttr(0), "about": StringAttr(str(global_batch))}
    block, last = graph.body.block, list(graph.symbols.values())[-1]
    block.insert_ops_after([SymbolOp.create(properties=named)], last)


def check_names(graph: GraphOp, option: str, names: Iterable[str]) -> None:
    """Raises UserError for a name that is no block, no part of one, and has no blocks in it."""
    for name in names:
        if not find_named_blocks(graph, name):
            message = f"{option} {name}: the model has no such block"
            raise UserError(message, remedy=f"blocks are {', '.join(sorted(graph.blocks))}")


def check_gathered(names: tuple[str, ...], contexts: list[LossContext]) -> None:
    """Raises UserError for names of blocks without rows that were gathered."""
    used = {n for ctx in contexts for rows in ctx.gathers for n in rows.blocks}
    for name in names:
        blocks = sorted(contexts[0].graph.blocks)
        if not any(_covers(name, block) for block in used):
            message = f"--gather {name}: no loss compares rows of {name} with those of other samples"
            raise UserError(message, remedy=f"leave it out, or name one of {', '.join(blocks)}")


def _covers(name: str, block: str) -> bool:
    """Whether a block is the one of this name or a part of it, as where layers are captured one by one."""
    return block == name or block.startswith(f"{name}.")


def _glue_behind(value: SSAValue) -> Computation:
    """The glue that makes a value. Raises _NotGathered for anything else."""
    if not isinstance(value.owner, GlueOp):
        raise _NotGathered
    return value.owner


def _blocks_behind(value: SSAValue) -> list[str]:
    """The blocks that a value comes from through glue, in the order in which they are found."""
    found, queue, seen = dict[str, None](), [value], set[SSAValue]()
    while queue:
        op = producer_of(queue.pop())
        if isinstance(op, CallOp):
            found[op.target.data] = None
        else:
            queue += [o for o in op.operands if o not in seen]
            seen.update(op.operands)
    return list(found)
