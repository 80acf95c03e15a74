"""The cases of `tools.chaos`: what is broken, in which process, at which moment, and how they are drawn."""

from __future__ import annotations

import random
from itertools import product

from tools.chaos.moments import IN_WRITER, MOMENTS, Case

FAULTS = ("SIGKILL", "SIGSTOP", "SIGTERM", "DISK_FULL", "TRUNCATE", "DROP")
PROCESSES = ("rank", "loader", "recorder", "launcher", "writer", "node")
# Two ranks with a section each, which exchange messages; two that both hold all sections, which reduce.
PLANS = {"apart": "apart", "together": "colocate"}
STEPS, MORE_STEPS = 30, 90  # the second so that ranks that were lost come back within the run
_EXEC_SHARE = 0.05  # of the cases without a (re)start as their moment
_REPLAN_SHARE = 0.4  # of the cases that lose a rank


def is_possible(fault: str, process: str, moment: str) -> bool:
    """Tells whether there is such a case. At the start there is no checkpoint that could be truncated; a rank
    shuts its own connections; a stopped launcher changes nothing until someone continues it."""
    return not (
        (fault == "TRUNCATE" and moment == "start")
        or (fault == "DROP" and (process != "rank" or moment in ("start", "restart", *IN_WRITER)))
        or (fault == "SIGSTOP" and process == "launcher")
    )


def draw_cases(count: int, seed: int) -> list[Case]:
    """Draws cases: all possible ones in a random order, and again with other ranks and times."""
    draw, cases = random.Random(seed), list[Case]()
    possible = [c for c in product(FAULTS, PROCESSES, MOMENTS) if is_possible(*c)]
    while len(cases) < count:
        draw.shuffle(possible)
        for fault, process, moment in possible:
            plan = {"message": "apart", "reduce": "together"}.get(moment) or draw.choice(list(PLANS))
            most = {"load": 20, "forward": 40, "message": 20, "reduce": 15, "optimizer": 15}.get(moment, 3)
            rank = 0 if moment in ("rename", "latest") else draw.randrange(2)
            count_at, delay_s = draw.randint(1, most), 4 * draw.random()
            executes = moment == "start" or draw.random() < _EXEC_SHARE
            loses_rank = fault in ("SIGKILL", "SIGSTOP") and process in ("rank", "node")
            replans = draw.random() < _REPLAN_SHARE and loses_rank and moment not in ("start", "restart")
            cases.append(
                Case(
                    number=len(cases),
                    fault=fault,
                    process=process,
                    moment=moment,
                    plan=plan,
                    rank=rank,
                    count=count_at,
                    delay_s=round(delay_s, 3),
                    spawn="exec" if executes else "fork",
                    on_loss="replan" if replans else "wait",
                )
            )
    return cases[:count]


def steps_of_case(case: Case) -> int:
    """Returns the number of steps of the run that the case breaks."""
    # A file is truncated once there are two checkpoints, which a busy machine writes late; and a rank may
    # come to its moment only once a step.
    is_late = case.fault == "TRUNCATE" or case.count > STEPS
    return MORE_STEPS if case.on_loss == "replan" or is_late else STEPS
