"""The programs of all ranks as integer columns; instruction tuples are built only when a program is read.

A step of many ranks has tens of thousands of instructions. Before every step each rank orders and checks all
of them but runs only its own: columns are sorted and compared at once, and other ranks' instructions are
never built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import NamedTuple, cast, overload

import torch
from torch import Tensor

from secc.runtime.host.gc_control import pause_gc
from secc.runtime.plan.int_columns import int_tensor, rows_from_columns
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import Instruction, Program

INSTRUCTION_KINDS = ("F", "B", "W", "SEND", "RECV", "REDUCE", "STEP")
KIND_FORWARD, KIND_BACKWARD, KIND_WEIGHT, KIND_SEND, KIND_RECEIVE, KIND_REDUCE, KIND_STEP = range(
    len(INSTRUCTION_KINDS)
)
EDGE_DIRECTIONS = ("fwd", "bwd")
NO_NAME, UNKNOWN_NAME = -1, -2  # codes of the empty text and of a text that the plan does not contain


class InstructionNames(NamedTuple):
    """Section and edge names; a name's code in the columns is its index."""

    sections: tuple[str, ...]
    edges: tuple[str, ...]

    @staticmethod
    def from_plan(plan: Plan) -> InstructionNames:
        """Returns the names of a plan's sections and edges, in the plan's order."""
        return InstructionNames(tuple(s.name for s in plan.sections), tuple(e.name for e in plan.edges))

    @staticmethod
    def from_programs(programs: Sequence[Program]) -> InstructionNames:
        """Returns the names that occur in programs, in the order of their first use."""
        sections = dict.fromkeys(i.section for program in programs for i in program if i.section)
        edges = dict.fromkeys(i.edge for program in programs for i in program if i.edge)
        return InstructionNames(tuple(sections), tuple(edges))

    @property
    def texts_by_field(self) -> dict[int, tuple[str, ...]]:
        """Texts by code, for each text field of `Instruction` by the field's index."""
        return {0: INSTRUCTION_KINDS, 1: self.sections, 5: self.edges, 6: EDGE_DIRECTIONS}


class InstructionColumns(NamedTuple):
    """Columns of instructions: one tensor for each field of `Instruction`, with texts as codes, and `rank`,
    the rank that runs the instruction.
    """

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

    def take_rows(self, indices: Tensor) -> InstructionColumns:
        """Returns the rows at these indices, a 1-D tensor of integers or bools."""
        return InstructionColumns(*(column[indices] for column in self))


class ProgramTable(Sequence[Program]):
    """A sequence of programs, one per rank, stored as columns; equal to the tuple of the programs."""

    def __init__(self, names: InstructionNames, rows: InstructionColumns, ends: Tensor) -> None:
        """Stores the rows of all programs; program r consists of the rows before `ends[r]` and after program
        r - 1.
        """
        self.names, self.columns, self.program_ends = names, rows, ends
        self._row_bounds = [0, *ends.tolist()]
        self._built: dict[int, Program] = {}

    @staticmethod
    def from_programs(programs: Sequence[Program], names: InstructionNames) -> ProgramTable:
        """Converts programs into columns with the codes of `names`; unknown texts get UNKNOWN_NAME."""
        if isinstance(programs, ProgramTable) and programs.names == names:
            return programs
        codes = {
            field: _TextCodes({"": NO_NAME} | {text: i for i, text in enumerate(texts)})
            for field, texts in names.texts_by_field.items()
        }
        fields = list(zip(*chain.from_iterable(programs), strict=True)) or [()] * len(Instruction._fields)
        columns = [
            int_tensor(map(codes[i].__getitem__, field) if i in codes else field)
            for i, field in enumerate(fields)
        ]
        lengths = int_tensor(map(len, programs))
        rank = torch.arange(len(lengths)).repeat_interleave(lengths)
        table = ProgramTable(names, InstructionColumns._make([*columns, rank]), lengths.cumsum(0))
        table._built = dict(enumerate(programs))
        return table

    def __len__(self) -> int:
        return len(self.program_ends)

    @overload
    def __getitem__(self, index: int) -> Program: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Program, ...]: ...
    def __getitem__(self, index: int | slice) -> Program | tuple[Program, ...]:
        if isinstance(index, slice):
            return tuple(map(self._build_program, range(len(self))[index]))
        return self._build_program(range(len(self))[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(cast("Sequence[object]", other))

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __iter__(self) -> Iterator[Program]:
        """Yields all programs, built at once, which takes a third of the time of building them one by one."""
        if len(self._built) < len(self):
            with pause_gc():
                instructions = self._build_instructions(0, self._row_bounds[-1])
                self._built = {
                    rank: tuple(islice(instructions, stop - start))
                    for rank, (start, stop) in enumerate(pairwise(self._row_bounds))
                }
        return map(self._built.__getitem__, range(len(self)))

    def _build_program(self, rank: int) -> Program:
        if rank not in self._built:
            self._built[rank] = tuple(self._build_instructions(*self._row_bounds[rank : rank + 2]))
        return self._built[rank]

    def _build_instructions(self, start: int, stop: int) -> Iterator[Instruction]:
        columns = [column[start:stop].tolist() for column in self.columns[: len(Instruction._fields)]]
        words = {
            i: (*texts, "") for i, texts in self.names.texts_by_field.items()
        }  # NO_NAME indexes the last one
        return rows_from_columns(
            Instruction, (map(words[i].__getitem__, c) if i in words else c for i, c in enumerate(columns))
        )


class _TextCodes(dict[str, int]):
    """The code of each text; UNKNOWN_NAME for texts that are not listed."""

    def __missing__(self, text: str) -> int:
        return UNKNOWN_NAME
