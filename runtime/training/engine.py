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

from secc.runtime.comm.edge_messages import EdgeLayout, MicroBatchPair
from secc.runtime.comm.p2p_channels import Message, Transport, message_of_instruction
from secc.runtime.monitoring.chrome_trace import ChromeTrace
from secc.runtime.monitoring.section_times import SectionStopwatch
from secc.runtime.parameters.zero3 import UnitGatherer
from secc.runtime.plan.batch_sizes import pad_sample_sizes
from secc.runtime.plan.replica_routes import (
    MessageSlice,
    Ranks,
    gather_counts,
    ranks_by_replica,
    route_message,
)
from secc.runtime.plan.schema import Edge, Plan, logged_scalar_name
from secc.runtime.plan.step_program import (
    Instruction,
    MicroBatch,
    SampleMeta,
    Schedule,
    owes_backward,
    returns_gradient,
)
from secc.runtime.randomness.micro_batch_draws import (
    MicroBatchDraws,
    ModelRandomness,
    backward_context,
    forward_context,
    make_sample_keys,
)
from secc.runtime.sections.base import Batch, SectionModule, Tensors
from secc.runtime.tensor_parallel.replica_group import ReplicaGroup
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
    load_batch: Callable[[MicroBatch], Batch]
    coefficients: Mapping[str, float]
    seed: int
    later_seed: int = 0


@dataclass
class _InFlightMicroBatch:
    """A micro-batch between its forward and the moment when nothing needs it any more."""

    backward_owed: bool
    draws: MicroBatchDraws | None  # its random numbers, where the model draws any
    is_prefetched: bool = False  # whether it is of the next global batch, and so kept until then
    edge_leaves: Tensors = field(default_factory=dict)  # of the edges whose gradient goes back
    outputs: Tensors = field(default_factory=dict)
    loss_terms: Tensors = field(default_factory=dict)
    weight_backward: Callable[[], None] | None = None  # the second part of a split backward
    # messages and same-rank consumers that have not taken their part of `outs`, or, after B, of the gradients
    pending_consumers: int = 0


class EdgeDtypeMismatch(RuntimeError):
    """A section computes an edge in another dtype than the plan has: its model was cast after the plan was
    made."""

    def __init__(self, message: str, edge: str, dtype: torch.dtype) -> None:
        super().__init__(message)
        self.edge, self.dtype = edge, str(dtype).removeprefix("torch.")


class _AttachReceived(torch.autograd.Function):
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
        sections: Mapping[str, SectionModule],
        transport: Transport,
        on_reduce: Callable[[str], None],
        trace: ChromeTrace,
        on_last: Callable[[str], None] = lambda section: None,
        groups: Mapping[str, ReplicaGroup] | None = None,
        passes: Mapping[str, UnitGatherer] | None = None,
    ) -> None:
        self.plan, self.sections, self.transport, self.trace = plan, sections, transport, trace
        self.on_reduce, self.on_last_backward, self.groups = on_reduce, on_last, groups or {}
        self.gatherers = passes or {}
        self.rank, self.device = transport.rank, transport.device
        planned = {s.name: s for s in plan.sections}
        self.backward_owed = {name: owes_backward(s) for name, s in planned.items()}
        self.whole_section = {name: s.user_section_name for name, s in planned.items()}
        self.splits_backward = {name: s.weight_permille > 0 for name, s in planned.items()}
        self.replica_ranks = {name: ranks_by_replica(s) for name, s in planned.items()}
        self.returns_gradient = {e.name: returns_gradient(e, planned) for e in plan.edges}
        self.edges_into = {name: [e for e in plan.edges if e.dst == name] for name in planned}
        self.edges_out_of = {name: [e for e in plan.edges if e.src == name] for name in planned}
        self.edges = {e.name: e for e in plan.edges}
        models = [s.whole_model for s in sections.values()]
        self.randomness = (
            ModelRandomness(models[0], plan.draws, plan.symbols) if plan.draws and models else None
        )
        self.stopwatch = SectionStopwatch(self.device)
        self._layout_cache: tuple[Schedule, list[Mapping[str, int]], Mapping[str, EdgeLayout]] | None = (
            None  # of the latest step
        )
        self.prefetched: dict[
            tuple[str, int], _InFlightMicroBatch
        ] = {}  # what was computed ahead: by section and number among those

    def edge_layouts(self, step: StepInput) -> Mapping[str, EdgeLayout]:
        """The messages of each edge: those of the step before, if it was like this one."""
        sizes = [s.sizes for s in step.samples]
        if (
            self._layout_cache is None
            or self._layout_cache[0] is not step.schedule
            or self._layout_cache[1] != sizes
        ):
            self._layout_cache = (
                step.schedule,
                sizes,
                {e.name: EdgeLayout(e, self.plan, step.schedule, step.samples) for e in self.plan.edges},
            )
        return self._layout_cache[2]

    def run_step(self, step: StepInput) -> torch.Tensor:
        """Execute this rank's program; gradients add to the parameters' `.grad`. Returns this rank's share of
        the loss (float64, 0-dim).

        `logged` then holds its shares of the scalars that forward returns beside the loss, by name.
        """
        execution = _StepExecution(self, step)
        loss = execution.run_program()
        self.logged = execution.logged
        return loss


