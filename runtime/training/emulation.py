"""An emulated run: real processes and real planning, with sleeps instead of computation and data transfer.

A rank loads its share of every global batch, exchanges metadata, plans and checks the schedule, and executes
its program as in training. A forward or backward is a sleep for its modelled time. A message is its arrival
time, passed through the job's store; the consumer sleeps until then. Gradient sums, which run behind the last
backwards as in training, and the optimizer step are one sleep at the end, after one exchange of the times at
which each rank had its gradients. So an emulated step takes the simulated time plus what planning costs on
this machine. No model is built: 64 ranks run on two cores.

Times come from an `EmulationTable` that the launcher makes from the plan, because the cost model is not part
of a rank. Clocks are the machine's monotonic one, so all ranks must run on one machine. A message occupies
the sender's outgoing link and the receiver's incoming link.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from secc.runtime.comm.edge_messages import EdgeLayout, MicroBatchPair
from secc.runtime.errors import UserError
from secc.runtime.parameters.reduction_times import TimedReduction, run_reductions
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.replica_routes import MessageSlice, ranks_by_replica, route_message
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import (
    Instruction,
    Schedule,
    gather_rounds,
    returns_gradient,
    weight_backward_times,
)
from secc.runtime.training.options import RunOptions
from secc.runtime.training.rank_context import RankContext
from secc.runtime.training.rendezvous import connect_to, listen_on
from secc.runtime.training.step_planner import PlannedStep, plan_steps

EMULATION_FILE = "emulation.jsonl"


@dataclass(frozen=True)
class EmulationTable:
    """Times in ns. Every sleep is multiplied by `scale`, so that small steps can be told from overhead.

    `links`: (latency, ns per 2^20 bytes) inside a node of `per_node` ranks and between nodes. `optimizer`:
    each rank's optimizer step.
    """

    scale: float
    per_node: int
    links: tuple[tuple[int, int], tuple[int, int]]
    reductions: tuple[TimedReduction, ...]
    optimizer: tuple[int, ...]

    def message_ns(self, a: int, b: int, size: int) -> tuple[int, int]:
        """Returns (latency, time that both ends are busy) of a message of `size` bytes between ranks `a` and
        `b`."""
        latency, mebibyte = self.links[a // self.per_node != b // self.per_node]
        return latency, size * mebibyte >> 20


def table_to_json(table: EmulationTable) -> str:
    """Returns the text of a table's file."""
    return json.dumps(dataclasses.asdict(table), default=str)  # bucket_share, as "1/3"


def read_table(path: Path) -> EmulationTable:
    """Reads a table. Raises UserError for a malformed file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        reductions = tuple(
            TimedReduction(
                tuple(r["sections"]),
                tuple(r["ranks"]),
                r["sum_ns"],
                r["gather_ns"],
                Fraction(r["bucket_share"]),
                Fraction(r["open_share"]),
            )
            for r in data["reductions"]
        )
        inside, between = data["links"]
        return EmulationTable(
            data["scale"],
            data["per_node"],
            (tuple(inside), tuple(between)),
            reductions,
            tuple(data["optimizer"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"cannot read the table of an emulated run: {error}"
        raise UserError(message, str(path), "start it by `secc run PLAN/ --emulate`") from None


def emulate_rank(directory: Path, options: RunOptions) -> None:
    """Emulates a rank of the plan in `directory`; `options.emulate` is the table's file."""
    assert options.emulate is not None
    table = read_table(options.emulate)
    terms: Any = importlib.import_module("sections.terms")
    only_steps = dataclasses.replace(
        options,
        workers=0,
        resume=None,
        save=None,
        save_every=None,
        trace=None,
        hang_timeout=None,
        eval_every=None,
    )
    with RankContext(directory, only_steps, terms) as context:
        emulator, since = Emulator(context, table), time.monotonic_ns()
        for number, step in enumerate(plan_steps(context, 0, context.last_step), 1):
            batch, program_ns = step.batch, emulator.emulate_step(step)
            now = time.monotonic_ns()
            if context.rank == 0:
                entry = {
                    "step": number,
                    "samples": len(batch.samples),
                    "tokens": batch.tokens,
                    "step_time_s": (now - since) / 1e9,
                }
                with (context.log_dir / EMULATION_FILE).open("a", encoding="utf-8") as file:
                    file.write(
                        json.dumps(entry | {"program_s": program_ns / 1e9, "scale": table.scale}) + "\n"
                    )
            since = now


