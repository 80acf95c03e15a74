"""The programs of all ranks as columns of numbers, from which a rank's instructions are made when somebody
asks for them.

A step of many ranks has tens of thousands of instructions. Every rank orders and checks all of them before
every step, and runs its own: as columns they are arranged and compared at once, and the others' are never
made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import NamedTuple, cast, overload

import torch
from torch import Tensor

from secc.runtime.host.gc_control import collector_paused
from secc.runtime.plan.int_columns import integers, made
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import Instruction, Program

KINDS = ("F", "B", "W", "SEND", "RECV", "REDUCE", "STEP")
FORWARD, BACKWARD, WEIGHT, SEND, RECEIVE, REDUCE, STEP = range(len(KINDS))
DIRECTIONS = ("fwd", "bwd")
BLANK, UNKNOWN = -1, -2  # numbers of texts that say nothing, and of those that the plan does not have


class Names(NamedTuple):
    """What sections and edges are called, in the order of their numbers."""

    sections: tuple[str, ...]
    edges: tuple[str, ...]

    @staticmethod
    def of(plan: Plan) -> Names:
        """A plan's."""
        return Names(tuple(s.name for s in plan.sections), tuple(e.name for e in plan.edges))

    @staticmethod
    def within(programs: Sequence[Program]) -> Names:
        """Those that programs speak of."""
        sections = dict.fromkeys(i.section for program in programs for i in program if i.section)
        edges = dict.fromkeys(i.edge for program in programs for i in program if i.edge)
        return Names(tuple(sections), tuple(edges))

    @property
    def texts(self) -> dict[int, tuple[str, ...]]:
        """By the places of the fields that are texts."""
        return {0: KINDS, 1: self.sections, 5: self.edges, 6: DIRECTIONS}


class Rows(NamedTuple):
    """Instructions, a column for each of their fields, in which texts are numbered; and the rank in whose
    program each stands."""

    kind: Tensor
    section: Tensor
    replica: Tensor
    stage: Tensor
    micro: Tensor
    edge: Tensor
    direction: Tensor
    peer: Tensor
    src: Tensor
    dst: Tensor
    part: Tensor
    parts: Tensor
    rank: Tensor

    def at(self, places: Tensor) -> Rows:
        """Those that stand at these places."""
        return Rows(*(column[places] for column in self))


class Programs(Sequence[Program]):
    """One program after another; equal to the tuple of them."""

    def __init__(self, names: Names, rows: Rows, ends: Tensor) -> None:
        """`ends`: behind which of the rows each program ends."""
        self.names, self.rows, self.ends = names, rows, ends
        self._bounds = [0, *ends.tolist()]
        self._made: dict[int, Program] = {}

    @staticmethod
    def read(programs: Sequence[Program], names: Names) -> Programs:
        """The programs as columns in which texts have these numbers."""
        if isinstance(programs, Programs) and programs.names == names:
            return programs
        numbers = {
            field: _Numbers({"": BLANK} | {text: i for i, text in enumerate(some)})
            for field, some in names.texts.items()
        }
        fields = list(zip(*chain.from_iterable(programs), strict=True)) or [()] * len(Instruction._fields)
        columns = [
            integers(map(numbers[i].__getitem__, field) if i in numbers else field)
            for i, field in enumerate(fields)
        ]
        lengths = integers(map(len, programs))
        rank = torch.arange(len(lengths)).repeat_interleave(lengths)
        found = Programs(names, Rows._make([*columns, rank]), lengths.cumsum(0))
        found._made = dict(enumerate(programs))
        return found

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> Program: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Program, ...]: ...
    def __getitem__(self, index: int | slice) -> Program | tuple[Program, ...]:
        if isinstance(index, slice):
            return tuple(map(self._program, range(len(self))[index]))
        return self._program(range(len(self))[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(cast("Sequence[object]", other))

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __iter__(self) -> Iterator[Program]:
        """All programs, made at once, which takes a third of making one after the other."""
        if len(self._made) < len(self):
            with collector_paused():
                every = self._instructions(0, self._bounds[-1])
                self._made = {
                    rank: tuple(islice(every, stop - start))
                    for rank, (start, stop) in enumerate(pairwise(self._bounds))
                }
        return map(self._made.__getitem__, range(len(self)))

    def _program(self, rank: int) -> Program:
        if rank not in self._made:
            self._made[rank] = tuple(self._instructions(*self._bounds[rank : rank + 2]))
        return self._made[rank]

    def _instructions(self, start: int, stop: int) -> Iterator[Instruction]:
        columns = [column[start:stop].tolist() for column in self.rows[: len(Instruction._fields)]]
        words = {i: (*texts, "") for i, texts in self.names.texts.items()}  # BLANK is the last one
        return made(
            Instruction, (map(words[i].__getitem__, c) if i in words else c for i, c in enumerate(columns))
        )


class _Numbers(dict[str, int]):
    """Numbers of texts."""

    def __missing__(self, text: str) -> int:
        return UNKNOWN
