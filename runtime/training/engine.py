"""Executes one rank's program for one global batch: forward and backward of micro-batches, and the tensors
between sections.

A forward turns the received edges into leaves, runs the section, and keeps its graph until the backward,
which is one call for all of a micro-batch's roots: the edges' tensors with the gradients that came back, and
the loss terms with their coefficients. What a rank's own sections hand to each other takes the same cuts as a
message but is never sent. The program's order is taken as it is: the check before the step has proved it
complete and free of deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from secc.runtime.comm.edge_messages import EdgeLayout, Pair
from secc.runtime.comm.p2p_channels import Message, Transport, message_of
from secc.runtime.monitoring.chrome_trace import Trace
from secc.runtime.monitoring.section_times import Stopwatch
from secc.runtime.parameters.zero3 import Passes
from secc.runtime.plan.batch_sizes import padded
from secc.runtime.plan.replica_routes import Part, Ranks, gathered, replicas, routes
from secc.runtime.plan.schema import Edge, Plan, logged_name
from secc.runtime.plan.step_program import (
    Instruction,
    MicroBatch,
    SampleMeta,
    Schedule,
    owes_backward,
    returns_gradient,
)
from secc.runtime.randomness.micro_batch_draws import Draws, Randomness, backward_of, forward_of, sample_keys
from secc.runtime.sections.base import Batch, Section, Tensors
from secc.runtime.tensor_parallel.replica_group import Group
from secc.runtime.training.split_backward import split_backward


@dataclass(frozen=True)
class StepInput:
    """All that a rank needs for one global batch.

    `samples` are those of the whole global batch, and behind them those of the next one where sections run
    ahead; `batch_of` gives the collated batch of one of this rank's micro-batches on the device;
    `coefficients` holds each loss term's factor; `seed` names the random stream of the step, `later_seed`
    that of the next.
    """

    schedule: Schedule
    samples: Sequence[SampleMeta]
    batch_of: Callable[[MicroBatch], Batch]
    coefficients: Mapping[str, float]
    seed: int
    later_seed: int = 0


@dataclass
class _Live:
    """A micro-batch between its forward and the moment when nothing needs it any more."""

    backward_owed: bool
    draws: Draws | None  # its random numbers, where the model draws any
    later: bool = False  # whether it is of the next global batch, and so kept until then
    leaves: Tensors = field(default_factory=dict)  # of the edges whose gradient goes back
    outs: Tensors = field(default_factory=dict)
    terms: Tensors = field(default_factory=dict)
    rest: Callable[[], None] | None = None  # the second part of a split backward
    # messages and same-rank consumers that have not taken their part of `outs`, or, after B, of the gradients
    waiting: int = 0


class OtherDtype(RuntimeError):
    """A section computes an edge in another dtype than the plan has: its model was cast after the plan was
    made."""

    def __init__(self, message: str, edge: str, dtype: torch.dtype) -> None:
        super().__init__(message)
        self.edge, self.dtype = edge, str(dtype).removeprefix("torch.")


class _Arrive(torch.autograd.Function):
    """Makes a received tensor an inner node of the graph, so that a block may write to it in place as it may
    in the user's model."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, values: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.mark_dirty(values)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


