"""Approximations that a user may accept by name, where a loss cannot be computed from micro-batches.

`balance-loss`: the balance loss of a mixture of experts is a product, or another function, of statistics over
the batch, one for each expert. Accepted, each micro-batch computes it from its own samples, and counts by
their share of the global batch's.
"""

from __future__ import annotations

from collections.abc import Iterable

from xdsl.ir import Operation

from secc.errors import UserError
from secc.ir.dialect.ops import CallOp, Computation
from secc.ir.dialect.tensor_type import tensor
from secc.ir.text_io.verifier import where
from secc.passes.loss.loss_context import REMEDY, Context, one_entry
from secc.passes.loss.value_states import LOCAL, State

BALANCE = "balance-loss"
NAMES = (BALANCE,)
_OFFER = f"; if it is the balance loss of a mixture of experts, --accept {BALANCE} computes it for each micro-batch alone"


def check(names: Iterable[str]) -> None:
    """Raise UserError for a name that stands for no approximation."""
    for name in names:
        if name not in NAMES:
            raise UserError(
                f"there is no approximation {name!r} to accept", remedy=f"accept {' or '.join(NAMES)}"
            )


def balance(ctx: Context, op: Computation, why: str, remedy: str = REMEDY) -> State:
    """The state of what `op` makes of statistics over the batch: bad, unless it is one of several experts and
    the user accepts it."""
    if not (isinstance(op, CallOp) or _of_statistics(ctx, op)):
        return ctx.bad(op, why, remedy)
    if BALANCE not in ctx.accept:
        return ctx.bad(op, why, remedy + _OFFER)
    ctx.accepted.add(op)
    return LOCAL


def note(op: Operation) -> str:
    """What a plan says of an op whose result micro-batches compute alone."""
    target = op.properties["target"]
    name = getattr(target, "data", op.name)
    return f"{BALANCE}: {name}{f' at {where(op)}' if where(op) else ''} is computed for each micro-batch alone, weighted by its samples"


def _of_statistics(ctx: Context, op: Computation) -> bool:
    """Whether an op takes sums over samples that were several numbers when they were made: one for each
    expert."""
    parts = [p for o in op.operands if not ctx.plain(o) for p in ctx.parts(o) or ()]
    made = [r for p in parts if p.origin is not None for r in p.origin.results[:1]]
    return any(not one_entry(tensor(r)) and not ctx.carries(r) for r in made)
