"""Encodes what all ranks must know of every sample before a step, as rows of integers that one all-gather
carries.

A row holds the sample's dataset index, its number of tokens, its pattern as bits over the plan's optional
inputs, its symbols, and the bits of its float64 summands of batch-wide sums. Nothing is pickled, and every
rank decodes the same numbers. Each sample was collated alone, so its sizes are its own. A sample that is left
out has a negative index.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from secc.runtime.errors import UserError
from secc.runtime.plan.batch_sizes import read_symbol_sizes
from secc.runtime.plan.expr_eval import divides_exactly, evaluate_expr
from secc.runtime.plan.schema import Input, Plan
from secc.runtime.plan.step_program import SampleMeta

BatchSumFunction = Callable[[Mapping[str, Any]], Any]
# An op that puts rows in the places of a mask, its source line, and a function that counts places and rows of
# a sample, given its batch and its sizes.
PlacedRows = tuple[str, str, Callable[[Mapping[str, Any], Mapping[str, int]], tuple[int, int]]]
PATTERN_BITS_PER_WORD = 62
IGNORED_LABEL = -100  # PyTorch's default ignore_index
RECOMPILE_REMEDY = "compile the model again, so that the plan knows such samples"


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """A sample's metadata, the number of its labels that count, and its summands of the batch-wide sums."""

    meta: SampleMeta
    tokens: int
    sample_sums: tuple[float, ...]


class SkippedSample(NamedTuple):
    """A sample that is left out of its global batch. `error` is None on ranks that did not try to load it."""

    index: int
    error: UserError | None = None


