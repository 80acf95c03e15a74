"""The programs of several ranks side by side, with the cells that matter marked: how errors about schedules
are drawn.

    rank 0                        rank 1
    > 0  RECV f bwd 0>0 from 1    > 0  RECV f fwd 0>0 from 0
      1  F vision 0                 1  F language_model 0

A column for each rank; marked cells have an arrow.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from secc.runtime.plan.step_program import Schedule

ProgramCell = tuple[int, int]  # (rank, index into its program)
MAX_RANKS_SHOWN = 6  # ranks shown
CONTEXT_INSTRUCTIONS = 3  # instructions shown before and after a marked one


def render_programs(schedule: Schedule, marked: Iterable[ProgramCell]) -> str:
    """Renders the marked cells and their surroundings, with a column for each rank.

    Ranks without a mark are shown only if there is room for all ranks.
    """
    cells = set(marked)
    ranks = range(len(schedule.programs))
    if len(ranks) > MAX_RANKS_SHOWN and cells:
        ranks = sorted({rank for rank, _ in cells})
    columns = [
        _render_rank(schedule, rank, {i for r, i in cells if r == rank}) for rank in ranks[:MAX_RANKS_SHOWN]
    ]
    widths = [max(map(len, column)) for column in columns]
    rows = zip_longest(*columns, fillvalue="")
    text = "\n".join(
        "    ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    hidden = len(schedule.programs) - len(columns)
    return text + (f"\n({hidden} more ranks)" if hidden else "")


def _render_rank(schedule: Schedule, rank: int, marked: set[int]) -> list[str]:
    """Title and lines of one rank; without a mark, its first instructions."""
    program = schedule.programs[rank]
    shown = sorted(
        {
            i
            for m in marked or {CONTEXT_INSTRUCTIONS}
            for i in range(m - CONTEXT_INSTRUCTIONS, m + CONTEXT_INSTRUCTIONS + 1)
            if 0 <= i < len(program)
        }
    )
    digits = len(str(len(program)))
    lines, previous = [f"rank {rank}"], -1
    for i in shown:
        if i != previous + 1:
            lines.append("  ...")
        lines.append(f"{'>' if i in marked else ' '} {i:{digits}}  {program[i]}")
        previous = i
    return lines if previous == len(program) - 1 else [*lines, "  ..."]
