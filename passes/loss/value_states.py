"""What is known about a value while a loss is followed: whether a micro-batch computes it as the whole batch
would, and if not, as which sum.

`LocalState`   any micro-batch computes its own rows of the value exactly (or the whole value, if it depends
on no sample).
`SumState`     the value is a sum of parts, coefficient times atom; micro-batches compute the atoms.
`StackState`   several scalars in one tensor, each with a state of its own.
`BadState`     the value mixes samples in a way that no sum over samples expresses; an error only if the loss
needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from xdsl.ir import Operation, SSAValue

from secc.ir.dialect.ops import Computation, GlueOp
from secc.passes.loss.coefficient import Coefficient


class StatisticUse(Enum):
    """Which sums over the global batch ops that are not linear may read: none, those of several numbers (one
    for each expert, as balance losses have), or all."""

    NONE = "none"
    SEVERAL_NUMBERS = "several numbers"
    ALL = "all"


@dataclass(frozen=True)
class SumPart:
    """`coefficient * atom`. The atom is None for a plain coefficient. `summed`: it is a sum over samples,
    computed by `origin`."""

    coefficient: Coefficient
    atom: SSAValue | None = None
    summed: bool = False
    origin: Computation | None = None

    def scale_by(self, coefficient: Coefficient) -> SumPart:
        return replace(self, coefficient=self.coefficient * coefficient)

    def with_atom(self, atom: SSAValue) -> SumPart:
        return replace(self, atom=atom)


@dataclass(frozen=True)
class ReadStatistic:
    """A sum over the global batch that glue reads (`batch_statistics`): `coefficient` times the sum of
    `numerator` over micro-batches. op: the glue; it gets its name when
    terms get theirs. part: the part of the loss that the sum comes from."""

    op: GlueOp
    part: SumPart
    numerator: SSAValue
    coefficient: Coefficient


@dataclass(frozen=True)
class PickedEntries:
    """Entries of a short vector of coefficients, one for each row by its label: `(1 / counts)[labels]`."""

    labels: SSAValue
    coefficients: tuple[Coefficient, ...]


@dataclass(frozen=True)
class GatheredRows:
    """Rows of all samples that glue reads (`gathered_rows`). op: the glue; it gets its name when terms get
    theirs. rows: the micro-batch's own, one for each sample. blocks: where they come from."""

    op: GlueOp
    rows: SSAValue
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class LocalState:
    """Exact in any micro-batch. `parts`, if any, is the same value with widths of the whole batch factored
    out."""

    parts: tuple[SumPart, ...] = ()


@dataclass(frozen=True)
class SumState:
    parts: tuple[SumPart, ...]


@dataclass(frozen=True)
class StackState:
    items: tuple[ValueState, ...]


@dataclass(frozen=True)
class BadState:
    """A value that cannot be computed from micro-batches: why, the op that mixes samples, and what the user
    can do."""

    reason: str
    op: Operation
    remedy: str

    @property
    def message(self) -> str:
        """The error message for a loss that needs the value."""
        return f"the loss is not separable by sample: {self.reason}"


ValueState = LocalState | SumState | StackState | BadState
LOCAL_STATE = LocalState()
