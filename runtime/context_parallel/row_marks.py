"""Which rows of a sequence each rank has, the marks of tensors that hold a rank's rows, and what repeats such
tensors (heads of keys and values), so that what was repeated can be gathered instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import torch

from secc.runtime.plan.replica_routes import slice_bounds

_MARK_ATTRIBUTE = "_secc_rows"
_REPEAT_ATTRIBUTE = "_secc_repeat"
Run = tuple[int, int]  # adjacent rows [start, stop)


@dataclass(frozen=True)
class Rows:
    """How the `size` rows of a sequence are dealt: for each rank its runs, in ascending order."""

    size: int
    runs: tuple[tuple[Run, ...], ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of rows of each rank."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The rows of all ranks, one rank after the other."""
        return tuple(row for runs in self.runs for run in runs for row in range(*run))

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the ranks' rows one after the other are the sequence."""
        ends = [run for runs in self.runs for run in runs]
        return all(a[1] == b[0] for a, b in pairwise(ends))

    def join(self, other: Rows) -> Rows:
        """Returns how the rows of this sequence and then those of another one are dealt."""
        shifted = [[(a + self.size, b + self.size) for a, b in runs] for runs in other.runs]
        return Rows(
            self.size + other.size,
            tuple(
                (*own[:-1], (own[-1][0], more[0][1]), *more[1:])
                if own and more and own[-1][1] == more[0][0]
                else (*own, *more)
                for own, more in zip(self.runs, shifted, strict=True)
            ),
        )

    def merge_adjacent_rows(self, adjacent: int) -> Rows | None:
        """Returns how the rows are dealt if every `adjacent` rows of this sequence become one; None if two
        ranks have parts of the same one."""
        if any(end % adjacent for runs in self.runs for run in runs for end in run):
            return None
        merged = (tuple((a // adjacent, b // adjacent) for a, b in runs) for runs in self.runs)
        return Rows(self.size // adjacent, tuple(merged))

    def window(self, start: int, stop: int) -> Rows:
        """Returns how the rows from `start` to `stop` are dealt, counted from `start`."""
        return Rows(
            stop - start,
            tuple(
                tuple(
                    (max(a, start) - start, min(b, stop) - start)
                    for a, b in runs
                    if max(a, start) < min(b, stop)
                )
                for runs in self.runs
            ),
        )


@cache
def deal_rows(size: int, count: int) -> Rows:
    """Deals `size` rows to `count` ranks. Each gets a piece from the head of the sequence and the
    matching one from its tail: under causal attention, later rows see more keys, and so ranks have equal
    work (Llama 3, 2024, section 3.3.2)."""
    pieces = [slice_bounds(size, i, 2 * count) for i in range(2 * count)]
    dealt: list[tuple[Run, ...]] = []
    for rank in range(count):
        head, tail = pieces[rank], pieces[2 * count - 1 - rank]
        joined = [(head[0], tail[1])] if head[1] == tail[0] else [head, tail]
        dealt.append(tuple(run for run in joined if run[0] < run[1]))
    return Rows(size, tuple(dealt))


@cache
def deal_entries(size: int, count: int) -> Rows:
    """Deals the `size` entries of a batch to `count` ranks: each gets neighbouring ones, at most one more
    than another."""
    runs = (slice_bounds(size, i, count) for i in range(count))
    return Rows(size, tuple(((start, stop),) if start < stop else () for start, stop in runs))


@cache
def deal_pieces(ends: tuple[int, ...], count: int) -> Rows:
    """Deals rows to `count` ranks in whole pieces, which end at `ends` (ascending, the last one is the number
    of rows). Each rank gets neighbouring pieces: the cuts are those next to equal numbers of rows."""
    cuts = [min(ends, key=lambda end: abs(count * end - i * ends[-1])) for i in range(1, count)]
    runs = [(start, stop) for start, stop in pairwise([0, *cuts, ends[-1]])]
    return Rows(ends[-1], tuple(((run,) if run[0] < run[1] else ()) for run in runs))


@dataclass(frozen=True)
class RowMark:
    """This tensor holds a rank's rows of a whole tensor along `dim`.

    The whole dim has `outer * rows.size * inner` entries: views may have merged the dims around the rows into
    it (samples and positions into tokens).
    """

    dim: int
    rows: Rows
    outer: int = 1
    inner: int = 1

    @property
    def whole_size(self) -> int:
        """The size of the whole tensor along `dim`."""
        return self.outer * self.rows.size * self.inner

    @property
    def is_plain(self) -> bool:
        """Whether the dim holds nothing but rows."""
        return self.outer == self.inner == 1

    def at_dim(self, dim: int) -> RowMark:
        """Returns the mark for another dim."""
        return replace(self, dim=dim)

    def local_size(self, index: int) -> int:
        """The size along `dim` that rank `index` holds."""
        return self.outer * self.rows.counts[index] * self.inner

    def entries(self, index: int, device: torch.device) -> torch.Tensor:
        """Returns the entries of the whole dim that rank `index` holds (int64)."""
        rows = run_indices(self.rows.runs[index], device)
        if self.is_plain:
            return rows
        outer = torch.arange(self.outer, device=device)[:, None, None] * self.rows.size
        inner = torch.arange(self.inner, device=device)[None, None, :]
        return ((outer + rows[None, :, None]) * self.inner + inner).flatten()


def run_indices(runs: Sequence[Run], device: torch.device) -> torch.Tensor:
    """Returns the rows of `runs` (int64)."""
    pieces = [torch.arange(*run, device=device) for run in runs]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)


def mark_of(value: Any) -> RowMark | None:
    """Returns the mark of a tensor, None for anything else."""
    return getattr(value, _MARK_ATTRIBUTE, None) if isinstance(value, torch.Tensor) else None


def set_mark(tensor: torch.Tensor, mark: RowMark | None) -> torch.Tensor:
    """Sets the mark of a tensor, or removes it (None); returns the tensor."""
    if mark is not None or hasattr(tensor, _MARK_ATTRIBUTE):
        setattr(tensor, _MARK_ATTRIBUTE, mark)
    return tensor


Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class RowRepeat:
    """A tensor of rows that repeats the entries of a smaller one: `steps` make the whole of it from the whole
    of `source`. It holds as long as nothing has been written into either; `versions` are those of both.

    in_order: copies of an entry follow each other (heads 0, 0, 1, 1).
    """

    source: torch.Tensor
    steps: tuple[Step, ...]
    versions: tuple[int, int]
    in_order: bool

    def rebuild(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the whole repeated tensor, given the whole source."""
        for step in self.steps:
            whole = step(whole)
        return whole


def repeat_of(tensor: torch.Tensor) -> RowRepeat | None:
    """Returns what a tensor of rows repeats, None if it is not known to repeat anything."""
    repeat: RowRepeat | None = getattr(tensor, _REPEAT_ATTRIBUTE, None)
    if repeat is None or repeat.versions != (tensor._version, repeat.source._version):
        return None
    return repeat


def note_repeat(
    out: torch.Tensor, tensor: torch.Tensor, step: Step, starts: bool = False, in_order: bool = False
) -> torch.Tensor:
    """Notes on `out` that `step` makes it, where whole, from the whole `tensor`, if that repeats another one
    or, with `starts`, because the step itself repeats entries; returns `out`. in_order: copies of an entry
    follow each other after the step if they did before."""
    if out is tensor or mark_of(out) is None or tensor.is_inference():
        return out
    repeat = repeat_of(tensor)
    if repeat is not None:
        versions = (out._version, repeat.source._version)
        setattr(
            out,
            _REPEAT_ATTRIBUTE,
            RowRepeat(repeat.source, (*repeat.steps, step), versions, repeat.in_order and in_order),
        )
    elif starts and mark_of(tensor) is not None:
        setattr(out, _REPEAT_ATTRIBUTE, RowRepeat(tensor, (step,), (out._version, tensor._version), in_order))
    return out


def marked_tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors with a mark in nested lists, tuples and dicts."""
    if isinstance(values, torch.Tensor):
        if mark_of(values) is not None:
            yield values
    elif isinstance(values, tuple | list):
        for value in values:  # pyright: ignore[reportUnknownVariableType]
            yield from marked_tensors(value)
    elif isinstance(values, dict):
        for value in values.values():  # pyright: ignore[reportUnknownVariableType]
            yield from marked_tensors(value)
