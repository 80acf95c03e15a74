"""Approximations that a user may accept by name, where a loss cannot be computed exactly from micro-batches.

`balance-loss`: the load-balancing loss of a mixture of experts (Switch Transformer, Fedus et al. 2021) is a
product, or another function, of statistics over the batch, one for each expert. Accepted, each micro-batch
computes it from its own samples, weighted by their share of the global batch. The exact way, for any function
of sums, is `batch_statistics`.
"""

from __future__ import annotations

from collections.abc import Iterable

from xdsl.ir import Operation

from secc.errors import UserError
from secc.ir.dialect.ops import CallOp, Computation
from secc.ir.dialect.tensor_type import tensor_type
from secc.ir.text_io.verifier import source_line
from secc.passes.loss.batch_statistics import is_function_of_sums, reads_values_of_sums, use_batch_statistics
from secc.passes.loss.loss_context import DEFAULT_REMEDY, LossContext, has_one_entry
from secc.passes.loss.value_states import LOCAL_STATE, StatisticUse, ValueState

BALANCE_LOSS = "balance-loss"
APPROXIMATIONS = (BALANCE_LOSS,)
GLOBAL_SUMS_OFFER = (
    "; or compute it exactly from the sums of the global batch with --global-sums, for one more forward in"
    " each step"
)
_ACCEPT_OFFER = (
    f"; if it is the balance loss of a mixture of experts, --accept {BALANCE_LOSS} computes it for each"
    " micro-batch alone"
)
_BALANCE_OFFER = (
    "; if it is the balance loss of a mixture of experts, --balance-loss global computes it exactly, with"
    f" one more forward in each step, and --accept {BALANCE_LOSS} computes it for each micro-batch alone; any"
    " other function of sums over the batch is exact with --global-sums, at the same price"
)


def check_approximations(names: Iterable[str]) -> None:
    """Raises UserError for a name that is not an approximation."""
    for name in names:
        if name not in APPROXIMATIONS:
            raise UserError(
                f"unknown approximation {name!r}",
                remedy=f"accept {' or '.join(APPROXIMATIONS)}",
            )


def take_function_of_sums(
    ctx: LossContext, op: Computation, why: str, remedy: str = DEFAULT_REMEDY
) -> ValueState:
    """The state of what `op`, which is not linear, computes from sums over the batch: bad, unless the user
    chose how to compute it. Balance losses take several numbers, one for each expert, and may be computed by
    micro-batches."""
    several = isinstance(op, CallOp) or _takes_several_numbers(ctx, op)
    if ctx.statistic_use is StatisticUse.ALL or (several and ctx.statistic_use is not StatisticUse.NONE):
        return use_batch_statistics(ctx, op, why)
    is_offered = is_function_of_sums(ctx, op) or reads_values_of_sums(ctx, op)
    if not several:
        return ctx.refuse_op(op, why, remedy + (GLOBAL_SUMS_OFFER if is_offered else ""))
    if BALANCE_LOSS not in ctx.accept:
        offer = _BALANCE_OFFER if is_offered else _ACCEPT_OFFER  # sums inside a block
        return ctx.refuse_op(op, why, remedy + offer)
    ctx.accepted.add(op)
    return LOCAL_STATE


def describe_accepted(op: Operation) -> str:
    """The note in a plan for an op with a result that micro-batches compute alone."""
    target = op.properties["target"]
    name = getattr(target, "data", op.name)
    return (
        f"{BALANCE_LOSS}: {name}{f' at {source_line(op)}' if source_line(op) else ''} is computed for "
        "each micro-batch alone, weighted by its samples"
    )


def _takes_several_numbers(ctx: LossContext, op: Computation) -> bool:
    """Whether an op takes sums over samples that were several numbers when they were made: one for each
    expert."""
    parts = [p for o in op.operands if not ctx.is_plain(o) for p in ctx.parts_of(o) or ()]
    made = [r for p in parts if p.origin is not None for r in p.origin.results[:1]]
    return any(not has_one_entry(tensor_type(r)) and not ctx.carries_samples(r) for r in made)
