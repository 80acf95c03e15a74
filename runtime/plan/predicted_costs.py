"""Predicted times and saved bytes of samples and micro-batches: the plan's cost expressions at their sizes.

All times are integer nanoseconds, so that every rank decides the same on any CPU. Thousands of samples are
evaluated as columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from secc.runtime.plan.batch_sizes import combine_sizes, pad_sample_sizes
from secc.runtime.plan.expr_eval import SizeColumns, evaluate_expr_columns
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.step_program import SampleMeta, owes_backward


class PredictedCosts:
    """Predicted costs of the samples of one global batch, and of the next one's from position `own_samples`
    on.

    Where the plan pads to the global batch's widths, every sample has those widths.
    """

    def __init__(self, plan: Plan, samples: Sequence[SampleMeta], own_samples: int | None = None) -> None:
        self.sample_count = len(samples)
        self._symbols = plan.symbols
        names = samples[0].sizes if samples else {s.name: 0 for s in plan.symbols}
        sizes = pad_sample_sizes(plan, samples, own_samples)
        self.sample_columns = {name: [s[name] for s in sizes] for name in names}
        # Values of each expression for all samples; the stages of a pipeline mostly share their expressions.
        self._evaluated: dict[str, list[int]] = {}

    def sample_sizes(self, position: int) -> dict[str, int]:
        """Returns the symbol values of the sample at `position` as a micro-batch of its own."""
        return {name: column[position] for name, column in self.sample_columns.items()}

    def micro_batch_sizes(self, positions: Sequence[int]) -> dict[str, int]:
        """Returns the symbol values of a micro-batch of the samples at `positions`."""
        if len(positions) == 1:
            return self.sample_sizes(positions[0])
        return combine_sizes([self.sample_sizes(p) for p in positions], self._symbols)

    def sample_times(self, section: Section) -> tuple[list[int], list[int]]:
        """Returns (forward, backward) ns of every sample as a micro-batch of its own, whether or not it
        activates the section.
        """
        backward = (
            self._evaluate_for_samples(section.cost.backward_ns)
            if owes_backward(section)
            else [0] * self.sample_count
        )
        return self._evaluate_for_samples(section.cost.forward_ns), backward

    def shared_sample_times(self, section: Section) -> list[int]:
        """Returns forward plus backward ns of every sample as its share of a full micro-batch of equal
        samples.
        """
        count = section.micro_batch
        rows = {s.name for s in self._symbols if s.kind == "rows"}
        columns = {
            name: [count * size for size in column] if name in rows else column
            for name, column in self.sample_columns.items()
        }
        forward, backward = self.times_of_columns(section, columns, self.sample_count)
        return [(f + b) // count for f, b in zip(forward, backward, strict=True)]

    def micro_batch_times(
        self, section: Section, micro_batches: Sequence[Sequence[int]]
    ) -> tuple[list[int], list[int]]:
        """Returns (forward, backward) ns of micro-batches, each a sequence of sample positions. An empty
        micro-batch costs what the expressions give for no rows.
        """
        return self.times_of_columns(section, self.micro_batch_columns(micro_batches), len(micro_batches))

    def saved_bytes(self, section: Section, micro_batches: Sequence[Sequence[int]]) -> list[int]:
        """Returns the bytes that each micro-batch keeps from forward to backward; [] without a byte
        budget.
        """
        if section.room_bytes and set(map(len, micro_batches)) <= {1}:
            sample_bytes = self._evaluate_for_samples(section.cost.saved or "0")
            return [sample_bytes[p] for (p,) in micro_batches]
        return (
            self.saved_bytes_of_columns(section, self.micro_batch_columns(micro_batches), len(micro_batches))
            if section.room_bytes
            else []
        )

    def saved_bytes_of_columns(self, section: Section, columns: SizeColumns, count: int) -> list[int]:
        """Returns the bytes that each of `count` micro-batches keeps, from columns of symbol values."""
        return evaluate_expr_columns(section.cost.saved or "0", columns, count)

    def token_counts(self, section: Section, columns: SizeColumns, count: int) -> list[int]:
        """Returns the tokens of each of `count` micro-batches, padding included, from columns of symbol
        values."""
        return evaluate_expr_columns(section.token_count, columns, count)

    def micro_batch_columns(self, micro_batches: Sequence[Sequence[int]]) -> dict[str, list[int]]:
        """Returns symbol -> its value for each micro-batch."""
        columns: dict[str, list[int]] = {}
        for s in self._symbols:
            if s.name in self.sample_columns:
                column, combine = self.sample_columns[s.name], sum if s.kind == "rows" else _max_or_zero
                columns[s.name] = [
                    column[samples[0]] if len(samples) == 1 else combine(map(column.__getitem__, samples))
                    for samples in micro_batches
                ]
        return columns

    def join_columns(self, a: SizeColumns, b: SizeColumns) -> dict[str, list[int]]:
        """Returns the symbol values of micro-batches joined row by row: rows of `a` and `b` add up or take
        the maximum. The shorter column ends the result.
        """
        combine = {s.name: int.__add__ if s.kind == "rows" else max for s in self._symbols}
        return {name: list(map(combine[name], a[name], b[name])) for name in combine if name in a}

    def times_of_columns(
        self, section: Section, columns: SizeColumns, count: int
    ) -> tuple[list[int], list[int]]:
        """Returns (forward, backward) ns of `count` micro-batches, given their symbol values as columns."""
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
