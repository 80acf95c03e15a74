"""How many of its sends a rank may leave unreceived, so that their buffers do not pile up in a rank that runs ahead.

A rank with too many of them waits for its oldest one, and a rank that waits may hold up others, even the one it waits for. So the
programs are run against that rule before the step, in which a message counts as received when its receiver comes to the RECV; a limit
under which they do not end is doubled. All ranks find the same limit, without a word to each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from secc.runtime.plan import Section
from secc.runtime.program import COMPUTE, Instruction, Schedule, rounds

SENDS = 32

Program = Sequence[Instruction]
Job = tuple[object, ...]  # what several ranks do together


def limit_of(schedule: Schedule, first: int = SENDS, sections: Iterable[Section] = ()) -> int:
    """The smallest of `first`, its double and so on under which all programs end."""
    most = max((sum(i.kind == "SEND" for i in program) for program in schedule.programs), default=0)
    if most <= first:
        return first
    in_step = rounds(sections, schedule.micro_batches)

    def key(i: Instruction) -> Job:
        return (i.kind, *in_step.get((i.section, i.micro), (i[1:5],))[0])

    together = Counter(key(i) for program in schedule.programs for i in program if i.kind in COMPUTE)
    programs = [[i for i in program if i.kind in ("SEND", "RECV") or together[key(i)] > 1] for program in schedule.programs]
    limit = first
    while limit < most and not _ends(programs, limit, together, key):
        limit *= 2
    return limit


def _ends(programs: Sequence[Program], limit: int, together: Mapping[Job, int], key: Callable[[Instruction], Job]) -> bool:
    at = [0] * len(programs)
    sends = [[_message(i, rank) for i in program if i.kind == "SEND"] for rank, program in enumerate(programs)]
    posted = [0] * len(programs)
    done: set[tuple[object, ...]] = set()  # ("SEND" or "RECV", message) that a rank has passed, and what all of a replica have come to
    reached: Counter[tuple[object, ...]] = Counter()
    waiting: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    joined: set[tuple[int, int]] = set()  # (rank, index) of what a rank has come to, so that it counts once
    runnable = deque(range(len(programs)))
    while runnable:
        rank = runnable.popleft()
        while at[rank] < len(programs[rank]):
            i = programs[rank][at[rank]]
            if i.kind in COMPUTE:
                needed = passed = key(i)
                if (rank, at[rank]) not in joined:
                    joined.add((rank, at[rank]))
                    reached[passed] += 1
                    done |= {passed} if reached[passed] == together[passed] else set()
            elif i.kind == "RECV":
                needed, passed = ("SEND", *_message(i, rank)), ("RECV", *_message(i, rank))
            else:
                oldest, passed = posted[rank] - limit, ("SEND", *_message(i, rank))
                needed = ("RECV", *sends[rank][oldest]) if oldest >= 0 else None
            if needed is not None and needed not in done:
                waiting[needed].append(rank)
                break
            done.add(passed)
            runnable += waiting.pop(passed, ())
            posted[rank] += i.kind == "SEND"
            at[rank] += 1
    return all(i == len(program) for i, program in zip(at, programs, strict=True))


def _message(i: Instruction, rank: int) -> tuple[object, ...]:
    """What a SEND and its RECV have in common."""
    return i.edge, i.direction, i.src_micro, i.dst_micro, *((rank, i.peer) if i.kind == "SEND" else (i.peer, rank))