class Emulator:
    """Executes the programs of one rank in emulated time."""

    def __init__(self, context: RankContext, table: EmulationTable) -> None:
        self.context, self.table, self.plan, self.rank = context, table, context.plan, context.rank
        self.sections = {s.name: s for s in self.plan.sections}
        self.replicas = {name: ranks_by_replica(s) for name, s in self.sections.items()}
        self.store: Any = _open_message_store(self.rank)

    def emulate_step(self, step: PlannedStep) -> int:
        """Executes the program of a step. Returns the ns from its start to the end of the step."""
        emulation = _StepEmulation(self, step)
        dist.barrier()
        began = time.monotonic_ns()
        emulation.run_program()
        self._end_step(emulation)
        return time.monotonic_ns() - began

    def scale_ns(self, ns: int) -> int:
        """Returns a modelled time, multiplied by the table's scale."""
        return int(ns * self.table.scale)

    def _end_step(self, emulation: _StepEmulation) -> None:
        """Sleeps until all gradient sums and the optimizer steps would have ended."""
        own_times = torch.tensor(
            [*(t for name in self.sections for t in emulation.times_of(name)), emulation.free_at],
            dtype=torch.int64,
        )
        gathered = [torch.empty_like(own_times) for _ in range(self.context.world_size)]
        dist.all_gather(gathered, own_times)
        for key in emulation.own_keys:  # all ranks have read them
            self.store.delete_key(key)
        times = [row.tolist() for row in gathered]
        _sleep_until(
            reductions_end(self.table, list(self.sections), times)
            + self.scale_ns(max(self.table.optimizer, default=0))
        )


def _open_message_store(rank: int) -> Any:
    """Returns the store that messages' arrival times pass through: a server of rank 0 on the loopback device,
    because a file cannot be awaited within microseconds. It carries times only."""
    port = torch.zeros((), dtype=torch.int64)
    server = listen_on("127.0.0.1") if rank == 0 else None
    if server is not None:
        port.fill_(server.port)
    dist.broadcast(port, 0)
    return server or connect_to("127.0.0.1", int(port))


def reductions_end(table: EmulationTable, sections: Sequence[str], times: Sequence[Sequence[int]]) -> int:
    """Returns when all gradient sums and all programs have ended, as the simulator does.

    times: by rank, of each section start and end of its last backward and the length of its first forward (0
    without one), then the end of its program, in ns.
    """
    last_backwards = {
        name: {rank: (row[3 * at], row[3 * at + 1]) for rank, row in enumerate(times)}
        for at, name in enumerate(sections)
    }
    first_forwards = {
        name: {rank: row[3 * at + 2] for rank, row in enumerate(times) if row[3 * at + 2]}
        for at, name in enumerate(sections)
    }
    reductions = (
        dataclasses.replace(r, sum_ns=int(r.sum_ns * table.scale), gather_ns=int(r.gather_ns * table.scale))
        for r in table.reductions
    )
    program_ends = [row[-1] for row in times]
    sums_end = (end for _, _, end in run_reductions(reductions, last_backwards, program_ends, first_forwards))
    return max(*program_ends, *sums_end)


