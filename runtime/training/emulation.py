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
from secc.runtime.plan.predicted_costs import Costs
from secc.runtime.plan.replica_routes import Part, replicas, routes
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import Instruction, Schedule, returns_gradient, rounds, weight_parts
from secc.runtime.training.options import Options
from secc.runtime.training.rank_context import Run
from secc.runtime.training.step_planner import Step, steps

FILE = "emulation.jsonl"
Pair = tuple[int, int]


@dataclass(frozen=True)
class Table:
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


def to_json(table: Table) -> str:
    """The text of a table's file."""
    return json.dumps(dataclasses.asdict(table))


def read(path: Path) -> Table:
    """The table in a file. Raises UserError for one that is none."""
    try:
        data = json.loads(path.read_text())
        sums = tuple((tuple(sections), tuple(ranks), ns) for sections, ranks, ns in data["sums"])
        inside, between = data["links"]
        return Table(
            data["scale"], data["per_node"], (tuple(inside), tuple(between)), sums, tuple(data["optimizer"])
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"cannot read the table of an emulated run: {error}"
        raise UserError(message, str(path), "start it by `secc run PLAN/ --emulate`") from None


def emulate(directory: Path, options: Options) -> None:
    """What a rank does in place of training. `options.emulate` is the table's file."""
    assert options.emulate is not None
    table = read(options.emulate)
    terms: Any = importlib.import_module("sections.terms")
    only_steps = dataclasses.replace(options, workers=0, resume=None, save=None, save_every=None, trace=None)
    with Run(directory, only_steps, terms) as run:
        emulator, since = Emulator(run, table), time.monotonic_ns()
        for number, step in enumerate(steps(run, 0), 1):
            batch, program_ns = step.batch, emulator.step(step)
            now = time.monotonic_ns()
            if run.rank == 0:
                told = {
                    "step": number,
                    "samples": len(batch.samples),
                    "tokens": batch.tokens,
                    "step_time_s": (now - since) / 1e9,
                }
                with (run.log_dir / FILE).open("a") as file:
                    file.write(
                        json.dumps(told | {"program_s": program_ns / 1e9, "scale": table.scale}) + "\n"
                    )
            since = now


class Emulator:
    """Walks through the programs of one rank."""

    def __init__(self, run: Run, table: Table) -> None:
        self.run, self.table, self.plan, self.rank = run, table, run.plan, run.rank
        self.sections = {s.name: s for s in self.plan.sections}
        self.replicas = {name: replicas(s) for name, s in self.sections.items()}
        self.store: Any = distributed_c10d._get_default_store()

    def step(self, step: Step) -> int:
        """Walk through the program of a step. Returns the ns from its start to the step's end."""
        walk = _Walk(self, step)
        dist.barrier()
        began = time.monotonic_ns()
        walk.run()
        self._close(walk)
        return time.monotonic_ns() - began

    def scaled(self, ns: int) -> int:
        return int(ns * self.table.scale)

    def _close(self, walk: _Walk) -> None:
        """The sums of gradients, each when all its ranks are there and done with those before it, and the
        optimizer."""
        mine = torch.tensor(
            [*(walk.reached.get(i, walk.free) for i in range(len(self.table.sums))), walk.free],
            dtype=torch.int64,
        )
        found = [torch.empty_like(mine) for _ in range(self.run.world_size)]
        dist.all_gather(found, mine)
        times = [row.tolist() for row in found]
        _wait(_synced(self.table, times, self.scaled) + self.scaled(max(self.table.optimizer, default=0)))


def _synced(table: Table, times: list[list[int]], scaled: Callable[[int], int]) -> int:
    """When all gradients are summed, by the clock: a rank's sums follow each other beside whatever else it
    does."""
    busy = [0] * len(times)
    for i, (_, ranks, ns) in enumerate(table.sums):
        end = max(max(times[r][i], busy[r]) for r in ranks) + scaled(ns)
        for r in ranks:
            busy[r] = end
    return max(max(row[-1], b) for row, b in zip(times, busy, strict=True))


def durations(plan: Plan, schedule: Schedule, costs: Costs) -> dict[tuple[str, str], list[int]]:
    """The ns of each micro-batch of a section, by kind of instruction and section."""
    found: dict[tuple[str, str], list[int]] = {}
    for s in plan.sections:
        forward, backward = costs.of(s, [m.samples for m in schedule.micro_batches[s.name]])
        weight = weight_parts(s, backward)
        found |= {
            ("F", s.name): forward,
            ("B", s.name): list(map(int.__sub__, backward, weight)),
            ("W", s.name): weight,
        }
    return found


class _Walk:
    """One step of one rank. `free`: when it has done all so far; `reached`: when it came to each sum of
    gradients."""

    def __init__(self, emulator: Emulator, step: Step) -> None:
        self.e, self.number, self.schedule, self.plan = (
            emulator,
            step.batch.step,
            step.schedule,
            emulator.plan,
        )
        schedule, costs = step.schedule, Costs(self.plan, step.samples, step.schedule.own)
        self.durations = durations(self.plan, schedule, costs)
        self.rounds = rounds(self.plan.sections, schedule.micro_batches)
        self.layouts = {e.name: EdgeLayout(e, self.plan, schedule, step.samples) for e in self.plan.edges}
        self.needs = self._needs()
        self.free, self.out_busy, self.in_busy = 0, [0, 0], [0, 0]
        self.reached: dict[int, int] = {}

    def run(self) -> None:
        self.free = time.monotonic_ns()
        for i in self.schedule.programs[self.e.rank]:
            match i.kind:
                case "F" | "B" | "W":
                    self.compute(i)
                case "SEND":
                    self.send(i)
                case "REDUCE":
                    for k, (sections, ranks, _) in enumerate(self.e.table.sums):
                        if sections == (i.section,) and self.e.rank in ranks:
                            self.reached[k] = self.free
                case _:
                    pass  # receives are taken where they are needed

    def compute(self, i: Instruction) -> None:
        """Wait for what comes in and for the other ranks of the replica, then for the modelled time."""
        ready = max(
            [
                time.monotonic_ns(),
                *(self.arrival(key, size) for key, size in self.needs[i.kind, i.section, i.micro]),
            ]
        )
        in_step = self.rounds.get((i.section, i.micro)) or (self.schedule.micro_batches[i.section][i.micro],)
        together = [r for m in in_step for r in self.e.replicas[i.section][m.replica]]
        if len(together) > 1:
            name = f"{self.number}/{i.kind}/{i.section}/{in_step[0].index}"
            self.e.store.set(f"{name}/{self.e.rank}", str(ready))
            ready = max(int(self.e.store.get(f"{name}/{r}")) for r in together)
        self.free = ready + self.e.scaled(max(self.durations[i.kind, i.section][m.index] for m in in_step))
        _wait(self.free)

    # -- messages
    # -----------------------------------------------------------------------------------------------------------------

    def send(self, i: Instruction) -> None:
        """Tell the receiver when the message's last byte leaves."""
        size = self.size(i.edge, i.direction, (i.src_micro, i.dst_micro), i.part, i.parts)
        latency, busy = self.e.table.message_ns(self.e.rank, i.peer, size)
        far = self.far(i.peer)
        start = max(time.monotonic_ns(), self.out_busy[far])
        self.out_busy[far] = start + self.e.scaled(busy)
        key = self.key(i.edge, i.direction, (i.src_micro, i.dst_micro), self.e.rank, i.peer)
        self.e.store.set(key, str(self.out_busy[far] + self.e.scaled(latency)))

    def arrival(self, key: str, size: tuple[int, int]) -> int:
        """When a message is there: not before the way in has had time for it. Blocks until it has been
        sent."""
        sender, entries = size
        told = int(self.e.store.get(key))
        self.e.store.delete_key(key)
        far = self.far(sender)
        busy = self.e.scaled(self.e.table.message_ns(sender, self.e.rank, entries)[1])
        self.in_busy[far] = max(told, self.in_busy[far] + busy)
        return self.in_busy[far]

    def far(self, peer: int) -> int:
        return int(peer // self.e.table.per_node != self.e.rank // self.e.table.per_node)

    def key(self, edge: str, direction: str, pair: Pair, sender: int, receiver: int) -> str:
        return f"{self.number}/{edge}/{direction}/{pair[0]}/{pair[1]}/{sender}/{receiver}"

    def size(self, edge: str, direction: str, pair: Pair, part: int, parts: int) -> int:
        layout = self.layouts[edge]
        entries = layout.numel(pair)
        return (
            (part + 1) * entries // parts - part * entries // parts + (direction == "bwd")
        ) * layout.dtype.itemsize

    def _needs(self) -> dict[tuple[str, str, int], list[tuple[str, tuple[int, int]]]]:
        """The messages that each computation of this rank consumes: (key, (sender, bytes))."""
        found: dict[tuple[str, str, int], list[tuple[str, tuple[int, int]]]] = defaultdict(list)
        for e in self.plan.edges:
            for pair in self.layouts[e.name].pairs:
                a, b = (
                    self.e.replicas[n][self.schedule.micro_batches[n][m].replica]
                    for n, m in zip((e.src, e.dst), pair, strict=True)
                )
                if self.e.rank in b:
                    found["F", e.dst, pair[1]] += self._arriving(e.name, "fwd", pair, routes(a, b))
                if self.e.rank in a and returns_gradient(e, self.e.sections):
                    found["B", e.src, pair[0]] += self._arriving(e.name, "bwd", pair, routes(b, a))
        return found

    def _arriving(
        self, edge: str, direction: str, pair: Pair, parts: tuple[Part, ...]
    ) -> Iterator[tuple[str, tuple[int, int]]]:
        for part in parts:
            if part.receiver == self.e.rank:
                size = self.size(edge, direction, pair, part.index, part.count)
                yield self.key(edge, direction, pair, part.sender, part.receiver), (part.sender, size)


def _wait(until: int) -> None:
    """Sleep until the clock says `until`."""
    left = until - time.monotonic_ns()
    if left > 0:
        time.sleep(left / 1e9)
