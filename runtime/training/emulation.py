"""An emulated run: real processes and the real control plane, with waits in place of what computes and moves
tensors.

A rank loads its share of every global batch, gathers the metadata, makes and checks the schedule and walks
through its program as in training. A forward or backward is a wait for its modelled time. A message is its
arrival time, handed over through the job's store and waited for by the consumer. Sums of gradients and the
optimizer's step are waits at the end, after one exchange of when each rank got there. So an emulated step
takes what the simulator says plus what control costs on this machine. No model is built: 64 ranks fit two
cores.

Times come from a *table* that the launcher makes from the plan (`Table`), because the cost model does not
belong to a rank. Clocks are the machine's own monotonic one, so all ranks must run on one machine. A message
occupies the sender's way out and the receiver's way in.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from secc.runtime.comm.edge_messages import EdgeLayout
from secc.runtime.errors import UserError
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
from secc.runtime.training.step_planner import PlannedStep, plan_steps

EMULATION_FILE = "emulation.jsonl"
MicroBatchPair = tuple[int, int]


@dataclass(frozen=True)
class EmulationTable:
    """What the launcher says of time, in ns. Every wait is stretched by `scale`, so that small steps can be
    told from overhead.

    `links` has (latency, ns for 2^20 bytes) inside a node of `per_node` ranks and between nodes. `sums` has
    (sections, ranks, ns) of each reduction, in the order in which a rank does them; `optimizer` the step of
    each rank.
    """

    scale: float
    per_node: int
    links: tuple[tuple[int, int], tuple[int, int]]
    sums: tuple[tuple[tuple[str, ...], tuple[int, ...], int], ...]
    optimizer: tuple[int, ...]

    def message_ns(self, a: int, b: int, size: int) -> tuple[int, int]:
        """(latency, time that both ends are busy) of a message of `size` bytes."""
        latency, mebibyte = self.links[a // self.per_node != b // self.per_node]
        return latency, size * mebibyte >> 20


def table_to_json(table: EmulationTable) -> str:
    """The text of a table's file."""
    return json.dumps(dataclasses.asdict(table))