def instruction_durations(
    plan: Plan, schedule: Schedule, costs: PredictedCosts
) -> dict[tuple[str, str], list[int]]:
    """Returns the modelled ns of each micro-batch, by (kind of instruction, section)."""
    durations: dict[tuple[str, str], list[int]] = {}
    for s in plan.sections:
        forward, backward = costs.micro_batch_times(s, [m.samples for m in schedule.micro_batches[s.name]])
        weight = weight_backward_times(s, backward, schedule.whole_backwards.get(s.name, ()))
        durations |= {
            ("F", s.name): forward,
            ("B", s.name): list(map(int.__sub__, backward, weight)),
            ("W", s.name): weight,
        }
    return durations


class _StepEmulation:
    """The emulation of one step on one rank. `free_at`: when this rank has finished all instructions so far.
    `last_backwards`: start and end of the last backward of each section that has one here. `send_busy_until`
    and `receive_busy_until`: of the links [inside its node, to other nodes]."""

    def __init__(self, emulator: Emulator, step: PlannedStep) -> None:
        self.emulator, self.plan = emulator, emulator.plan
        self.step_number, self.schedule = step.batch.step, step.schedule
        schedule, costs = step.schedule, PredictedCosts(self.plan, step.samples, step.schedule.own_samples)
        self.durations = instruction_durations(self.plan, schedule, costs)
        self.rounds = gather_rounds(self.plan.sections, schedule.micro_batches)
        self.layouts = {e.name: EdgeLayout(e, self.plan, schedule, step.samples) for e in self.plan.edges}
        self.consumed_messages = self._find_consumed_messages()
        self.free_at, self.send_busy_until, self.receive_busy_until = 0, [0, 0], [0, 0]
        self.last_backwards: dict[str, tuple[int, int]] = {}
        self.first_forwards: dict[str, int] = {}  # ns
        self.own_keys: list[str] = []  # in the store, for the other ranks of a replica

    def run_program(self) -> None:
        """Executes the instructions of this rank in order."""
        self.free_at = time.monotonic_ns()
        for i in self.schedule.programs[self.emulator.rank]:
            match i.kind:
                case "F" | "B" | "W":
                    self.emulate_compute(i)
                case "SEND":
                    self.emulate_send(i)
                case _:
                    pass  # a message is waited for by the computation that consumes it

    def times_of(self, section: str) -> tuple[int, int, int]:
        """Returns start and end of a section's last backward (without one, twice the end of the program) and
        the length of its first forward (0 without one), in ns."""
        last = self.last_backwards.get(section, (self.free_at, self.free_at))
        return *last, self.first_forwards.get(section, 0)

    def emulate_compute(self, i: Instruction) -> None:
        """Waits for the messages that a computation consumes and for the other ranks of its replica, then
        sleeps for its modelled time."""
        now, messages = time.monotonic_ns(), self.consumed_messages[i.kind, i.section, i.micro]
        ready = max([now, *(self.await_arrival(key, size) for key, size in messages)])
        in_step = self.rounds.get((i.section, i.micro)) or (self.schedule.micro_batches[i.section][i.micro],)
        together = [r for m in in_step for r in self.emulator.replicas[i.section][m.replica]]
        if len(together) > 1:
            name = f"{self.step_number}/{i.kind}/{i.section}/{in_step[0].index}"
            self.own_keys.append(f"{name}/{self.emulator.rank}")
            self.emulator.store.set(self.own_keys[-1], str(ready))
            ready = max(int(self.emulator.store.get(f"{name}/{r}")) for r in together)
        self.free_at = ready + self.emulator.scale_ns(
            max(self.durations[i.kind, i.section][m.index] for m in in_step)
        )
        if i.kind == "F":
            self.first_forwards.setdefault(i.section, self.free_at - ready)
        else:
            self.last_backwards[i.section] = ready, self.free_at
        _sleep_until(self.free_at)

    # Messages.

    def emulate_send(self, i: Instruction) -> None:
        """Tells the receiver when the last byte of the message arrives."""
        size = self.message_bytes(i.edge, i.direction, (i.src_micro, i.dst_micro), i.part, i.parts)
        latency, busy = self.emulator.table.message_ns(self.emulator.rank, i.peer, size)
        far = self.is_other_node(i.peer)
        start = max(time.monotonic_ns(), self.send_busy_until[far])
        self.send_busy_until[far] = start + self.emulator.scale_ns(busy)
        key = self.message_key(i.edge, i.direction, (i.src_micro, i.dst_micro), self.emulator.rank, i.peer)
        self.emulator.store.set(key, str(self.send_busy_until[far] + self.emulator.scale_ns(latency)))

    def await_arrival(self, key: str, size: tuple[int, int]) -> int:
        """Returns when a message of (sender, bytes) has passed this rank's incoming link. Blocks until it has
        been sent."""
        sender, message_bytes = size
        sent_until = int(self.emulator.store.get(key))
        self.emulator.store.delete_key(key)
        far = self.is_other_node(sender)
        busy = self.emulator.scale_ns(
            self.emulator.table.message_ns(sender, self.emulator.rank, message_bytes)[1]
        )
        self.receive_busy_until[far] = max(sent_until, self.receive_busy_until[far] + busy)
        return self.receive_busy_until[far]

    def is_other_node(self, peer: int) -> int:
        """Returns 1 if `peer` is on another node, else 0: the index of the link to it."""
        return int(peer // self.emulator.table.per_node != self.emulator.rank // self.emulator.table.per_node)

    def message_key(self, edge: str, direction: str, pair: MicroBatchPair, sender: int, receiver: int) -> str:
        """Returns the key of a message's arrival time in the store."""
        return f"{self.step_number}/{edge}/{direction}/{pair[0]}/{pair[1]}/{sender}/{receiver}"

    def message_bytes(self, edge: str, direction: str, pair: MicroBatchPair, part: int, parts: int) -> int:
        """Returns the bytes of slice `part` of `parts` of a message; gradients carry a flag."""
        layout = self.layouts[edge]
        entries = layout.message_numel(pair)
        return (
            (part + 1) * entries // parts - part * entries // parts + (direction == "bwd")
        ) * layout.dtype.itemsize

    def _find_consumed_messages(self) -> dict[tuple[str, str, int], list[tuple[str, tuple[int, int]]]]:
        """Returns the messages that each computation of this rank consumes: (key, (sender, bytes))."""
        consumed: dict[tuple[str, str, int], list[tuple[str, tuple[int, int]]]] = defaultdict(list)
        for e in self.plan.edges:
            for pair in self.layouts[e.name].pairs:
                producers, consumers = (
                    self.emulator.replicas[n][self.schedule.micro_batches[n][m].replica]
                    for n, m in zip((e.src, e.dst), pair, strict=True)
                )
                if self.emulator.rank in consumers:
                    consumed["F", e.dst, pair[1]] += self._arriving_messages(
                        e.name, "fwd", pair, route_message(producers, consumers)
                    )
                if self.emulator.rank in producers and returns_gradient(e, self.emulator.sections):
                    consumed["B", e.src, pair[0]] += self._arriving_messages(
                        e.name, "bwd", pair, route_message(consumers, producers)
                    )
        return consumed

    def _arriving_messages(
        self, edge: str, direction: str, pair: MicroBatchPair, parts: tuple[MessageSlice, ...]
    ) -> Iterator[tuple[str, tuple[int, int]]]:
        for part in parts:
            if part.receiver == self.emulator.rank:
                size = self.message_bytes(edge, direction, pair, part.index, part.count)
                yield self.message_key(edge, direction, pair, part.sender, part.receiver), (part.sender, size)


def _sleep_until(until: int) -> None:
    """Sleeps until the monotonic clock reads `until` ns."""
    left = until - time.monotonic_ns()
    if left > 0:
        time.sleep(left / 1e9)
