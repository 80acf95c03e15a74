"""Modelled times of samples and micro-batches, and what these keep: the plan's expressions at the sizes that
they have.

All times are integer nanoseconds, so that every rank, on any CPU, decides alike. Thousands of samples are
evaluated as columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from secc.runtime.plan.batch_sizes import combine, padded
from secc.runtime.plan.expr_eval import Columns, evaluate_columns
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.step_program import SampleMeta, owes_backward


class Costs:
    """Times of the samples of one global batch, and from position `own` on of the next one's. Where the plan
    pads to the global batch's widths, every sample has those."""

    def __init__(self, plan: Plan, samples: Sequence[SampleMeta], own: int | None = None) -> None:
        self.count = len(samples)
        self._symbols = plan.symbols
        names = samples[0].sizes if samples else {s.name: 0 for s in plan.symbols}
        found = padded(plan, samples, own)
        self.columns = {name: [s[name] for s in found] for name in names}
        self._known: dict[
            str, list[int]
        ] = {}  # what texts give for each sample: those of stages are mostly the same

    def sizes(self, position: int) -> dict[str, int]:
        """The symbols of the sample at `position` as a micro-batch of its own."""
        return {name: column[position] for name, column in self.columns.items()}

    def together(self, positions: Sequence[int]) -> dict[str, int]:
        """The symbols of a micro-batch of the samples at `positions`."""
        if len(positions) == 1:
            return self.sizes(positions[0])
        return combine([self.sizes(p) for p in positions], self._symbols)

    def alone(self, section: Section) -> tuple[list[int], list[int]]:
        """(forward, backward) ns of every sample as a micro-batch of its own, whether or not the section is
        active for it."""
        backward = self._of_each(section.cost.backward_ns) if owes_backward(section) else [0] * self.count
        return self._of_each(section.cost.forward_ns), backward

    def shared(self, section: Section) -> list[int]:
        """Forward and backward ns of every sample as its part of a full micro-batch of samples like it."""
        count = section.micro_batch
        rows = {s.name for s in self._symbols if s.kind == "rows"}
        columns = {
            name: [count * size for size in column] if name in rows else column
            for name, column in self.columns.items()
        }
        forward, backward = self.at(section, columns, self.count)
        return [(f + b) // count for f, b in zip(forward, backward, strict=True)]

    def of(self, section: Section, lots: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """(forward, backward) ns of micro-batches, each given by its samples' positions; of an empty one what
        it takes without samples."""
        return self.at(section, self.columns_of(lots), len(lots))

    def kept(self, section: Section, lots: Sequence[Sequence[int]]) -> list[int]:
        """Bytes that micro-batches keep from forward to backward; none where their room is not bounded."""
        if section.room_bytes and set(map(len, lots)) <= {1}:
            kept = self._of_each(section.cost.saved or "0")
            return [kept[p] for (p,) in lots]
        return self.kept_at(section, self.columns_of(lots), len(lots)) if section.room_bytes else []

    def kept_at(self, section: Section, columns: Columns, count: int) -> list[int]:
        """Bytes that are kept at `count` places, of which `columns` holds the sizes."""
        return evaluate_columns(section.cost.saved or "0", columns, count)

    def columns_of(self, lots: Sequence[Sequence[int]]) -> dict[str, list[int]]:
        """The sizes of micro-batches."""
        columns: dict[str, list[int]] = {}
        for s in self._symbols:
            if s.name in self.columns:
                column, add = self.columns[s.name], sum if s.kind == "rows" else _most
                columns[s.name] = [
                    column[lot[0]] if len(lot) == 1 else add(map(column.__getitem__, lot)) for lot in lots
                ]
        return columns

    def joined(self, a: Columns, b: Columns) -> dict[str, list[int]]:
        """The sizes of micro-batches made of two parts each: at every place one of `a` and one of `b`, which
        may be longer or shorter."""
        kinds = {s.name: int.__add__ if s.kind == "rows" else max for s in self._symbols}
        return {name: list(map(kinds[name], a[name], b[name])) for name in kinds if name in a}

    def at(self, section: Section, columns: Columns, count: int) -> tuple[list[int], list[int]]:
        """(forward, backward) ns at `count` places, of which `columns` holds the sizes."""
        backward = (
            evaluate_columns(section.cost.backward_ns, columns, count)
            if owes_backward(section)
            else [0] * count
        )
        return evaluate_columns(section.cost.forward_ns, columns, count), backward

    def _of_each(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = evaluate_columns(text, self.columns, self.count)
        return self._known[text]


def _most(values: Iterable[int]) -> int:
    return max(values, default=0)
