"""How collate pads: on which side and with what, found by comparing each sample's rows in a batch with the
sample collated alone.

The same comparison shows that the samples of a batch are in order and that nothing of a sample depends on its
neighbours; edges between sections and micro-batches rely on both. Integers may depend on them where other
keys show the order of their rows: the number of an image in a packed batch is another one in another batch,
and collate makes it anew for each micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from secc.errors import UserError
from secc.frontend.dataset.dim_rules import DimRules

CollatedBatch = Mapping[str, Any]
KeyPads = tuple[tuple[int, str, float], ...]
DimSides = tuple[str, ...]

PAD_SIDES = ("right", "left")


class PaddingEvidence:
    """The evidence for one key: `sides` that explain all samples seen, for its width dims together, and what
    fills the rest."""

    def __init__(self, key: str, row_dim: int, width_dims: Sequence[int]) -> None:
        self.key, self.row_dim, self.width_dims = key, row_dim, tuple(width_dims)
        self.sides: list[DimSides] = list(itertools.product(PAD_SIDES, repeat=len(self.width_dims)))
        self.fills: dict[tuple[int, str], set[float]] = {}

    def compare_batch(self, batch: CollatedBatch, singles: Sequence[CollatedBatch]) -> bool:
        """Learn from a batch and its samples collated alone; whether some sides still explain every
        sample."""
        offset = 0
        for single in singles:
            if self.key in single:
                part = single[self.key]
                rows = batch[self.key].narrow(self.row_dim, offset, part.shape[self.row_dim])
                self._compare_rows(rows, part)
                offset += part.shape[self.row_dim]
        return bool(self.sides)

    def _compare_rows(self, rows: torch.Tensor, part: torch.Tensor) -> None:
        if rows.ndim != part.ndim or any(rows.shape[d] < part.shape[d] for d in self.width_dims):
            self.sides = []
            return
        self.sides = [
            sides for sides in self.sides if _is_same_tensor(self._narrow_to_sample(rows, part, sides), part)
        ]
        for dim, side in itertools.product(self.width_dims, PAD_SIDES):
            missing = rows.shape[dim] - part.shape[dim]
            if missing and rows.numel():
                outside = rows.narrow(dim, 0 if side == "left" else part.shape[dim], missing)
                self.fills.setdefault((dim, side), set()).update(
                    float(v) for v in outside.unique().tolist()[:2]
                )

    def _narrow_to_sample(self, rows: torch.Tensor, part: torch.Tensor, sides: DimSides) -> torch.Tensor:
        """The sample's own extent in its padded rows."""
        for dim, side in zip(self.width_dims, sides, strict=True):
            extent = part.shape[dim]
            rows = rows.narrow(dim, rows.shape[dim] - extent if side == "left" else 0, extent)
        return rows

    def choose_pads(self, preferred: Mapping[int, str]) -> KeyPads:
        """(dim, side, value) of each width dim that is filled with one value; `preferred` decides where both
        sides fit."""
        liked = tuple(preferred.get(d, "right") for d in self.width_dims)
        sides = liked if liked in self.sides else self.sides[0]
        values = {d: self.fills.get((d, side), set()) for d, side in zip(self.width_dims, sides, strict=True)}
        return tuple(
            (d, side, min(values[d]))
            for d, side in zip(self.width_dims, sides, strict=True)
            if len(values[d]) == 1
        )


def find_pads(
    extents: DimRules, collated: Iterable[tuple[CollatedBatch, Sequence[CollatedBatch]]], where: str
) -> dict[str, KeyPads]:
    """The pads of every key that has padded widths, from batches and their samples collated alone.

    Raises UserError for a key whose rows are not those of the samples in order.
    """
    found = {
        p.key: p for key in dict.fromkeys(k for k, _ in extents.kinds) if (p := _start_evidence(key, extents))
    }
    others: dict[str, torch.dtype] = {}
    for batch, singles in collated:
        others |= {
            p.key: batch[p.key].dtype
            for p in found.values()
            if p.key in batch and not p.compare_batch(batch, singles)
        }
    kept = {extents.dims_of(p.key)[p.row_dim] for p in found.values() if p.key not in others}
    for key, dtype in others.items():
        if dtype.is_floating_point or extents.dims_of(key)[found.pop(key).row_dim] not in kept:
            raise UserError(
                f"collate() of several samples gives {key!r} of other rows than of each sample alone",
                where,
                "keep the samples in order, and let nothing of a sample depend on the others or on chance",
            )
    known = _known_sides(extents, found.values())
    prefer = {key: {d: known[t] for d, t in enumerate(extents.dims_of(key)) if t in known} for key in found}
    return {key: padding.choose_pads(prefer[key]) for key, padding in found.items()}


def _start_evidence(key: str, extents: DimRules) -> PaddingEvidence | None:
    """A key to compare: one with exactly one dim of rows. Others (a mask between all tokens of a packed
    batch) have no rows of a sample."""
    kinds = [extents.kinds[key, d] for d in range(len(extents.dims_of(key)))]
    if kinds.count("rows") != 1 or "derived" in kinds:
        return None
    return PaddingEvidence(key, kinds.index("rows"), [d for d, kind in enumerate(kinds) if kind == "width"])


def _known_sides(extents: DimRules, paddings: Iterable[PaddingEvidence]) -> dict[str, str]:
    """The side of each width that some key's content decides: keys that are all alike, such as masks of ones,
    do not."""
    known: dict[str, str] = {}
    for padding in paddings:
        for n, dim in enumerate(padding.width_dims):
            sides = {s[n] for s in padding.sides}
            if len(sides) == 1:
                known.setdefault(extents.expressions[padding.key, dim], sides.pop())
    return known


def _is_same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or (
        a.is_floating_point() and torch.allclose(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)
    )
