"""Modelled times of samples and micro-batches, and what these keep: the plan's expressions at the sizes that
they have.

All times are integer nanoseconds, so that every rank, on any CPU, decides alike. Thousands of samples are
evaluated as columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from secc.runtime.plan.batch_sizes import combine_sizes, pad_sample_sizes
from secc.runtime.plan.expr_eval import SizeColumns, evaluate_expr_columns
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.step_program import SampleMeta, owes_backward


class PredictedCosts:
    """Times of the samples of one global batch, and from position `own` on of the next one's. Where the plan
    pads to the global batch's widths, every sample has those."""

    def __init__(self, plan: Plan, samples: Sequence[SampleMeta], own: int | None = None) -> None:
        self.sample_count = len(samples)
        self._symbols = plan.symbols
        names = samples[0].sizes if samples else {s.name: 0 for s in plan.symbols}
        found = pad_sample_sizes(plan, samples, own)
        self.sample_columns = {name: [s[name] for s in found] for name in names}
        self._evaluated: dict[
            str, list[int]
        ] = {}  # what texts give for each sample: those of stages are mostly the same

    def sample_sizes(self, position: int) -> dict[str, int]:
        """The symbols of the sample at `position` as a micro-batch of its own."""
        return {name: column[position] for name, column in self.sample_columns.items()}

    def micro_batch_sizes(self, positions: Sequence[int]) -> dict[str, int]:
        """The symbols of a micro-batch of the samples at `positions`."""
        if len(positions) == 1:
            return self.sample_sizes(positions[0])
        return combine_sizes([self.sample_sizes(p) for p in positions], self._symbols)

    def sample_times(self, section: Section) -> tuple[list[int], list[int]]:
        """(forward, backward) ns of every sample as a micro-batch of its own, whether or not the section is
        active for it."""
        backward = (
            self._evaluate_for_samples(section.cost.backward_ns)
            if owes_backward(section)
            else [0] * self.sample_count
        )
        return self._evaluate_for_samples(section.cost.forward_ns), backward

    def shared_sample_times(self, section: Section) -> list[int]:
        """Forward and backward ns of every sample as its part of a full micro-batch of samples like it."""
        count = section.micro_batch
        rows = {s.name for s in self._symbols if s.kind == "rows"}
        columns = {
            name: [count * size for size in column] if name in rows else column
            for name, column in self.sample_columns.items()
        }
        forward, backward = self.times_of_columns(section, columns, self.sample_count)
        return [(f + b) // count for f, b in zip(forward, backward, strict=True)]

    def micro_batch_times(
        self, section: Section, lots: Sequence[Sequence[int]]
    ) -> tuple[list[int], list[int]]:
        """(forward, backward) ns of micro-batches, each given by its samples' positions; of an empty one what
        it takes without samples."""
        return self.times_of_columns(section, self.micro_batch_columns(lots), len(lots))

    def saved_bytes(self, section: Section, lots: Sequence[Sequence[int]]) -> list[int]:
        """Bytes that micro-batches keep from forward to backward; none where their room is not bounded."""
        if section.room_bytes and set(map(len, lots)) <= {1}:
            kept = self._evaluate_for_samples(section.cost.saved or "0")
            return [kept[p] for (p,) in lots]
        return (
            self.saved_bytes_of_columns(section, self.micro_batch_columns(lots), len(lots))
            if section.room_bytes
            else []
        )

    def saved_bytes_of_columns(self, section: Section, columns: SizeColumns, count: int) -> list[int]:
        """Bytes that are kept at `count` places, of which `columns` holds the sizes."""
        return evaluate_expr_columns(section.cost.saved or "0", columns, count)

    def micro_batch_columns(self, lots: Sequence[Sequence[int]]) -> dict[str, list[int]]:
        """The sizes of micro-batches."""
        columns: dict[str, list[int]] = {}
        for s in self._symbols:
            if s.name in self.sample_columns:
                column, add = self.sample_columns[s.name], sum if s.kind == "rows" else _max_or_zero
                columns[s.name] = [
                    column[lot[0]] if len(lot) == 1 else add(map(column.__getitem__, lot)) for lot in lots
                ]
        return columns

    def join_columns(self, a: SizeColumns, b: SizeColumns) -> dict[str, list[int]]:
        """The sizes of micro-batches made of two parts each: at every place one of `a` and one of `b`, which
        may be longer or shorter."""
        kinds = {s.name: int.__add__ if s.kind == "rows" else max for s in self._symbols}
        return {name: list(map(kinds[name], a[name], b[name])) for name in kinds if name in a}

    def times_of_columns(
        self, section: Section, columns: SizeColumns, count: int
    ) -> tuple[list[int], list[int]]:
        """(forward, backward) ns at `count` places, of which `columns` holds the sizes."""
        backward = (
            evaluate_expr_columns(section.cost.backward_ns, columns, count)
            if owes_backward(section)
            else [0] * count
        )
        return evaluate_expr_columns(section.cost.forward_ns, columns, count), backward

    def _evaluate_for_samples(self, text: str) -> list[int]:
        if text not in self._evaluated:
            self._evaluated[text] = evaluate_expr_columns(text, self.sample_columns, self.sample_count)
        return self._evaluated[text]


def _max_or_zero(values: Iterable[int]) -> int:
    return max(values, default=0)
