"""Marks on tensors: which part of a whole tensor this rank has, and the refusal of code that parts cannot run.

`shape_mode` runs code written for whole tensors on marked ones; `rules` says what each function does to marks.
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
    """A tensor is this rank's part of a whole one along `dim`, where the whole one has `parts` entries side
    by side.

    `sources`: the modules that its values come from, while a mapping is sought.
    """

    dim: int
    parts: tuple[int, ...]
    sources: frozenset[str] = frozenset()

    @property
    def whole_size(self) -> int:
        """The entries of the whole tensor along `dim`."""
        return sum(self.parts)

    def at_dim(self, dim: int, parts: Sequence[int] | None = None) -> ShardMark:
        """The mark on another dim."""
        return replace(self, dim=dim, parts=self.parts if parts is None else tuple(parts))


class UnshardableCode(Exception):
    """Code that cannot run on parts: why, and the modules whose outputs it was given parts of.

    `edges` are the places, as fractions of the outputs, at which those would have to be cut into parts for
    the code to go on.
    """

    def __init__(
        self, reason: UnsplitReason, sources: frozenset[str], edges: tuple[tuple[int, int], ...] = ()
    ) -> None:
        super().__init__(str(reason))
        self.reason, self.sources, self.split_points = reason, sources, edges


def mark_of(value: Any) -> ShardMark | None:
    """The mark of a tensor, None for anything else."""
    return getattr(value, _MARK_ATTRIBUTE, None) if isinstance(value, torch.Tensor) else None


def set_mark(value: Any, found: ShardMark | None) -> Any:
    """`value` with a mark."""
    if isinstance(value, torch.Tensor) and (found is not None or hasattr(value, _MARK_ATTRIBUTE)):
        setattr(value, _MARK_ATTRIBUTE, found)
    return value


def collect_marks(values: Any) -> list[ShardMark]:
    """The marks of the tensors in nested values."""
    return [m for m in map(mark_of, tree_leaves(values)) if m is not None]


def sources_of(marks: Sequence[ShardMark]) -> frozenset[str]:
    """All modules that marked values come from."""
    return frozenset[str]().union(*(m.sources for m in marks))
