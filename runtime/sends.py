"""How many of its sends a rank may leave unreceived, so that their buffers do not pile up in a rank that runs ahead.

A rank with too many of them waits for its oldest one, and a rank that waits may hold up others, even the one it waits for. So the
programs are run against that rule before the step, in which a message counts as received when its receiver comes to the RECV; a limit
under which they do not end is doubled. All ranks find the same limit, without a word to each other.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from secc.runtime.program import Instruction, Schedule

SENDS = 32

Program = Sequence[Instruction]


def limit_of(schedule: Schedule, first: int = SENDS) -> int:
    """The smallest of `first`, its double and so on under which all programs end."""
    most = max((sum(i.kind == "SEND" for i in program) for program in schedule.programs), default=0)
    if most <= first:
        return first
    programs = [[i for i in program if i.kind in ("SEND", "RECV")] for program in schedule.programs]
    limit = first
    while limit < most and not _ends(programs, limit):
        limit *= 2
    return limit


def _ends(programs: Sequence[Program], limit: int) -> bool:
    at = [0] * len(programs)
    sends = [[_message(i) for i in program if i.kind == "SEND"] for program in programs]
    posted = [0] * len(programs)
    done: set[tuple[object, ...]] = set()  # ("SEND" or "RECV", message) that a rank has passed
    waiting: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    runnable = deque(range(len(programs)))
    while runnable:
        rank = runnable.popleft()
        while at[rank] < len(programs[rank]):
            i = programs[rank][at[rank]]
            if i.kind == "RECV":
                needed = ("SEND", *_message(i))
            else:
                oldest = posted[rank] - limit
                needed = ("RECV", *sends[rank][oldest]) if oldest >= 0 else None
            if needed is not None and needed not in done:
                waiting[needed].append(rank)
                break
            passed = (i.kind, *_message(i))
            done.add(passed)
            runnable += waiting.pop(passed, ())
            posted[rank] += i.kind == "SEND"
            at[rank] += 1
    return all(i == len(program) for i, program in zip(at, programs, strict=True))


def _message(i: Instruction) -> tuple[str, str, int, int]:
    """What a SEND and its RECV have in common."""
    return i.edge, i.direction, i.src_micro, i.dst_micro