def read_table(path: Path) -> EmulationTable:
    """The table in a file. Raises UserError for one that is none."""
    try:
        data = json.loads(path.read_text())
        sums = tuple((tuple(sections), tuple(ranks), ns) for sections, ranks, ns in data["sums"])
        inside, between = data["links"]
        return EmulationTable(
            data["scale"], data["per_node"], (tuple(inside), tuple(between)), sums, tuple(data["optimizer"])
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"cannot read the table of an emulated run: {error}"
        raise UserError(message, str(path), "start it by `secc run PLAN/ --emulate`") from None


def emulate_rank(directory: Path, options: RunOptions) -> None:
    """What a rank does in place of training. `options.emulate` is the table's file."""
    assert options.emulate is not None
    table = read_table(options.emulate)
    terms: Any = importlib.import_module("sections.terms")
    only_steps = dataclasses.replace(options, workers=0, resume=None, save=None, save_every=None, trace=None)
    with RankContext(directory, only_steps, terms) as run:
        emulator, since = Emulator(run, table), time.monotonic_ns()
        for number, step in enumerate(plan_steps(run, 0), 1):
            batch, program_ns = step.batch, emulator.emulate_step(step)
            now = time.monotonic_ns()
            if run.rank == 0:
                told = {
                    "step": number,
                    "samples": len(batch.samples),
                    "tokens": batch.tokens,
                    "step_time_s": (now - since) / 1e9,
                }
                with (run.log_dir / EMULATION_FILE).open("a") as file:
                    file.write(
                        json.dumps(told | {"program_s": program_ns / 1e9, "scale": table.scale}) + "\n"
                    )
            since = now


class Emulator:
    """Walks through the programs of one rank."""

    def __init__(self, run: RankContext, table: EmulationTable) -> None:
        self.context, self.table, self.plan, self.rank = run, table, run.plan, run.rank
        self.sections = {s.name: s for s in self.plan.sections}
        self.replicas = {name: ranks_by_replica(s) for name, s in self.sections.items()}
        self.store: Any = distributed_c10d._get_default_store()

    def emulate_step(self, step: PlannedStep) -> int:
        """Walk through the program of a step. Returns the ns from its start to the step's end."""
        walk = _StepEmulation(self, step)
        dist.barrier()
        began = time.monotonic_ns()
        walk.run_program()
        self._end_step(walk)
        return time.monotonic_ns() - began

    def scale_ns(self, ns: int) -> int:
        return int(ns * self.table.scale)

    def _end_step(self, walk: _StepEmulation) -> None:
        """The sums of gradients, each when all its ranks are there and done with those before it, and the
        optimizer."""
        mine = torch.tensor(
            [*(walk.reduce_at.get(i, walk.free_at) for i in range(len(self.table.sums))), walk.free_at],
            dtype=torch.int64,
        )
        found = [torch.empty_like(mine) for _ in range(self.context.world_size)]
        dist.all_gather(found, mine)
        times = [row.tolist() for row in found]
        _sleep_until(
            _reduction_end(self.table, times, self.scale_ns)
            + self.scale_ns(max(self.table.optimizer, default=0))
        )


def _reduction_end(table: EmulationTable, times: list[list[int]], scaled: Callable[[int], int]) -> int:
    """When all gradients are summed, by the clock: a rank's sums follow each other beside whatever else it
    does."""
    busy = [0] * len(times)
    for i, (_, ranks, ns) in enumerate(table.sums):
        end = max(max(times[r][i], busy[r]) for r in ranks) + scaled(ns)
        for r in ranks:
            busy[r] = end
    return max(max(row[-1], b) for row, b in zip(times, busy, strict=True))


def instruction_durations(
    plan: Plan, schedule: Schedule, costs: PredictedCosts
) -> dict[tuple[str, str], list[int]]:
    """The ns of each micro-batch of a section, by kind of instruction and section."""
    found: dict[tuple[str, str], list[int]] = {}
    for s in plan.sections:
        forward, backward = costs.micro_batch_times(s, [m.samples for m in schedule.micro_batches[s.name]])
        weight = weight_backward_times(s, backward)
        found |= {
            ("F", s.name): forward,
            ("B", s.name): list(map(int.__sub__, backward, weight)),
            ("W", s.name): weight,
        }
    return found


class _StepEmulation:
    """One step of one rank. `free`: when it has done all so far; `reached`: when it came to each sum of
    gradients."""

    def __init__(self, emulator: Emulator, step: PlannedStep) -> None:
        self.emulator, self.step_number, self.schedule, self.plan = (
            emulator,
            step.batch.step,
            step.schedule,
            emulator.plan,
        )
        schedule, costs = step.schedule, PredictedCosts(self.plan, step.samples, step.schedule.own_samples)
        self.durations = instruction_durations(self.plan, schedule, costs)
        self.rounds = gather_rounds(self.plan.sections, schedule.micro_batches)
        self.layouts = {e.name: EdgeLayout(e, self.plan, schedule, step.samples) for e in self.plan.edges}
        self.consumed_messages = self._find_consumed_messages()
        self.free_at, self.send_busy_until, self.receive_busy_until = 0, [0, 0], [0, 0]
        self.reduce_at: dict[int, int] = {}

    def run_program(self) -> None:
        self.free_at = time.monotonic_ns()
        for i in self.schedule.programs[self.emulator.rank]:
            match i.kind:
                case "F" | "B" | "W":
                    self.emulate_compute(i)
                case "SEND":
                    self.emulate_send(i)
                case "REDUCE":
                    for k, (sections, ranks, _) in enumerate(self.emulator.table.sums):
                        if sections == (i.section,) and self.emulator.rank in ranks:
                            self.reduce_at[k] = self.free_at
                case _:
                    pass  # receives are taken where they are needed

    def emulate_compute(self, i: Instruction) -> None:
        """Wait for what comes in and for the other ranks of the replica, then for the modelled time."""
        ready = max(
            [
                time.monotonic_ns(),
                *(
                    self.await_arrival(key, size)
                    for key, size in self.consumed_messages[i.kind, i.section, i.micro]
                ),
            ]
        )
        in_step = self.rounds.get((i.section, i.micro)) or (self.schedule.micro_batches[i.section][i.micro],)
        together = [r for m in in_step for r in self.emulator.replicas[i.section][m.replica]]
        if len(together) > 1:
            name = f"{self.step_number}/{i.kind}/{i.section}/{in_step[0].index}"
            self.emulator.store.set(f"{name}/{self.emulator.rank}", str(ready))
            ready = max(int(self.emulator.store.get(f"{name}/{r}")) for r in together)
        self.free_at = ready + self.emulator.scale_ns(
            max(self.durations[i.kind, i.section][m.index] for m in in_step)
        )
        _sleep_until(self.free_at)

    # -- messages
    # -----------------------------------------------------------------------------------------------------------------

    def emulate_send(self, i: Instruction) -> None:
        """Tell the receiver when the message's last byte leaves."""
        size = self.message_bytes(i.edge, i.direction, (i.src_micro, i.dst_micro), i.part, i.parts)
        latency, busy = self.emulator.table.message_ns(self.emulator.rank, i.peer, size)
        far = self.is_other_node(i.peer)
        start = max(time.monotonic_ns(), self.send_busy_until[far])
        self.send_busy_until[far] = start + self.emulator.scale_ns(busy)
        key = self.message_key(i.edge, i.direction, (i.src_micro, i.dst_micro), self.emulator.rank, i.peer)
        self.emulator.store.set(key, str(self.send_busy_until[far] + self.emulator.scale_ns(latency)))

    def await_arrival(self, key: str, size: tuple[int, int]) -> int:
        """When a message is there: not before the way in has had time for it. Blocks until it has been
        sent."""
        sender, entries = size
        told = int(self.emulator.store.get(key))
        self.emulator.store.delete_key(key)
        far = self.is_other_node(sender)
        busy = self.emulator.scale_ns(self.emulator.table.message_ns(sender, self.emulator.rank, entries)[1])
        self.receive_busy_until[far] = max(told, self.receive_busy_until[far] + busy)
        return self.receive_busy_until[far]

    def is_other_node(self, peer: int) -> int:
        return int(peer // self.emulator.table.per_node != self.emulator.rank // self.emulator.table.per_node)

    def message_key(self, edge: str, direction: str, pair: MicroBatchPair, sender: int, receiver: int) -> str:
        return f"{self.step_number}/{edge}/{direction}/{pair[0]}/{pair[1]}/{sender}/{receiver}"

    def message_bytes(self, edge: str, direction: str, pair: MicroBatchPair, part: int, parts: int) -> int:
        layout = self.layouts[edge]
        entries = layout.message_numel(pair)
        return (
            (part + 1) * entries // parts - part * entries // parts + (direction == "bwd")
        ) * layout.dtype.itemsize

    def _find_consumed_messages(self) -> dict[tuple[str, str, int], list[tuple[str, tuple[int, int]]]]:
        """The messages that each computation of this rank consumes: (key, (sender, bytes))."""
        found: dict[tuple[str, str, int], list[tuple[str, tuple[int, int]]]] = defaultdict(list)
        for e in self.plan.edges:
            for pair in self.layouts[e.name].pairs:
                a, b = (
                    self.emulator.replicas[n][self.schedule.micro_batches[n][m].replica]
                    for n, m in zip((e.src, e.dst), pair, strict=True)
                )
                if self.emulator.rank in b:
                    found["F", e.dst, pair[1]] += self._arriving_messages(
                        e.name, "fwd", pair, route_message(a, b)
                    )
                if self.emulator.rank in a and returns_gradient(e, self.emulator.sections):
                    found["B", e.src, pair[0]] += self._arriving_messages(
                        e.name, "bwd", pair, route_message(b, a)
                    )
        return found

    def _arriving_messages(
        self, edge: str, direction: str, pair: MicroBatchPair, parts: tuple[MessageSlice, ...]
    ) -> Iterator[tuple[str, tuple[int, int]]]:
        for part in parts:
            if part.receiver == self.emulator.rank:
                size = self.message_bytes(edge, direction, pair, part.index, part.count)
                yield self.message_key(edge, direction, pair, part.sender, part.receiver), (part.sender, size)


def _sleep_until(until: int) -> None:
    """Sleep until the clock says `until`."""
    left = until - time.monotonic_ns()
    if left > 0:
        time.sleep(left / 1e9)
