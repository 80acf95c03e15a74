"""Marks on tensors: which part of a whole tensor this rank has, and the refusal of code that parts cannot run.

`shape_mode` runs code written for whole tensors on marked ones; `rules` says what each function does to marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_ATTRIBUTE = "_secc_mark"


@dataclass(frozen=True)
class Mark:
    """A tensor is this rank's part of a whole one along `dim`, where the whole one has `parts` entries side
    by side.

    `sources`: the modules that its values come from, while a mapping is sought.
    """

    dim: int
    parts: tuple[int, ...]
    sources: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """The entries of the whole tensor along `dim`."""
        return sum(self.parts)

    def at(self, dim: int, parts: Sequence[int] | None = None) -> Mark:
        """The mark on another dim."""
        return replace(self, dim=dim, parts=self.parts if parts is None else tuple(parts))


class Refused(Exception):
    """Code that cannot run on parts: why, and the modules whose outputs it was given parts of.

    `edges` are the places, as fractions of the outputs, at which those would have to be cut into parts for
    the code to go on.
    """

    def __init__(self, reason: str, sources: frozenset[str], edges: tuple[tuple[int, int], ...] = ()) -> None:
        super().__init__(reason)
        self.reason, self.sources, self.edges = reason, sources, edges


def mark(value: Any) -> Mark | None:
    """The mark of a tensor, None for anything else."""
    return getattr(value, _ATTRIBUTE, None) if isinstance(value, torch.Tensor) else None


def set_mark(value: Any, found: Mark | None) -> Any:
    """`value` with a mark."""
    if isinstance(value, torch.Tensor) and (found is not None or hasattr(value, _ATTRIBUTE)):
        setattr(value, _ATTRIBUTE, found)
    return value


def marks_in(values: Any) -> list[Mark]:
    """The marks of the tensors in nested values."""
    return [m for m in map(mark, tree_leaves(values)) if m is not None]


def sources_of(marks: Sequence[Mark]) -> frozenset[str]:
    """All modules that marked values come from."""
    return frozenset[str]().union(*(m.sources for m in marks))