class Engine:
    """Runs step programs on one rank.

    `on_last(section)` is called before the last backward of a section on this rank, `on_reduce(section)`
    behind it and where the program has REDUCE, which is all that there is without backwards. `groups` has the
    ranks of this rank's replica of each section whose replicas have several, `passes` those of sections that
    gather their parameters.
    """

    def __init__(
        self,
        plan: Plan,
        sections: Mapping[str, Section],
        transport: Transport,
        on_reduce: Callable[[str], None],
        trace: Trace,
        on_last: Callable[[str], None] = lambda section: None,
        groups: Mapping[str, Group] | None = None,
        passes: Mapping[str, Passes] | None = None,
    ) -> None:
        self.plan, self.sections, self.transport, self.trace = plan, sections, transport, trace
        self.on_reduce, self.on_last, self.groups = on_reduce, on_last, groups or {}
        self.passes = passes or {}
        self.rank, self.device = transport.rank, transport.device
        planned = {s.name: s for s in plan.sections}
        self.backward_owed = {name: owes_backward(s) for name, s in planned.items()}
        self.whole = {name: s.whole for name, s in planned.items()}
        self.splits = {name: s.weight_permille > 0 for name, s in planned.items()}
        self.ranks = {name: replicas(s) for name, s in planned.items()}
        self.returns_grad = {e.name: returns_gradient(e, planned) for e in plan.edges}
        self.into = {name: [e for e in plan.edges if e.dst == name] for name in planned}
        self.out_of = {name: [e for e in plan.edges if e.src == name] for name in planned}
        self.edges = {e.name: e for e in plan.edges}
        models = [s.whole_model for s in sections.values()]
        self.randomness = Randomness(models[0], plan.draws, plan.symbols) if plan.draws and models else None
        self.stopwatch = Stopwatch(self.device)
        self._laid: tuple[Schedule, list[Mapping[str, int]], Mapping[str, EdgeLayout]] | None = (
            None  # of the latest step
        )
        self.kept: dict[
            tuple[str, int], _Live
        ] = {}  # what was computed ahead: by section and number among those

    def layouts_of(self, step: StepInput) -> Mapping[str, EdgeLayout]:
        """The messages of each edge: those of the step before, if it was like this one."""
        sizes = [s.sizes for s in step.samples]
        if self._laid is None or self._laid[0] is not step.schedule or self._laid[1] != sizes:
            self._laid = (
                step.schedule,
                sizes,
                {e.name: EdgeLayout(e, self.plan, step.schedule, step.samples) for e in self.plan.edges},
            )
        return self._laid[2]

    def run(self, step: StepInput) -> torch.Tensor:
        """Execute this rank's program; gradients add to the parameters' `.grad`. Returns this rank's share of
        the loss (float64, 0-dim).

        `logged` then holds its shares of the scalars that forward returns beside the loss, by name.
        """
        execution = _Execution(self, step)
        loss = execution.run()
        self.logged = execution.logged
        return loss


