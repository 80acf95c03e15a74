"""Finds out how collate pads: on which side and by what value, by comparing each sample's rows in a batch
with the sample collated alone.

The comparison also shows that the samples of a batch are in order and independent of each other; edges
between sections and micro-batches rely on both. Integers may depend on other samples if other keys show
the order of their rows (offsets do, too), or if each sample's are those of the sample alone plus one number:
the index of an image in a packed batch, the ends of a graph's edges and the patches that a token pools change
with the batch, and collate computes them for each micro-batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from secc.errors import UserError
from secc.frontend.dataset.dim_rules import DimRules
from secc.runtime.plan.schema import COUNTING_FILL, MAX_PAD_ROW, REPEATING_FILL, PadFill

CollatedBatch = Mapping[str, Any]
KeyPads = tuple[tuple[int, str, PadFill], ...]
DimSides = tuple[str, ...]

PAD_SIDES = ("right", "left")

_UNORDERED_REMEDY = (
    "keep the samples in order, and let nothing of a sample depend on the others or on chance (random masks"
    " belong into dataset(), where each sample has a seed)"
)
_NUMBERS_REMEDY = (
    "; if these are numbers of samples or rows, return another key with as many rows, such as the length of "
    "each, which shows their order"
)
_GROUPED_REMEDY = (
    "let the {rows} rows of a sample follow each other, `[s[key] for s in samples for key in (…)]` in place"
    " of one list behind the other, and take them apart in forward by `x.view(-1, {rows}, …).unbind(1)` in"
    " place of `x.chunk({rows})`"
)


class PaddingEvidence:
    """Evidence for one key: the sides, for its width dims together, that explain all samples seen so far,
    and the fill values per (dim, side)."""

    def __init__(
        self, key: str, row_dim: int, width_dims: Sequence[int], constant_dims: Sequence[int] = ()
    ) -> None:
        self.key, self.row_dim, self.width_dims = key, row_dim, tuple(width_dims)
        self.sides: list[DimSides] = list(itertools.product(PAD_SIDES, repeat=len(self.width_dims)))
        self.fills: dict[tuple[int, str], set[float]] = {}
        self.counts = dict.fromkeys(self.width_dims, True)  # whether padding goes on counting, on the right
        self.repeats = {(d, side): True for d in self.width_dims for side in PAD_SIDES}
        self.constant_dims = tuple(constant_dims)
        self.rows: dict[tuple[int, str], set[tuple[float, ...]]] = {}  # over the constant dims
        # Whether each sample's entries are its own plus one number, which does not fall from one sample to
        # the next, and whether some sample has unlike entries, which show it.
        self.shifted, self.shows_shift = True, False

    def compare_batch(self, batch: CollatedBatch, singles: Sequence[CollatedBatch]) -> bool:
        """Learns from a batch and its samples collated alone; returns whether some sides still explain
        every sample."""
        offset, shift = 0, 0
        for single in singles:
            if self.key in single:
                part = single[self.key]
                rows = batch[self.key].narrow(self.row_dim, offset, part.shape[self.row_dim])
                found = _shift_of(rows, part) if self.shifted else None
                self.shifted = found is not None and found >= shift
                shift = shift if found is None else found
                self.shows_shift |= found is not None and len(part.unique()) > 1
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
                self.fills.setdefault((dim, side), set()).update(_values_of(outside))
                if self.repeats[dim, side]:
                    self.repeats[dim, side] = _repeats_nearest(rows, outside, dim, side, part.shape[dim])
                if side == "right" and self.counts[dim]:
                    self.counts[dim] = _goes_on_counting(rows, dim, part.shape[dim])
                self.rows.setdefault((dim, side), set()).update(self._padded_rows(outside))

    def _padded_rows(self, outside: torch.Tensor) -> list[tuple[float, ...]]:
        """Returns up to two different rows of padding, each over all constant dims; none of large rows."""
        extents = [outside.shape[d] for d in self.constant_dims]
        if not extents or math.prod(extents) > MAX_PAD_ROW or outside.is_complex():
            return []
        others = [d for d in range(outside.ndim) if d not in self.constant_dims]
        rows = outside.permute(*others, *self.constant_dims).reshape(-1, math.prod(extents)).unique(dim=0)
        return [tuple(map(float, row)) for row in rows[:2].tolist()]

    def _narrow_to_sample(self, rows: torch.Tensor, part: torch.Tensor, sides: DimSides) -> torch.Tensor:
        """Cuts the sample's own extent out of its padded rows."""
        for dim, side in zip(self.width_dims, sides, strict=True):
            extent = part.shape[dim]
            rows = rows.narrow(dim, rows.shape[dim] - extent if side == "left" else 0, extent)
        return rows

    def choose_pads(self, preferred: Mapping[int, str]) -> KeyPads:
        """Returns (dim, side, fill) of each width dim that is filled with one value or one row. `preferred`
        decides where both sides fit."""
        wanted = tuple(preferred.get(d, "right") for d in self.width_dims)
        sides = wanted if wanted in self.sides else self.sides[0]
        chosen = zip(self.width_dims, sides, strict=True)
        pads = [(d, side, self._fill_of(d, side)) for d, side in chosen]
        return tuple((d, side, fill) for d, side, fill in pads if fill is not None)

    def _fill_of(self, dim: int, side: str) -> PadFill | None:
        """Returns the one value, or else the one row, that padding of a dim has, or what it goes on with;
        None if it varies otherwise."""
        values, rows = self.fills.get((dim, side), set()), self.rows.get((dim, side), set())
        if len(values) == 1:
            return min(values)
        if len(rows) == 1:
            return min(rows)
        if values and self.repeats[dim, side]:
            return REPEATING_FILL
        return COUNTING_FILL if side == "right" and values and self.counts[dim] else None


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
    grouped: dict[str, int] = {}
    offsets = _find_offsets(extents)
    for batch, singles in collated:
        offsets = {k: rows for k, rows in offsets.items() if _adds_up_lengths(k, batch, singles)}
        for key, own in evidence.items():
            if key in batch and not own.compare_batch(batch, singles):
                inconsistent[key] = batch[key].dtype
                if rows := _count_grouped_rows(key, extents, batch, singles):
                    grouped[key] = rows
    ordered = {extents.dims_of(p.key)[p.row_dim] for p in evidence.values() if p.key not in inconsistent}
    ordered.update(offsets.values())
    for key, dtype in inconsistent.items():
        own = evidence.pop(key)
        in_order = (own.shifted and own.shows_shift) or extents.dims_of(key)[own.row_dim] in ordered
        if dtype.is_floating_point or not in_order:
            if key in grouped:
                raise UserError(
                    f"collate() puts the first rows of all samples of {key!r} before their second rows",
                    where,
                    _GROUPED_REMEDY.format(rows=grouped[key]),
                )
            raise UserError(
                f"collate() of several samples gives {key!r} of other rows than of each sample alone",
                where,
                _UNORDERED_REMEDY + ("" if dtype.is_floating_point or not own.shifted else _NUMBERS_REMEDY),
            )
    known_sides = _known_sides(extents, evidence.values())
    preferred = {
        key: {d: known_sides[t] for d, t in enumerate(extents.dims_of(key)) if t in known_sides}
        for key in evidence
    }
    return {key: padding.choose_pads(preferred[key]) for key, padding in evidence.items()}