class _StepExecution:
    """One step of one rank."""

    def __init__(self, engine: Engine, step: StepInput) -> None:
        self.engine, self.step = engine, step
        plan = engine.plan
        self.sizes = pad_sample_sizes(plan, step.samples, step.schedule.own_samples)
        own = step.schedule.own_samples if step.schedule.own_samples is not None else len(step.samples)
        parts = ((step.seed, step.samples[:own]), (step.later_seed, step.samples[own:]))
        self.sample_keys = (
            [k for seed, some in parts for k in make_sample_keys(seed, some)]
            if engine.randomness is not None
            else []
        )
        self.layouts = engine.edge_layouts(step)
        self.in_flight: dict[tuple[str, int], _InFlightMicroBatch] = {}
        self.loss = torch.zeros((), dtype=torch.float64, device=engine.device)
        self.logged = {t.logged_scalar: torch.zeros_like(self.loss) for t in plan.terms if t.logged_scalar}

    def run_program(self) -> torch.Tensor:
        program = self.step.schedule.programs[self.engine.rank]
        transport = self.engine.transport
        self.restore_prefetched()
        transport.start_step(self.layouts, self.step.schedule)
        last = {i.section: i for i in program if i.kind in ("B", "W")}
        for index, i in enumerate(program):
            transport.advance_to(index)
            ends = last.get(i.section) is i
            if ends:
                self.engine.on_last_backward(i.section)
            match i.kind:
                case "F" | "B" if not self.micro_batch(i.section, i.micro).samples:
                    with self.during_compute(i):
                        pass  # it only takes part in the others' gathers
                case "F":
                    self.run_forward(i)
                case "B":
                    self.run_backward(i)
                case "W":
                    self.run_weight_backward(i)
                case "SEND":
                    self.send_message(i)
                case "RECV":
                    transport.receive(message_of_instruction(i))
                case "REDUCE":
                    self.engine.on_reduce(i.section)
                case "STEP":
                    break
                case _:
                    raise RuntimeError(f"rank {self.engine.rank} cannot execute `{i}`")
            if ends:
                self.engine.on_reduce(i.section)
        transport.finish_step()
        self.save_prefetched()
        if self.in_flight:
            raise RuntimeError(
                f"rank {self.engine.rank}: the program ended before {sorted(self.in_flight)} were done"
            )
        return self.loss

    # -- compute
    # ------------------------------------------------------------------------------------------------------------------

    def run_forward(self, i: Instruction) -> None:
        engine, micro = self.engine, self.micro_batch(i.section, i.micro)
        section, with_grad = engine.sections[i.section], engine.backward_owed[i.section]
        batch = self.step.load_batch(micro)
        section.draws = self.random_draws(micro)
        live = _InFlightMicroBatch(with_grad, section.draws, self.step.schedule.is_of_next_batch(micro))
        edges = self.receive_edges(i.section, i.micro, live)
        case = section.select_case(batch)
        if not edges.keys() >= set(case.receives):
            raise RuntimeError(
                f"`{i}`: case {case.method} takes edges {sorted(case.receives)}, but {sorted(edges)} have come"
            )
        with self.during_compute(i), torch.set_grad_enabled(with_grad), forward_context(live.draws):
            live.outputs, live.loss_terms = section(case, batch, edges)
        if not live.is_prefetched:
            self.count_loss(i, live)
        self.expect_consumers(i, live)
        if with_grad or live.pending_consumers or live.is_prefetched:
            self.in_flight[i.section, i.micro] = live

    def count_loss(self, i: Instruction, live: _InFlightMicroBatch) -> None:
        """Add the micro-batch's part to the loss, once for each replica."""
        if self.engine.rank == self.ranks_of(i.section, i.micro)[0]:
            self.add_loss(live.loss_terms)

    def expect_consumers(self, i: Instruction, live: _InFlightMicroBatch) -> None:
        for edge in self.engine.edges_out_of[i.section]:
            self.check_edge_shape(i, edge, live.outputs)
            live.pending_consumers += sum(
                self.consumer_count(*self.endpoint_ranks(edge, pair))
                for pair in self.layouts[edge.name].pairs_of_micro_batch("src", i.micro)
            )

    def run_backward(self, i: Instruction) -> None:
        live = self.in_flight[i.section, i.micro]
        gradients = self.receive_gradients(i.section, i.micro, live.outputs)
        roots = [(live.outputs[name], g) for name, g in gradients.items()]
        roots += [
            (t, torch.full_like(t, self.step.coefficients[name]))
            for name, t in live.loss_terms.items()
            if t.requires_grad
        ]
        with self.during_compute(i), backward_context(live.draws):
            if self.engine.splits_backward[i.section]:
                live.weight_backward = split_backward(roots, list(live.edge_leaves.values()))
            elif roots:
                torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
        # A consumer that sends no gradient back may come to its part of the tensors after this backward.
        constant = (
            e.name for e in self.engine.edges_out_of[i.section] if not self.engine.returns_gradient[e.name]
        )
        live.outputs = {name: live.outputs[name].detach() for name in constant if name in live.outputs}
        live.loss_terms, live.backward_owed = {}, live.weight_backward is not None
        live.pending_consumers += sum(
            self.consumer_count(*reversed(self.endpoint_ranks(self.engine.edges[name], pair)))
            for name in live.edge_leaves
            for pair in self.layouts[name].pairs_of_micro_batch("dst", i.micro)
        )
        if live.pending_consumers == 0 and not live.backward_owed:
            del self.in_flight[i.section, i.micro]

    def run_weight_backward(self, i: Instruction) -> None:
        """The second part of a split backward."""
        live = self.in_flight[i.section, i.micro]
        assert live.weight_backward is not None
        with self.during_compute(i), backward_context(live.draws):
            live.weight_backward()
        live.weight_backward, live.backward_owed = None, False
        if live.pending_consumers == 0:
            del self.in_flight[i.section, i.micro]

    def add_loss(self, terms: Tensors) -> None:
        for name, numerator in terms.items():
            share = numerator.detach().double() * self.step.coefficients[name]
            if logs := logged_scalar_name(name):
                self.logged[logs] += share
            else:
                self.loss += share

    # -- edges
    # --------------------------------------------------------------------------------------------------------------------

    def receive_edges(self, section: str, micro: int, live: _InFlightMicroBatch) -> Tensors:
        """The edges that come into a micro-batch; those from which it has no samples are absent. Their leaves
        are kept in `live`."""
        edges: Tensors = {}
        for edge in self.engine.edges_into[section]:
            layout = self.layouts[edge.name]
            incoming = layout.pairs_of_micro_batch("dst", micro)
            if not incoming:
                continue
            tensor = self.assemble_edge(edge, layout, incoming, micro)
            if self.engine.returns_gradient[edge.name]:
                leaf = live.edge_leaves[edge.name] = (
                    tensor.new_empty(()).expand(tensor.shape).requires_grad_()
                )
                tensor = _AttachReceived.apply(leaf, tensor)
            edges[edge.name] = tensor
        return edges

    def assemble_edge(
        self, edge: Edge, layout: EdgeLayout, incoming: Sequence[MicroBatchPair], micro: int
    ) -> torch.Tensor:
        """The tensor of an edge as the consumer takes it."""
        shape = layout.tensor_shape("dst", micro)
        if layout.is_whole:
            message = self.receive_forward(edge, incoming[0])
            own = message.new_empty(0).set_(message)  # pyright: ignore[reportCallIssue, reportArgumentType]
            return own.resize_(shape)  # the same memory, but no view: a block may write to it
        tensor = torch.zeros(shape, dtype=layout.dtype, device=self.engine.device)
        for pair in incoming:
            layout.unpack_message(self.receive_forward(edge, pair), tensor, "dst", pair)
        return tensor

    def receive_forward(self, edge: Edge, pair: MicroBatchPair) -> torch.Tensor:
        """The values of the rows of `pair`, from other ranks or from a section of this one."""
        sources, targets = self.endpoint_ranks(edge, pair)
        if self.engine.rank not in sources:
            parts = [
                self.take_message_slice(edge, "fwd", pair, part)
                for part in self.arriving_slices(sources, targets)
            ]
            return self.gather_message(
                parts, edge.dst, gather_counts(sources, targets, self.layouts[edge.name].message_numel(pair))
            )
        message = self.layouts[edge.name].pack_message(
            self.in_flight[edge.src, pair[0]].outputs[edge.name].detach(), "src", pair
        )
        self.release_consumer(edge.src, pair[0])
        return message

    def receive_gradients(self, section: str, micro: int, outs: Tensors) -> Tensors:
        """The gradient of each outgoing edge that some sample's loss depends on, in the shape of the edge's
        tensor."""
        gradients: Tensors = {}
        for edge in self.engine.edges_out_of[section]:
            if not self.engine.returns_gradient[edge.name]:
                continue
            layout = self.layouts[edge.name]
            for pair in layout.pairs_of_micro_batch("src", micro):
                message, out = self.receive_backward(edge, pair), outs[edge.name]
                if message is None or not out.requires_grad:
                    continue
                if layout.is_whole:
                    gradients[edge.name] = message.view(out.shape)
                    continue
                if edge.name not in gradients:
                    gradients[edge.name] = torch.zeros_like(out, memory_format=torch.contiguous_format)
                layout.unpack_message(message, gradients[edge.name], "src", pair)
        return gradients

    def receive_backward(self, edge: Edge, pair: MicroBatchPair) -> torch.Tensor | None:
        """The gradient of the rows of `pair`, None where the loss does not depend on them."""
        targets, sources = self.endpoint_ranks(edge, pair)
        if self.engine.rank in sources:
            message = self.pack_gradient(edge, pair)
            self.release_consumer(edge.dst, pair[1])
            return message
        parts = [
            self.take_message_slice(edge, "bwd", pair, part)
            for part in self.arriving_slices(sources, targets)
        ]
        if not all(bool(part[-1]) for part in parts):
            return None
        return self.gather_message(
            [part[:-1] for part in parts],
            edge.src,
            gather_counts(sources, targets, self.layouts[edge.name].message_numel(pair)),
        )

    def gather_message(
        self, parts: Sequence[torch.Tensor], section: str, lengths: Sequence[int]
    ) -> torch.Tensor:
        """The whole message from this rank's parts and those of the others of its replica, who received
        `lengths` entries."""
        own = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return self.engine.groups[section].all_gather(own, lengths) if any(lengths) else own

    def pack_gradient(self, edge: Edge, pair: MicroBatchPair, *more: torch.Tensor) -> torch.Tensor | None:
        """The flat message, with `more` behind it."""
        gradient = self.in_flight[edge.dst, pair[1]].edge_leaves[edge.name].grad
        return (
            None if gradient is None else self.layouts[edge.name].pack_message(gradient, "dst", pair, *more)
        )

    def pack_flagged_gradient(self, edge: Edge, pair: MicroBatchPair, start: int, stop: int) -> torch.Tensor:
        """A part of a gradient message: the values and a 1, or zeros where there is no gradient, which is not
        the same as a zero one."""
        dtype, device = self.layouts[edge.name].dtype, self.engine.device
        message = self.pack_gradient(edge, pair, torch.ones(1, dtype=dtype, device=device))
        if message is None:
            return torch.zeros(stop - start + 1, dtype=dtype, device=device)
        return (
            message if stop - start + 1 == message.numel() else torch.cat([message[start:stop], message[-1:]])
        )

    def send_message(self, i: Instruction) -> None:
        edge, message = self.engine.edges[i.edge], message_of_instruction(i)
        layout = self.layouts[edge.name]
        start, stop = message.slice_bounds(layout)
        with self.transfer_event("SEND", message, self.engine.rank, i.peer):
            if message.direction == "fwd":
                values = layout.pack_message(
                    self.in_flight[edge.src, i.src_micro].outputs[edge.name].detach(), "src", message.pair
                )[start:stop]
                self.release_consumer(edge.src, i.src_micro)
            else:
                values = self.pack_flagged_gradient(edge, message.pair, start, stop)
                self.release_consumer(edge.dst, i.dst_micro)
            self.engine.transport.send(message, values)

    def take_message_slice(
        self, edge: Edge, direction: str, pair: MicroBatchPair, part: MessageSlice
    ) -> torch.Tensor:
        message = Message(edge.name, direction, pair, part.sender, part.index, part.count)
        with self.transfer_event("RECV", message, part.sender, self.engine.rank):
            return self.engine.transport.take_values(message)

    def release_consumer(self, section: str, micro: int) -> None:
        """One of those who wait for a micro-batch's tensors has taken its part; the last one frees them,
        unless a backward is owed."""
        live = self.in_flight[section, micro]
        live.pending_consumers -= 1
        if live.pending_consumers == 0 and not live.backward_owed and not live.is_prefetched:
            del self.in_flight[section, micro]

    # -- running ahead
    # ------------------------------------------------------------------------------------------------------------

    def restore_prefetched(self) -> None:
        """What this rank computed in the step before counts and is sent in this one."""
        for name, micros in self.step.schedule.prefetched.items():
            for number, micro in enumerate(sorted(micros)):
                if self.engine.rank in self.ranks_of(name, micro):
                    live, i = self.engine.prefetched.pop((name, number)), Instruction("F", name, micro=micro)
                    live.is_prefetched = False
                    self.count_loss(i, live)
                    self.expect_consumers(i, live)
                    if live.pending_consumers:
                        self.in_flight[name, micro] = live

    def save_prefetched(self) -> None:
        """Keep what was computed for the next step."""
        if self.engine.prefetched:
            raise RuntimeError(
                f"rank {self.engine.rank}: {sorted(self.engine.prefetched)} were computed ahead for a step that does not use them"
            )
        for name, micros in self.step.schedule.micro_batches.items():
            for number, m in enumerate(m for m in micros if self.step.schedule.is_of_next_batch(m)):
                live = self.in_flight.get((name, m.index))
                if live is not None and not live.pending_consumers:
                    self.engine.prefetched[name, number] = self.in_flight.pop((name, m.index))

    # -- helpers
    # ------------------------------------------------------------------------------------------------------------------

    def seed_of(self, micro: MicroBatch) -> int:
        return self.step.later_seed if self.step.schedule.is_of_next_batch(micro) else self.step.seed

    def micro_batch(self, section: str, index: int) -> MicroBatch:
        return self.step.schedule.micro_batches[section][index]

    def random_draws(self, micro: MicroBatch) -> MicroBatchDraws | None:
        """The random numbers of a micro-batch, None for a model that draws none."""
        if self.engine.randomness is None:
            return None
        seed = self.seed_of(micro)
        keys = [self.sample_keys[s] for s in micro.samples]
        return self.engine.randomness.make_draws(seed, keys, [self.sizes[s] for s in micro.samples])

    def ranks_of(self, section: str, index: int) -> Ranks:
        """The ranks of a micro-batch's replica."""
        return self.engine.replica_ranks[section][self.micro_batch(section, index).replica]

    def endpoint_ranks(self, edge: Edge, pair: MicroBatchPair) -> tuple[Ranks, Ranks]:
        """The ranks of the producer and of the consumer."""
        return self.ranks_of(edge.src, pair[0]), self.ranks_of(edge.dst, pair[1])

    def arriving_slices(self, sources: Ranks, targets: Ranks) -> list[MessageSlice]:
        """The parts of a message that come to this rank."""
        return [part for part in route_message(sources, targets) if part.receiver == self.engine.rank]

    def consumer_count(self, sources: Ranks, targets: Ranks) -> int:
        """How often this rank's tensor is taken: once for each part that it sends, and once if it is at the
        other end, too."""
        rank = self.engine.rank
        return sum(part.sender == rank for part in route_message(sources, targets)) + (rank in targets)

    def check_edge_shape(self, i: Instruction, edge: Edge, outs: Tensors) -> None:
        """A tensor of another shape than the consumer expects would be cut wrongly without an error.

        A case leaves out an edge that it has no rows for; its messages are empty. Where stages of a pipeline
        take a case that does without, both do, and nobody reads what is sent.
        """
        layout = self.layouts[edge.name]
        if not layout.pairs_of_micro_batch("src", i.micro):
            return
        shape = layout.tensor_shape("src", i.micro)
        if edge.name not in outs and (layout.is_whole or shape[edge.dim] == 0):
            outs[edge.name] = torch.zeros(shape, dtype=layout.dtype, device=self.engine.device)
        if edge.name not in outs:
            raise RuntimeError(f"`{i}`: the section's case does not compute edge {edge.name}")
        tensor = outs[edge.name]
        if tuple(tensor.shape) == shape and tensor.dtype != layout.dtype:
            raise EdgeDtypeMismatch(
                f"`{i}`: edge {edge.name} is {tensor.dtype}, but the plan has {layout.dtype}",
                edge.name,
                tensor.dtype,
            )
        if tuple(tensor.shape) != shape:
            found = f"{tensor.dtype}{list(tensor.shape)}"
            raise RuntimeError(
                f"`{i}`: edge {edge.name} is {found}, but the plan has {layout.dtype}{list(shape)}"
            )

    def sample_ids(self, samples: Sequence[int]) -> list[int]:
        return [self.step.samples[s].id for s in samples]

    @contextmanager
    def during_compute(self, i: Instruction) -> Iterator[None]:
        """Around what an instruction computes: where parameters are gathered, a pass through their units."""
        passes = self.engine.gatherers.get(i.section)
        watch = self.engine.stopwatch.time_section(self.engine.whole_section[i.section], i.kind)
        with self.compute_event(i, self.micro_batch(i.section, i.micro)), watch:
            if passes is not None:
                passes.begin_pass(backward=i.kind == "B")
            yield
            if passes is not None:
                passes.end_pass()

    def compute_event(self, i: Instruction, micro: MicroBatch) -> AbstractContextManager[None]:
        if not self.engine.trace.is_active:
            return nullcontext()
        args = {
            "kind": i.kind,
            "section": self.engine.whole_section[i.section],
            "replica": i.replica,
            "stage": i.stage,
            "microbatch": i.micro,
        }
        ahead = {"ahead": True} if self.step.schedule.is_of_next_batch(micro) else {}
        return self.engine.trace.record_event(
            f"{i.kind} {i.section} {i.micro}", **args, samples=self.sample_ids(micro.samples), **ahead
        )

    def transfer_event(self, kind: str, message: Message, src: int, dst: int) -> AbstractContextManager[None]:
        if not self.engine.trace.is_active:
            return nullcontext()
        layout = self.layouts[message.edge]
        args = {"kind": kind, "edge": message.edge, "direction": message.direction, "src": src, "dst": dst}
        size = message.numel(layout) * layout.dtype.itemsize
        return self.engine.trace.record_event(
            f"{kind} {message.edge}", **args, samples=self.sample_ids(layout.pairs[message.pair]), bytes=size
        )
