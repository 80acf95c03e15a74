"""Finds out how collate pads: on which side and by what value, by comparing each sample's rows in a batch
with the sample collated alone.

The comparison also shows that the samples of a batch are in order and independent of each other; edges
between sections and micro-batches rely on both. Integers may depend on other samples if other keys show
the order of their rows: the index of an image in a packed batch changes with the batch, and collate
computes it for each micro-batch.
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
    """Evidence for one key: the sides, for its width dims together, that explain all samples seen so far,
    and the fill values per (dim, side)."""

    def __init__(self, key: str, row_dim: int, width_dims: Sequence[int]) -> None:
        self.key, self.row_dim, self.width_dims = key, row_dim, tuple(width_dims)
        self.sides: list[DimSides] = list(itertools.product(PAD_SIDES, repeat=len(self.width_dims)))
        self.fills: dict[tuple[int, str], set[float]] = {}

    def compare_batch(self, batch: CollatedBatch, singles: Sequence[CollatedBatch]) -> bool:
        """Learns from a batch and its samples collated alone; returns whether some sides still explain
        every sample."""
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
        """Cuts the sample's own extent out of its padded rows."""
        for dim, side in zip(self.width_dims, sides, strict=True):
            extent = part.shape[dim]
            rows = rows.narrow(dim, rows.shape[dim] - extent if side == "left" else 0, extent)
        return rows

    def choose_pads(self, preferred: Mapping[int, str]) -> KeyPads:
        """Returns (dim, side, value) of each width dim that is filled with one value. `preferred` decides
        where both sides fit."""
        wanted = tuple(preferred.get(d, "right") for d in self.width_dims)
        sides = wanted if wanted in self.sides else self.sides[0]
        values = {d: self.fills.get((d, side), set()) for d, side in zip(self.width_dims, sides, strict=True)}
        return tuple(
            (d, side, min(values[d]))
            for d, side in zip(self.width_dims, sides, strict=True)
            if len(values[d]) == 1
        )


def find_pads(
    extents: DimRules, collated: Iterable[tuple[CollatedBatch, Sequence[CollatedBatch]]], where: str
) -> dict[str, KeyPads]:
    """Returns the pads of every key with padded widths, from batches and their samples collated alone.

    Raises UserError if the rows of a key are not the samples' rows in order.
    """
    evidence = {
        p.key: p for key in dict.fromkeys(k for k, _ in extents.kinds) if (p := _start_evidence(key, extents))
    }
    inconsistent: dict[str, torch.dtype] = {}
    for batch, singles in collated:
        inconsistent |= {
            p.key: batch[p.key].dtype
            for p in evidence.values()
            if p.key in batch and not p.compare_batch(batch, singles)
        }
    ordered = {extents.dims_of(p.key)[p.row_dim] for p in evidence.values() if p.key not in inconsistent}
    for key, dtype in inconsistent.items():
        if dtype.is_floating_point or extents.dims_of(key)[evidence.pop(key).row_dim] not in ordered:
            raise UserError(
                f"collate() of several samples gives {key!r} of other rows than of each sample alone",
                where,
                "keep the samples in order, and let nothing of a sample depend on the others or on chance",
            )
    known_sides = _known_sides(extents, evidence.values())
    preferred = {
        key: {d: known_sides[t] for d, t in enumerate(extents.dims_of(key)) if t in known_sides}
        for key in evidence
    }
    return {key: padding.choose_pads(preferred[key]) for key, padding in evidence.items()}


def _start_evidence(key: str, extents: DimRules) -> PaddingEvidence | None:
    """Returns empty evidence for a key with exactly one dim of rows; None for any other key (a mask
    between all tokens of a packed batch has no rows of a sample)."""
    kinds = [extents.kinds[key, d] for d in range(len(extents.dims_of(key)))]
    if kinds.count("rows") != 1 or "derived" in kinds:
        return None
    return PaddingEvidence(key, kinds.index("rows"), [d for d, kind in enumerate(kinds) if kind == "width"])


def _known_sides(extents: DimRules, paddings: Iterable[PaddingEvidence]) -> dict[str, str]:
    """Returns the side of each width that the contents of some key decide. Keys with equal entries only,
    such as masks of ones, decide nothing."""
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