def _count_grouped_rows(
    key: str, extents: DimRules, batch: CollatedBatch, singles: Sequence[CollatedBatch]
) -> int:
    """Returns how many rows each sample has, if a batch holds the first rows of all samples, then their
    second rows, and so on, as `chosen + rejected`; 0 otherwise."""
    own = _start_evidence(key, extents)
    counts = {single[key].shape[own.row_dim] if own and key in single else 0 for single in singles}
    if own is None or len(counts) != 1 or (rows := counts.pop()) < 2:
        return 0
    order = torch.arange(rows * len(singles)).view(rows, -1).T.flatten()
    if batch[key].shape[own.row_dim] != len(order):
        return 0
    reordered = batch[key].index_select(own.row_dim, order)
    return rows if own.compare_batch({**batch, key: reordered}, singles) else 0


def _find_offsets(extents: DimRules) -> dict[str, str]:
    """Returns the keys of one dim with one entry more than there are rows of a kind, and the size of these
    rows."""
    sizes = {f"{s.name} + 1": s.name for s in extents.symbols if s.kind == "rows"}
    dims_of_keys = {key: extents.dims_of(key) for key, _ in extents.kinds}
    return {key: sizes[dims[0]] for key, dims in dims_of_keys.items() if len(dims) == 1 and dims[0] in sizes}


def _adds_up_lengths(key: str, batch: CollatedBatch, singles: Sequence[CollatedBatch]) -> bool:
    """Whether the offsets of a batch add up the lengths of its samples in order."""
    if key not in batch:
        return True
    lengths = torch.cat([single[key].diff() for single in singles if key in single])
    return not batch[key].is_floating_point() and torch.equal(batch[key].diff(), lengths)


def _start_evidence(key: str, extents: DimRules) -> PaddingEvidence | None:
    """Returns empty evidence for a key with exactly one dim of rows; None for any other key (a mask
    between all tokens of a packed batch has no rows of a sample)."""
    kinds = [extents.kinds[key, d] for d in range(len(extents.dims_of(key)))]
    if kinds.count("rows") != 1 or "derived" in kinds:
        return None
    widths, constants = ([d for d, kind in enumerate(kinds) if kind == k] for k in ("width", "constant"))
    return PaddingEvidence(key, kinds.index("rows"), widths, constants)


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


def _values_of(padding: torch.Tensor) -> list[float]:
    """Returns up to two different values. No complex number but zero is a fill, so others count as two."""
    if padding.is_complex():
        return [0.0, 1.0] if padding.any() else [0.0]
    return [float(v) for v in padding.unique().tolist()[:2]]


def _repeats_nearest(rows: torch.Tensor, outside: torch.Tensor, dim: int, side: str, size: int) -> bool:
    """Whether the padding `outside` of a dim repeats the nearest of the `size` entries that are none."""
    if not size:
        return False
    nearest = rows.shape[dim] - size if side == "left" else size - 1
    return torch.equal(outside, rows.narrow(dim, nearest, 1).expand_as(outside))


def _goes_on_counting(rows: torch.Tensor, dim: int, size: int) -> bool:
    """Whether entries of a dim from `size` on, of integers, are each one more than the entry before."""
    if not size or rows.dtype == torch.bool or rows.is_floating_point() or rows.is_complex():
        return False
    return bool((rows.narrow(dim, size - 1, rows.shape[dim] - size + 1).diff(dim=dim) == 1).all())


def _shift_of(rows: torch.Tensor, part: torch.Tensor) -> int | None:
    """The number by which integers are larger than those of `part`; None if it is not one for all, or if they
    are no integers. Negative ones that stay as they are mark places without an index."""
    if rows.shape != part.shape or rows.dtype == torch.bool or rows.is_floating_point() or rows.is_complex():
        return None
    marked = (part < 0) & (rows == part)
    shifts = (rows - part)[~marked].unique().tolist()
    return (shifts or [0])[0] if len(shifts) < 2 else None


def _is_same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or (
        a.is_floating_point() and torch.allclose(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)
    )
