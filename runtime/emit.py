"""The programs of all ranks, from one global order of forwards and backwards: where sends, receives and reductions go.

A SEND stands directly after the job that made its data. Receives on a channel (an edge, a direction and a pair of ranks) stand in
the order of the sends, because not every backend can match messages out of order; so before a job its rank receives what it needs
and what was sent before that on the same channel. Those were sent even earlier, so nothing waits longer for it. A job stands in the
programs of all ranks of its replica; each of them sends and receives its own parts of the messages. Gradients are
reduced after the last backward of the rank, sections in one order on all ranks: a rank that waits in a reduction then owes nobody
anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import cast

from secc.runtime.compose import Table
from secc.runtime.graph import Graph
from secc.runtime.jobs import Messages, Numbers, Step
from secc.runtime.plan import Plan
from secc.runtime.program import COMPUTE, Instruction, Schedule, returns_gradient
from secc.runtime.routes import Ranks, replicas, routes

_made = cast("Callable[[tuple[object, ...]], Instruction]", partial(tuple.__new__, Instruction))  # a third of `_make`'s time

Channel = tuple[str, str, int, int, int, int]  # edge, direction, sender, receiver; which part of a message passes here, and of how many
Message = tuple[int, Channel, int, int]  # the place in the order before which it is received, micro-batches of the edge's ends


def emit(plan: Plan, graph: Graph, tables: dict[str, Table], messages: Messages, step: Step, order: Sequence[int]) -> Schedule:
    """The schedule whose ranks run their jobs in this order."""
    where, work, sends = _where(step), _work(tables, step), _sends(plan, step, messages, order)
    programs: list[list[Instruction]] = [[] for _ in range(plan.world_size)]
    receives: list[list[tuple[int, Instruction]] | None] = [None] * len(order)  # with their ranks, by the place before which they stand
    for place, job in enumerate(order):
        for rank, received in receives[place] or ():
            programs[rank].append(received)
        for rank in where[job]:
            programs[rank] += work[job]
        for due, (edge, direction, a, b, part, parts), m, n in sends[job] or ():
            programs[a].append(_made(("SEND", "", 0, 0, -1, edge, direction, b, m, n, part, parts)))
            entry = b, _made(("RECV", "", 0, 0, -1, edge, direction, a, m, n, part, parts))
            if (known := receives[due]) is None:
                receives[due] = [entry]
            else:
                known.append(entry)
    members = [(s.name, {rank: r for r, ranks in enumerate(replicas(s)) for rank in ranks}) for s in reversed(graph.order)]
    ended = ((*program, *_closing(members, rank)) for rank, program in enumerate(programs))
    return Schedule({name: t.micro_batches for name, t in tables.items()}, tuple(ended))


# -- messages ---------------------------------------------------------------------------------------------------------------------


def _sends(plan: Plan, step: Step, messages: Messages, order: Sequence[int]) -> list[list[Message] | None]:
    """What ranks send to others after each job, in its order."""
    place = [0] * len(order)
    for index, job in enumerate(order):
        place[job] = index
    found: list[list[Message] | None] = [None] * len(order)
    sections = {s.name: s for s in plan.sections}
    for edge in plan.edges:
        src, dst = step.numbers[edge.src], step.numbers[edge.dst]
        _add(found, step, place, (edge.name, "fwd"), (src, dst), [(src.forward + m, dst.forward + n, m, n) for m, n in messages[edge.name]])
        if returns_gradient(edge, sections):
            back = [(dst.backward + n, src.backward + m, m, n) for m, n in messages[edge.name]]
            _add(found, step, place, (edge.name, "bwd"), (dst, src), back)
    _set_dues(found, order)
    return found


def _add(
    found: list[list[Message] | None],
    step: Step,
    place: Sequence[int],
    way: tuple[str, str],
    ends: tuple[Numbers, Numbers],
    pairs: Sequence[tuple[int, int, int, int]],
) -> None:
    """Add the messages of an edge in one direction, from the first job of each pair to the second; for now received right before that."""
    rank, world, known = step.jobs.rank, step.jobs.ranks, dict[int, list[Channel]]()
    made, used = ({ranks[0]: ranks for ranks in replicas(n.section)} for n in ends)
    for first, then, m, n in pairs:
        key = rank[first] * world + rank[then]
        if (channels := known.get(key)) is None:
            channels = known[key] = [(*way, p.sender, p.receiver, p.index, p.count) for p in routes(made[rank[first]], used[rank[then]])]
        for channel in channels:
            message = place[then], channel, m, n
            if (others := found[first]) is None:
                found[first] = [message]
            else:
                others.append(message)


def _set_dues(sends: list[list[Message] | None], order: Sequence[int]) -> None:
    """A message is received before the first job that needs it, or a later message of its channel."""
    first: dict[Channel, int] = {}
    for job in reversed(order):
        if (some := sends[job]) is None:
            continue
        if len(some) > 1:
            some.sort()
        for k in range(len(some) - 1, -1, -1):
            due, channel, m, n = some[k]
            if (before := first.get(channel, due)) < due:
                some[k] = before, channel, m, n
            else:
                first[channel] = due


# -- computations -----------------------------------------------------------------------------------------------------------------


def _where(step: Step) -> list[Ranks]:
    """The ranks that execute each job: those of the replica whose first rank is the job's."""
    found: list[Ranks] = [()] * len(step.jobs.rank)
    for n in step.numbers.values():
        together = {ranks[0]: ranks for ranks in replicas(n.section)}
        for start in {n.forward, n.backward, n.weight} - {-1}:
            found[start : start + n.count] = [together[r] for r in step.jobs.rank[start : start + n.count]]
    return found


def _work(tables: dict[str, Table], step: Step) -> list[tuple[Instruction, ...]]:
    """The instructions of each job: one, or two where it is a forward and a backward."""
    found: list[tuple[Instruction, ...]] = [()] * len(step.jobs.rank)
    for name, n in step.numbers.items():
        replica = [m.replica for m in tables[name].micro_batches]
        columns: dict[int, list[Iterator[Instruction]]] = {}
        for kind, start in zip(COMPUTE, (n.forward, n.backward, n.weight), strict=True):
            columns.setdefault(start, []).append(_instructions(kind, n, replica))
        for start, some in columns.items():
            if start >= 0:
                found[start : start + n.count] = zip(*some, strict=True)
    return found


def _instructions(kind: str, n: Numbers, replica: Sequence[int]) -> Iterator[Instruction]:
    """One instruction for each of a section's micro-batches; made column by column, because there are thousands."""
    name, stage = n.section.name, n.section.stage
    rest = map(repeat, ("", "", -1, -1, -1, 0, 1))
    return map(_made, zip(repeat(kind), repeat(name), replica, repeat(stage), range(n.count), *rest))


def _closing(replicas: list[tuple[str, dict[int, int]]], rank: int) -> Iterator[Instruction]:
    """Reductions from the last section to the first, whose backwards end last, then the optimizer step."""
    for name, of_rank in replicas:
        if rank in of_rank:
            yield Instruction("REDUCE", name, of_rank[rank])
    yield Instruction("STEP")
