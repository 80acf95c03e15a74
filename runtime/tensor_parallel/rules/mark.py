"""Marks on tensors, which say which part of a whole tensor this rank holds, and the error for code that
cannot run on parts.

`shape_mode` runs code written for whole tensors on marked ones; `rules` defines what each function does to
marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from secc.runtime.plan.unsplit_reason import UnsplitReason

_MARK_ATTRIBUTE = "_secc_mark"


@dataclass(frozen=True)
class ShardMark:
    """This tensor is a rank's part of a whole one along `dim`. The whole one has `parts` entries side by side
    (queries, keys and values of a fused projection), and each rank has its share of each part.

    `sources`: the modules that the values come from; used while a mapping is searched.
    """

    dim: int
    parts: tuple[int, ...]
    sources: frozenset[str] = frozenset()

    @property
    def whole_size(self) -> int:
        """The size of the whole tensor along `dim`."""
        return sum(self.parts)

    def at_dim(self, dim: int, parts: Sequence[int] | None = None) -> ShardMark:
        """Returns the mark for another dim, and for other parts if given."""
        return replace(self, dim=dim, parts=self.parts if parts is None else tuple(parts))


class UnshardableCode(Exception):
    """Raised by code that cannot run on parts. `reason`: why; `sources`: the modules that produced the parts.

    `split_points`: positions, as (numerator, denominator) fractions of the sources' outputs, at which these
    would have to be split into parts for the code to work.
    """

    def __init__(
        self, reason: UnsplitReason, sources: frozenset[str], edges: tuple[tuple[int, int], ...] = ()
    ) -> None:
        super().__init__(str(reason))
        self.reason, self.sources, self.split_points = reason, sources, edges


def mark_of(value: Any) -> ShardMark | None:
    """Returns the mark of a tensor, None for anything else."""
    return getattr(value, _MARK_ATTRIBUTE, None) if isinstance(value, torch.Tensor) else None


def set_mark(value: Any, mark: ShardMark | None) -> Any:
    """Sets the mark of a tensor, or removes it (None); returns `value`."""
    if isinstance(value, torch.Tensor) and (mark is not None or hasattr(value, _MARK_ATTRIBUTE)):
        setattr(value, _MARK_ATTRIBUTE, mark)
    return value


def collect_marks(values: Any) -> list[ShardMark]:
    """Returns the marks of all tensors in nested values."""
    return [m for m in map(mark_of, tree_leaves(values)) if m is not None]


def sources_of(marks: Sequence[ShardMark]) -> frozenset[str]:
    """Returns all modules that marked values come from."""
    return frozenset[str]().union(*(m.sources for m in marks))
