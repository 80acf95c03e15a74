"""What is known about a value while a loss is walked: whether a micro-batch computes it as the whole batch
would, and if not, as which sum.

`Local`   any micro-batch computes its own rows of the value exactly (or the whole value, where it depends on
no sample). `Sum`     the value is a sum of parts, coefficient times atom; atoms are computed by
micro-batches. `Stack`   several scalars in one tensor, each with a state of its own. `Bad`     the value
mixes samples in a way that no sum over samples can express; an error only if the loss needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from xdsl.ir import Operation, SSAValue

from secc.ir.dialect.ops import Computation
from secc.passes.loss.coefficient import Coefficient


@dataclass(frozen=True)
class Part:
    """`coefficient * atom`. The atom is None for a plain coefficient; `summed` if it is a sum over samples,
    made by `origin`."""

    coefficient: Coefficient
    atom: SSAValue | None = None
    summed: bool = False
    origin: Computation | None = None

    def scaled(self, coefficient: Coefficient) -> Part:
        return replace(self, coefficient=self.coefficient * coefficient)

    def moved(self, atom: SSAValue) -> Part:
        return replace(self, atom=atom)


@dataclass(frozen=True)
class Local:
    """Exact in any micro-batch. `parts`, where there are any, say the same with widths of the whole batch
    taken out."""

    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Sum:
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Stack:
    items: tuple[State, ...]


@dataclass(frozen=True)
class Bad:
    """Why a value cannot be computed from micro-batches, the op that makes it so, and what the user can
    do."""

    message: str
    op: Operation
    remedy: str


State = Local | Sum | Stack | Bad
LOCAL = Local()