class RecordCodec:
    """Makes records of samples, and encodes them as rows of `width` integers."""

    def __init__(
        self,
        plan: Plan,
        leaves: Mapping[str, BatchSumFunction],
        sample_name: Callable[[int], str] = "dataset()[{}]".format,
        placed_rows: Sequence[PlacedRows] = (),
    ) -> None:
        self.plan, self.sum_functions, self._sample_name = plan, dict(leaves), sample_name
        self._placed_rows = placed_rows
        self._inputs = {i.key: i for i in plan.inputs}
        self._optional = sorted(i.key for i in plan.inputs if i.optional)
        self._pattern_words = -(-len(self._optional) // PATTERN_BITS_PER_WORD)
        self.width = 2 + self._pattern_words + len(plan.symbols) + len(self.sum_functions)

    def make_record(self, index: int, batch: Mapping[str, Any]) -> SampleRecord:
        """Return the record of dataset sample `index`, which was collated alone. Raises UserError if its
        inputs, dtypes or shapes differ from those of the samples that the plan was made from."""
        self._compare_keys(index, batch)
        sizes = read_symbol_sizes(batch, self.plan.symbols)
        self._compare_shapes(index, batch, sizes)
        self._compare_rows(index, sizes)
        check_placed_rows(self._placed_rows, self._sample_name(index), batch, sizes)
        pattern = frozenset(key for key in self._optional if key in batch)
        with torch.no_grad():
            leaves = compute_batch_sums(self.sum_functions, batch)
        return SampleRecord(SampleMeta(index, pattern, sizes), self._count_tokens(batch), leaves)

    def pack_records(self, records: Sequence[SampleRecord | SkippedSample]) -> torch.Tensor:
        """Encode records as rows [len(records), width], int64."""
        rows = [self._encode_record(record) for record in records]
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), self.width)

    def unpack_records(self, rows: torch.Tensor) -> list[SampleRecord | SkippedSample]:
        """Decode rows [n, width] into records."""
        return [self._decode_row(row) for row in rows.tolist()]

    def _encode_record(self, record: SampleRecord | SkippedSample) -> list[int]:
        if isinstance(record, SkippedSample):
            return [-1 - record.index] + [0] * (self.width - 1)
        bits = sum(1 << i for i, key in enumerate(self._optional) if key in record.meta.pattern)
        words = [
            bits >> (PATTERN_BITS_PER_WORD * w) & (1 << PATTERN_BITS_PER_WORD) - 1
            for w in range(self._pattern_words)
        ]
        sizes = [record.meta.sizes[s.name] for s in self.plan.symbols]
        leaves = struct.unpack(
            f"<{len(record.sample_sums)}q", struct.pack(f"<{len(record.sample_sums)}d", *record.sample_sums)
        )
        return [record.meta.id, record.tokens, *words, *sizes, *leaves]

    def _decode_row(self, row: list[int]) -> SampleRecord | SkippedSample:
        index, tokens, *rest = row
        if index < 0:
            return SkippedSample(-1 - index)
        words, sizes, leaves = (
            rest[: self._pattern_words],
            rest[self._pattern_words :],
            rest[self._pattern_words + len(self.plan.symbols) :],
        )
        bits = sum(word << (PATTERN_BITS_PER_WORD * w) for w, word in enumerate(words))
        pattern = frozenset(key for i, key in enumerate(self._optional) if bits >> i & 1)
        values = struct.unpack(f"<{len(leaves)}d", struct.pack(f"<{len(leaves)}q", *leaves))
        return SampleRecord(
            SampleMeta(index, pattern, dict(zip((s.name for s in self.plan.symbols), sizes, strict=False))),
            tokens,
            values,
        )

    def _count_tokens(self, batch: Mapping[str, Any]) -> int:
        """Number of labels that count. Without labels, entries of the first input of integers, such as token
        ids; 0 if there is none: pixels are no tokens."""
        if not self.plan.labels_key:
            ids = next((i.key for i in self.plan.inputs if i.dtype.startswith("int") and len(i.dims) > 1), "")
            return batch[ids].numel() if ids in batch else 0
        labels = batch.get(self.plan.labels_key)
        return 0 if labels is None else int((labels != IGNORED_LABEL).sum())

    def _compare_keys(self, index: int, batch: Mapping[str, Any]) -> None:
        """Raise UserError for unknown and missing inputs, and for inputs that are no tensors of the
        planned rank."""
        for key, value in batch.items():
            if isinstance(value, torch.Tensor) and key not in self._inputs:
                raise UserError(
                    f"{self._sample_name(index)} has the input {key!r}, which no sample had for the plan",
                    remedy=RECOMPILE_REMEDY,
                )
        for key, planned in self._inputs.items():
            if key not in batch and not planned.optional:
                raise UserError(
                    f"{self._sample_name(index)} lacks the input {key!r}, which every sample had for the"
                    " plan",
                    remedy=RECOMPILE_REMEDY,
                )
            value = batch.get(key)
            if key in batch and not (isinstance(value, torch.Tensor) and value.ndim == len(planned.dims)):
                raise _input_mismatch_error(self._sample_name(index), planned, value)

    def _compare_shapes(self, index: int, batch: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Raise UserError for dtypes and dims that differ from the plan's. Later they would fail, or give
        wrong results silently."""
        for key in self._inputs.keys() & batch.keys():
            planned, value = self._inputs[key], batch[key]
            dtype, shape = (
                getattr(torch, planned.dtype),
                tuple(evaluate_expr(text, sizes) for text in planned.dims),
            )
            if value.dtype != dtype or tuple(value.shape) != shape:
                raise _input_mismatch_error(self._sample_name(index), planned, value)

    def _compare_rows(self, index: int, sizes: Mapping[str, int]) -> None:
        """Raise UserError if the sample's rows of an edge are not a whole number. Where a model joins
        several positions into one, part of its neighbour would be mixed in."""
        for edge in self.plan.edges:
            if not divides_exactly(edge.rows, sizes):
                message = (
                    f"{self._sample_name(index)} does not have a whole number of rows of {edge.name!r}: "
                    f"{edge.rows} is no integer for it"
                )
                raise UserError(
                    message, remedy="pad each sample to a multiple, or compile with --max-sections 1"
                )


def find_placed_rows(terms: Any) -> Sequence[PlacedRows]:
    """Return the conditions on numbers of rows of a plan's module `sections/terms.py`."""
    return getattr(terms, "PLACED_ROWS", ())


def check_placed_rows(
    placed_rows: Sequence[PlacedRows], sample: str, batch: Mapping[str, Any], sizes: Mapping[str, int]
) -> None:
    """Raise UserError if a sample has another number of places than of rows for them: in a batch, its rows or
    those of samples behind it would get places of other samples. `batch` is the sample collated alone."""
    for op, where, count in placed_rows:
        try:
            places, rows = count(batch, sizes)
        except KeyError:  # the sample lacks the input that the mask is made from
            continue
        if places != rows:
            name = op.removeprefix("aten.").partition(".")[0]
            raise UserError(
                f"{sample}: the mask of {name} has {places} places for the sample's {rows} rows, so that"
                " samples of a batch would get rows of others",
                where,
                "let each sample have as many places (such as tokens that stand for an image) as rows",
            )


def _input_mismatch_error(sample: str, expected: Input, value: Any) -> UserError:
    received = (
        f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, torch.Tensor)
        else "no tensor"
    )
    planned = f"{expected.dtype}[{', '.join(expected.dims)}]"
    return UserError(
        f"input {expected.key!r} of {sample} is {received}, but the plan has {planned}",
        remedy=RECOMPILE_REMEDY,
    )


def compute_batch_sums(leaves: Mapping[str, BatchSumFunction], batch: Mapping[str, Any]) -> tuple[float, ...]:
    """Evaluate each function of batch-wide sums on a batch."""
    return tuple(_compute_batch_sum(leaf, batch) for leaf in leaves.values())


def _compute_batch_sum(leaf: BatchSumFunction, batch: Mapping[str, Any]) -> float:
    """Evaluate one function; 0 if the batch lacks an input that it reads."""
    try:
        return float(leaf(batch))
    except KeyError:
        return 0.0