class _Execution:
    """One step of one rank."""

    def __init__(self, engine: Engine, step: StepInput) -> None:
        self.engine, self.step = engine, step
        plan = engine.plan
        self.sizes = padded(plan, step.samples, step.schedule.own)
        own = step.schedule.own if step.schedule.own is not None else len(step.samples)
        parts = ((step.seed, step.samples[:own]), (step.later_seed, step.samples[own:]))
        self.keys = (
            [k for seed, some in parts for k in sample_keys(seed, some)]
            if engine.randomness is not None
            else []
        )
        self.layouts = engine.layouts_of(step)
        self.live: dict[tuple[str, int], _Live] = {}
        self.loss = torch.zeros((), dtype=torch.float64, device=engine.device)
        self.logged = {t.logs: torch.zeros_like(self.loss) for t in plan.terms if t.logs}

    def run(self) -> torch.Tensor:
        program = self.step.schedule.programs[self.engine.rank]
        transport = self.engine.transport
        self.take_over()
        transport.start(self.layouts, self.step.schedule)
        last = {i.section: i for i in program if i.kind in ("B", "W")}
        for index, i in enumerate(program):
            transport.come_to(index)
            ends = last.get(i.section) is i
            if ends:
                self.engine.on_last(i.section)
            match i.kind:
                case "F" | "B" if not self.micro(i.section, i.micro).samples:
                    with self.computing(i):
                        pass  # it only takes part in the others' gathers
                case "F":
                    self.forward(i)
                case "B":
                    self.backward(i)
                case "W":
                    self.weights(i)
                case "SEND":
                    self.send(i)
                case "RECV":
                    transport.receive(message_of(i))
                case "REDUCE":
                    self.engine.on_reduce(i.section)
                case "STEP":
                    break
                case _:
                    raise RuntimeError(f"rank {self.engine.rank} cannot execute `{i}`")
            if ends:
                self.engine.on_reduce(i.section)
        transport.finish()
        self.hand_over()
        if self.live:
            raise RuntimeError(
                f"rank {self.engine.rank}: the program ended before {sorted(self.live)} were done"
            )
        return self.loss

    # -- compute
    # ------------------------------------------------------------------------------------------------------------------

    def forward(self, i: Instruction) -> None:
        engine, micro = self.engine, self.micro(i.section, i.micro)
        section, with_grad = engine.sections[i.section], engine.backward_owed[i.section]
        batch = self.step.batch_of(micro)
        section.draws = self.draws(micro)
        live = _Live(with_grad, section.draws, self.step.schedule.is_later(micro))
        edges = self.receive_edges(i.section, i.micro, live)
        case = section.case(batch)
        if not edges.keys() >= set(case.receives):
            raise RuntimeError(
                f"`{i}`: case {case.method} takes edges {sorted(case.receives)}, but {sorted(edges)} have come"
            )
        with self.computing(i), torch.set_grad_enabled(with_grad), forward_of(live.draws):
            live.outs, live.terms = section(case, batch, edges)
        if not live.later:
            self.count(i, live)
        self.await_takers(i, live)
        if with_grad or live.waiting or live.later:
            self.live[i.section, i.micro] = live

    def count(self, i: Instruction, live: _Live) -> None:
        """Add the micro-batch's part to the loss, once for each replica."""
        if self.engine.rank == self.ranks_of(i.section, i.micro)[0]:
            self.add_loss(live.terms)

    def await_takers(self, i: Instruction, live: _Live) -> None:
        for edge in self.engine.out_of[i.section]:
            self.check_shape(i, edge, live.outs)
            live.waiting += sum(
                self.takers(*self.ends(edge, pair)) for pair in self.layouts[edge.name].of("src", i.micro)
            )

    def backward(self, i: Instruction) -> None:
        live = self.live[i.section, i.micro]
        gradients = self.receive_gradients(i.section, i.micro, live.outs)
        roots = [(live.outs[name], g) for name, g in gradients.items()]
        roots += [
            (t, torch.full_like(t, self.step.coefficients[name]))
            for name, t in live.terms.items()
            if t.requires_grad
        ]
        with self.computing(i), backward_of(live.draws):
            if self.engine.splits[i.section]:
                live.rest = split_backward(roots, list(live.leaves.values()))
            elif roots:
                torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
        # A consumer that sends no gradient back may come to its part of the tensors after this backward.
        constant = (e.name for e in self.engine.out_of[i.section] if not self.engine.returns_grad[e.name])
        live.outs = {name: live.outs[name].detach() for name in constant if name in live.outs}
        live.terms, live.backward_owed = {}, live.rest is not None
        live.waiting += sum(
            self.takers(*reversed(self.ends(self.engine.edges[name], pair)))
            for name in live.leaves
            for pair in self.layouts[name].of("dst", i.micro)
        )
        if live.waiting == 0 and not live.backward_owed:
            del self.live[i.section, i.micro]

    def weights(self, i: Instruction) -> None:
        """The second part of a split backward."""
        live = self.live[i.section, i.micro]
        assert live.rest is not None
        with self.computing(i), backward_of(live.draws):
            live.rest()
        live.rest, live.backward_owed = None, False
        if live.waiting == 0:
            del self.live[i.section, i.micro]

    def add_loss(self, terms: Tensors) -> None:
        for name, numerator in terms.items():
            share = numerator.detach().double() * self.step.coefficients[name]
            if logs := logged_name(name):
                self.logged[logs] += share
            else:
                self.loss += share

    # -- edges
    # --------------------------------------------------------------------------------------------------------------------

    def receive_edges(self, section: str, micro: int, live: _Live) -> Tensors:
        """The edges that come into a micro-batch; those from which it has no samples are absent. Their leaves
        are kept in `live`."""
        edges: Tensors = {}
        for edge in self.engine.into[section]:
            layout = self.layouts[edge.name]
            incoming = layout.of("dst", micro)
            if not incoming:
                continue
            tensor = self.received(edge, layout, incoming, micro)
            if self.engine.returns_grad[edge.name]:
                leaf = live.leaves[edge.name] = tensor.new_empty(()).expand(tensor.shape).requires_grad_()
                tensor = _Arrive.apply(leaf, tensor)
            edges[edge.name] = tensor
        return edges

    def received(self, edge: Edge, layout: EdgeLayout, incoming: Sequence[Pair], micro: int) -> torch.Tensor:
        """The tensor of an edge as the consumer takes it."""
        shape = layout.shape("dst", micro)
        if layout.whole:
            message = self.forward_message(edge, incoming[0])
            own = message.new_empty(0).set_(message)  # pyright: ignore[reportCallIssue, reportArgumentType]
            return own.resize_(shape)  # the same memory, but no view: a block may write to it
        tensor = torch.zeros(shape, dtype=layout.dtype, device=self.engine.device)
        for pair in incoming:
            layout.unpack(self.forward_message(edge, pair), tensor, "dst", pair)
        return tensor

    def forward_message(self, edge: Edge, pair: Pair) -> torch.Tensor:
        """The values of the rows of `pair`, from other ranks or from a section of this one."""
        sources, targets = self.ends(edge, pair)
        if self.engine.rank not in sources:
            parts = [self.take(edge, "fwd", pair, part) for part in self.arriving(sources, targets)]
            return self.gather(
                parts, edge.dst, gathered(sources, targets, self.layouts[edge.name].numel(pair))
            )
        message = self.layouts[edge.name].pack(
            self.live[edge.src, pair[0]].outs[edge.name].detach(), "src", pair
        )
        self.release(edge.src, pair[0])
        return message

    def receive_gradients(self, section: str, micro: int, outs: Tensors) -> Tensors:
        """The gradient of each outgoing edge that some sample's loss depends on, in the shape of the edge's
        tensor."""
        gradients: Tensors = {}
        for edge in self.engine.out_of[section]:
            if not self.engine.returns_grad[edge.name]:
                continue
            layout = self.layouts[edge.name]
            for pair in layout.of("src", micro):
                message, out = self.backward_message(edge, pair), outs[edge.name]
                if message is None or not out.requires_grad:
                    continue
                if layout.whole:
                    gradients[edge.name] = message.view(out.shape)
                    continue
                if edge.name not in gradients:
                    gradients[edge.name] = torch.zeros_like(out, memory_format=torch.contiguous_format)
                layout.unpack(message, gradients[edge.name], "src", pair)
        return gradients

    def backward_message(self, edge: Edge, pair: Pair) -> torch.Tensor | None:
        """The gradient of the rows of `pair`, None where the loss does not depend on them."""
        targets, sources = self.ends(edge, pair)
        if self.engine.rank in sources:
            message = self.gradient_of(edge, pair)
            self.release(edge.dst, pair[1])
            return message
        parts = [self.take(edge, "bwd", pair, part) for part in self.arriving(sources, targets)]
        if not all(bool(part[-1]) for part in parts):
            return None
        return self.gather(
            [part[:-1] for part in parts],
            edge.src,
            gathered(sources, targets, self.layouts[edge.name].numel(pair)),
        )

    def gather(self, parts: Sequence[torch.Tensor], section: str, lengths: Sequence[int]) -> torch.Tensor:
        """The whole message from this rank's parts and those of the others of its replica, who received
        `lengths` entries."""
        own = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return self.engine.groups[section].gather(own, lengths) if any(lengths) else own

    def gradient_of(self, edge: Edge, pair: Pair, *more: torch.Tensor) -> torch.Tensor | None:
        """The flat message, with `more` behind it."""
        gradient = self.live[edge.dst, pair[1]].leaves[edge.name].grad
        return None if gradient is None else self.layouts[edge.name].pack(gradient, "dst", pair, *more)

    def flagged(self, edge: Edge, pair: Pair, start: int, stop: int) -> torch.Tensor:
        """A part of a gradient message: the values and a 1, or zeros where there is no gradient, which is not
        the same as a zero one."""
        dtype, device = self.layouts[edge.name].dtype, self.engine.device
        message = self.gradient_of(edge, pair, torch.ones(1, dtype=dtype, device=device))
        if message is None:
            return torch.zeros(stop - start + 1, dtype=dtype, device=device)
        return (
            message if stop - start + 1 == message.numel() else torch.cat([message[start:stop], message[-1:]])
        )

    def send(self, i: Instruction) -> None:
        edge, message = self.engine.edges[i.edge], message_of(i)
        layout = self.layouts[edge.name]
        start, stop = message.bounds(layout)
        with self.transfer_event("SEND", message, self.engine.rank, i.peer):
            if message.direction == "fwd":
                values = layout.pack(
                    self.live[edge.src, i.src_micro].outs[edge.name].detach(), "src", message.pair
                )[start:stop]
                self.release(edge.src, i.src_micro)
            else:
                values = self.flagged(edge, message.pair, start, stop)
                self.release(edge.dst, i.dst_micro)
            self.engine.transport.send(message, values)

    def take(self, edge: Edge, direction: str, pair: Pair, part: Part) -> torch.Tensor:
        message = Message(edge.name, direction, pair, part.sender, part.index, part.count)
        with self.transfer_event("RECV", message, part.sender, self.engine.rank):
            return self.engine.transport.take(message)

    def release(self, section: str, micro: int) -> None:
        """One of those who wait for a micro-batch's tensors has taken its part; the last one frees them,
        unless a backward is owed."""
        live = self.live[section, micro]
        live.waiting -= 1
        if live.waiting == 0 and not live.backward_owed and not live.later:
            del self.live[section, micro]

    # -- running ahead
    # ------------------------------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """What this rank computed in the step before counts and is sent in this one."""
        for name, micros in self.step.schedule.computed.items():
            for number, micro in enumerate(sorted(micros)):
                if self.engine.rank in self.ranks_of(name, micro):
                    live, i = self.engine.kept.pop((name, number)), Instruction("F", name, micro=micro)
                    live.later = False
                    self.count(i, live)
                    self.await_takers(i, live)
                    if live.waiting:
                        self.live[name, micro] = live

    def hand_over(self) -> None:
        """Keep what was computed for the next step."""
        if self.engine.kept:
            raise RuntimeError(
                f"rank {self.engine.rank}: {sorted(self.engine.kept)} were computed ahead for a step that does not use them"
            )
        for name, micros in self.step.schedule.micro_batches.items():
            for number, m in enumerate(m for m in micros if self.step.schedule.is_later(m)):
                live = self.live.get((name, m.index))
                if live is not None and not live.waiting:
                    self.engine.kept[name, number] = self.live.pop((name, m.index))

    # -- helpers
    # ------------------------------------------------------------------------------------------------------------------

    def seed_of(self, micro: MicroBatch) -> int:
        return self.step.later_seed if self.step.schedule.is_later(micro) else self.step.seed

    def micro(self, section: str, index: int) -> MicroBatch:
        return self.step.schedule.micro_batches[section][index]

    def draws(self, micro: MicroBatch) -> Draws | None:
        """The random numbers of a micro-batch, None for a model that draws none."""
        if self.engine.randomness is None:
            return None
        seed = self.seed_of(micro)
        keys = [self.keys[s] for s in micro.samples]
        return self.engine.randomness.micro_batch(seed, keys, [self.sizes[s] for s in micro.samples])

    def ranks_of(self, section: str, index: int) -> Ranks:
        """The ranks of a micro-batch's replica."""
        return self.engine.ranks[section][self.micro(section, index).replica]

    def ends(self, edge: Edge, pair: Pair) -> tuple[Ranks, Ranks]:
        """The ranks of the producer and of the consumer."""
        return self.ranks_of(edge.src, pair[0]), self.ranks_of(edge.dst, pair[1])

    def arriving(self, sources: Ranks, targets: Ranks) -> list[Part]:
        """The parts of a message that come to this rank."""
        return [part for part in routes(sources, targets) if part.receiver == self.engine.rank]

    def takers(self, sources: Ranks, targets: Ranks) -> int:
        """How often this rank's tensor is taken: once for each part that it sends, and once if it is at the
        other end, too."""
        rank = self.engine.rank
        return sum(part.sender == rank for part in routes(sources, targets)) + (rank in targets)

    def check_shape(self, i: Instruction, edge: Edge, outs: Tensors) -> None:
        """A tensor of another shape than the consumer expects would be cut wrongly without an error.

        A case leaves out an edge that it has no rows for; its messages are empty. Where stages of a pipeline
        take a case that does without, both do, and nobody reads what is sent.
        """
        layout = self.layouts[edge.name]
        if not layout.of("src", i.micro):
            return
        shape = layout.shape("src", i.micro)
        if edge.name not in outs and (layout.whole or shape[edge.dim] == 0):
            outs[edge.name] = torch.zeros(shape, dtype=layout.dtype, device=self.engine.device)
        if edge.name not in outs:
            raise RuntimeError(f"`{i}`: the section's case does not compute edge {edge.name}")
        tensor = outs[edge.name]
        if tuple(tensor.shape) == shape and tensor.dtype != layout.dtype:
            raise OtherDtype(
                f"`{i}`: edge {edge.name} is {tensor.dtype}, but the plan has {layout.dtype}",
                edge.name,
                tensor.dtype,
            )
        if tuple(tensor.shape) != shape:
            found = f"{tensor.dtype}{list(tensor.shape)}"
            raise RuntimeError(
                f"`{i}`: edge {edge.name} is {found}, but the plan has {layout.dtype}{list(shape)}"
            )

    def ids(self, samples: Sequence[int]) -> list[int]:
        return [self.step.samples[s].id for s in samples]

    @contextmanager
    def computing(self, i: Instruction) -> Iterator[None]:
        """Around what an instruction computes: where parameters are gathered, a pass through their units."""
        passes = self.engine.passes.get(i.section)
        watch = self.engine.stopwatch.running(self.engine.whole[i.section], i.kind)
        with self.compute_event(i, self.micro(i.section, i.micro)), watch:
            if passes is not None:
                passes.begin(backward=i.kind == "B")
            yield
            if passes is not None:
                passes.end()

    def compute_event(self, i: Instruction, micro: MicroBatch) -> AbstractContextManager[None]:
        if not self.engine.trace.active:
            return nullcontext()
        args = {
            "kind": i.kind,
            "section": self.engine.whole[i.section],
            "replica": i.replica,
            "stage": i.stage,
            "microbatch": i.micro,
        }
        ahead = {"ahead": True} if self.step.schedule.is_later(micro) else {}
        return self.engine.trace.event(
            f"{i.kind} {i.section} {i.micro}", **args, samples=self.ids(micro.samples), **ahead
        )

    def transfer_event(self, kind: str, message: Message, src: int, dst: int) -> AbstractContextManager[None]:
        if not self.engine.trace.active:
            return nullcontext()
        layout = self.layouts[message.edge]
        args = {"kind": kind, "edge": message.edge, "direction": message.direction, "src": src, "dst": dst}
        size = message.numel(layout) * layout.dtype.itemsize
        return self.engine.trace.event(
            f"{kind} {message.edge}", **args, samples=self.ids(layout.pairs[message.pair]), bytes=size
        )
