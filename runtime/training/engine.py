"""Executes one rank's program for one global batch: forwards and backwards of micro-batches, and the messages
between sections.

A forward makes the received edges graph leaves, runs the section, and keeps its autograd graph until the
backward. A backward is one call over all roots of the micro-batch: its outgoing edges with the gradients that
came back, and its loss terms with their coefficients. Tensors between two sections on the same rank are cut
like messages but never sent. The program's order is not questioned here: the check before the step has proved
it complete and free of deadlock.

Of a micro-batch that is dealt to subgroups of its replica (`secc.runtime.plan.dealt_samples`), each rank runs
the part of its subgroup, or nothing. Messages between sections are those of the whole micro-batch: tensors
that arrive are cut to the own part, outputs and gradients of received edges are joined, so that sends know
nothing of it. Between stages of a pipeline, each subgroup sends its part (`secc.runtime.comm.edge_messages`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from secc.runtime.comm.edge_messages import EdgeLayout, MicroBatchPair
from secc.runtime.comm.p2p_channels import Message, Transport, message_of_instruction
from secc.runtime.host.activity import Waiting
from secc.runtime.host.hidden_ranks import hidden_process_group
from secc.runtime.monitoring.chrome_trace import ChromeTrace
from secc.runtime.monitoring.section_times import SectionStopwatch
from secc.runtime.parameters.zero3 import UnitGatherer
from secc.runtime.plan.batch_sizes import pad_sample_sizes
from secc.runtime.plan.dealt_samples import DealtMicroBatches
from secc.runtime.plan.replica_routes import (
    MessageSlice,
    Ranks,
    gather_counts,
    ranks_by_replica,
    route_message,
    slice_bounds,
)
from secc.runtime.plan.schema import OUTPUT_PREFIX, Edge, Plan, is_gathered, is_statistic, logged_scalar_name
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
from secc.runtime.sections.batch_norm_strides import batch_norms_of_one
from secc.runtime.sections.batch_statistic import BatchPlaces, BatchRows, BatchValues
from secc.runtime.sections.synchronized_norms import SynchronizedNorms
from secc.runtime.tensor_parallel.expert_parallel import TokenExchange
from secc.runtime.tensor_parallel.replica_group import ReplicaGroup
from secc.runtime.training.offloaded_activations import ActivationOffload, SavedActivations
from secc.runtime.training.split_backward import split_backward


@dataclass(frozen=True)
class StepInput:
    """All that a rank needs for one global batch.

    `samples`: those of the global batch, followed by those of the next batch if sections prefetch it.
    `load_batch`: returns the collated batch of one of this rank's micro-batches, on the device.
    `coefficients`: the factor of each term in the loss of this batch; None in an evaluation, which sums
    numerators by term. `seed` and `later_seed`: the random streams of this step and the next. `statistics`:
    of the global batch, by term; none in a first pass, which finds them. `first_sample`: the place of the
    first sample in a batch that is evaluated in parts.
    """

    schedule: Schedule
    samples: Sequence[SampleMeta]
    load_batch: Callable[[MicroBatch], Batch]
    coefficients: Mapping[str, float] | None
    seed: int
    later_seed: int = 0
    statistics: BatchValues = field(default_factory=dict)
    first_sample: int = 0


@dataclass
class _InFlightMicroBatch:
    """State of a micro-batch: created by its forward, released when its backward has run and all consumers on
    this and other ranks have taken its tensors."""

    backward_owed: bool
    draws: MicroBatchDraws | None  # its random numbers, None for a model without random ops
    is_prefetched: bool = False  # it belongs to the next global batch and is kept until that step
    edge_leaves: Tensors = field(default_factory=dict)  # of received edges that return a gradient
    outputs: Tensors = field(default_factory=dict)
    loss_terms: Tensors = field(default_factory=dict)
    exchange_end: torch.Tensor | None = None  # what the backward starts from, too (`TokenExchange`)
    weight_backward: Callable[[], None] | None = None  # the pending second part of a split backward
    saved: SavedActivations | None = None  # what is in host memory until the backward
    part: _OwnPart | None = None  # if the micro-batch is dealt; the other tensors are then those of all of it
    # Messages and consumers on this rank that have yet to take their part: before the backward of `outputs`,
    # after it of the leaves' gradients.
    pending_consumers: int = 0


@dataclass
class _OwnPart:
    """What this rank computes of a dealt micro-batch, together with the others of its subgroup, `row_ranks`
    in all: leaves and outputs of the subgroup's samples, by edge."""

    micro: MicroBatch
    row_ranks: int
    edge_leaves: Tensors = field(default_factory=dict)
    outputs: Tensors = field(default_factory=dict)


class _AttachReceived(torch.autograd.Function):
    """Makes a received tensor an inner node of the graph instead of a leaf, so that a block may write to it
    in place as in the user's model."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, values: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.mark_dirty(values)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


def _make_leaf(values: torch.Tensor) -> torch.Tensor:
    """Returns a leaf for the gradient of `values`; it needs no memory for values of its own."""
    return values.new_empty(()).expand(values.shape).requires_grad_()


class Engine:
    """Runs step programs on one rank.

    `on_last(section)` is called before the last backward of a section in a program, `on_reduce(section)`
    after it and at the program's REDUCE instructions (for sections without a backward on this rank).
    `groups`: the process group of this rank's replica, for sections with several ranks per replica. `passes`:
    the gatherers of sections with zero3. `evaluates`: dropout in glue is off; blocks have their own mode.
    `exchanges`: of sections in which replicas have different experts. `norms`: of sections that replicas sum
    statistics of. `stopwatch`: of the training engine, for an engine that uses the same process groups.
    `accumulating(section)` makes the context of its backwards. `before_compute(section, whole)` waits for
    parameters that are on their way, with `whole` for those of layers, too. `activations`: moves to host
    memory what forwards save, for sections that ask for it.
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
        evaluates: bool = False,
        exchanges: Mapping[str, TokenExchange] | None = None,
        norms: Mapping[str, SynchronizedNorms] | None = None,
        stopwatch: SectionStopwatch | None = None,
        accumulating: Callable[[str], AbstractContextManager[None]] = lambda section: nullcontext(),
        activations: ActivationOffload | None = None,
        before_compute: Callable[[str, bool], None] = lambda section, whole: None,
    ) -> None:
        self.accumulating, self.activations = accumulating, activations
        self.before_compute = before_compute
        self.plan, self.sections, self.transport, self.trace = plan, sections, transport, trace
        self.on_reduce, self.on_last_backward, self.groups = on_reduce, on_last, groups or {}
        self.gatherers, self.exchanges, self.norms = passes or {}, exchanges or {}, norms or {}
        self.evaluates, self.step_count = evaluates, 0
        self.rank, self.device = transport.rank, transport.device
        planned = {s.name: s for s in plan.sections}
        self.backward_owed = {name: owes_backward(s) for name, s in planned.items()}
        self.whole_section = {name: s.user_section_name for name, s in planned.items()}
        self.splits_backward = {name: s.weight_permille > 0 for name, s in planned.items()}
        self.tp_sizes = {name: s.mesh.tp for name, s in planned.items()}
        self.cp_sizes = {name: s.mesh.cp for name, s in planned.items()}
        self.replica_ranks = {name: ranks_by_replica(s) for name, s in planned.items()}
        self.returns_gradient = {e.name: returns_gradient(e, planned) for e in plan.edges}
        self.edges_into = {name: [e for e in plan.edges if e.dst == name] for name in planned}
        self.edges_out_of = {name: [e for e in plan.edges if e.src == name] for name in planned}
        self.edges = {e.name: e for e in plan.edges}
        models = [s.whole_model for s in sections.values()]
        self.randomness = (
            ModelRandomness(models[0], plan.draws, plan.symbols, evaluates) if plan.draws and models else None
        )
        self.stopwatch = SectionStopwatch(self.device) if stopwatch is None else stopwatch
        # (schedule, sizes of samples, layouts) of the previous step.
        self._layout_cache: tuple[Schedule, list[Mapping[str, int]], Mapping[str, EdgeLayout]] | None = None
        # Prefetched micro-batches of the next step, by section and number among its prefetched ones.
        self.prefetched: dict[tuple[str, int], _InFlightMicroBatch] = {}
        # Of an evaluation: the tensors that `metrics()` asks for, by output and micro-batch, on the first
        # rank of the replica that computed them.
        self.outputs: dict[tuple[str, int], torch.Tensor] = {}

    def edge_layouts(self, step: StepInput, dealt: DealtMicroBatches) -> Mapping[str, EdgeLayout]:
        """Returns the message layout of each edge. Layouts depend on the schedule and on sample sizes only,
        so those of the previous step are reused if both are unchanged."""
        sizes = [s.sizes for s in step.samples]
        cached = self._layout_cache
        if cached is not None and cached[0] is step.schedule and cached[1] == sizes:
            return cached[2]
        layouts = {
            e.name: EdgeLayout(e, self.plan, step.schedule, step.samples, dealt, self.rank)
            for e in self.plan.edges
        }
        self._layout_cache = step.schedule, sizes, layouts
        return layouts

    def run_step(self, step: StepInput) -> torch.Tensor:
        """Executes this rank's program; gradients accumulate in the parameters' `.grad`. Returns this rank's
        share of the loss (float64, 0-dim).

        Afterwards `logged` holds this rank's shares of the scalars that the user's forward returns next to
        the loss. Without coefficients the loss is 0, `numerators` holds this rank's sums by term, and
        `outputs` the tensors that `metrics()` asks for.
        """
        self.step_count += 1
        self.outputs = {}
        execution = _StepExecution(self, step)
        with batch_norms_of_one(self.device), hidden_process_group():
            loss = execution.run_program()
        self.logged, self.numerators = execution.logged, execution.numerators
        return loss


class _StepExecution:
    """The execution of one step on one rank."""

    def __init__(self, engine: Engine, step: StepInput) -> None:
        self.engine, self.step = engine, step
        plan = engine.plan
        self.sizes = pad_sample_sizes(plan, step.samples, step.schedule.own_samples)
        # Random numbers are keyed by seed and sample, so a prefetched sample draws the same numbers as if it
        # were computed in its own step.
        own = step.schedule.own_samples if step.schedule.own_samples is not None else len(step.samples)
        seeded = ((step.seed, step.samples[:own]), (step.later_seed, step.samples[own:]))
        self.own_samples, self.sample_keys = own, list[int]()
        if engine.randomness is not None:
            self.sample_keys = [key for seed, samples in seeded for key in make_sample_keys(seed, samples)]
        self.dealt = DealtMicroBatches(plan, step.samples, step.schedule.own_samples)
        self.layouts = engine.edge_layouts(step, self.dealt)
        self.in_flight: dict[tuple[str, int], _InFlightMicroBatch] = {}
        self.empty_passes: dict[tuple[str, int], torch.Tensor] = {}  # what their backward starts from
        self.loss = torch.zeros((), dtype=torch.float64, device=engine.device)
        self.logged = {t.logged_scalar: torch.zeros_like(self.loss) for t in plan.terms if t.logged_scalar}
        self.numerators: dict[str, torch.Tensor] = {}

    def run_program(self) -> torch.Tensor:
        """Executes the instructions of this rank in order and returns its share of the loss."""
        program, activity = self.step.schedule.programs[self.engine.rank], self.engine.trace.activity
        transport = self.engine.transport
        self.restore_prefetched()
        for name, norms in self.engine.norms.items():
            micros = self.step.schedule.micro_batches[name]
            if micros:
                norms.begin_step([bool(m.samples) for m in sorted(micros, key=lambda m: m.replica)])
        transport.start_step(self.layouts, self.step.schedule)
        last = {i.section: i for i in program if i.kind in ("B", "W")}
        for index, i in enumerate(program):
            activity.begin(i)
            transport.advance_to(index)
            is_last_backward = last.get(i.section) is i
            if i.kind in ("F", "B"):
                self.fetch_for_backward(program, index)
            if is_last_backward:
                # Gradient buckets may now start while this backward still runs.
                self.engine.on_last_backward(i.section)
            match i.kind:
                case "F" | "B" if not self.micro_batch(i.section, i.micro).samples:
                    # An empty micro-batch of a section that runs in rounds: other replicas compute in this
                    # one, and what they gather or exchange needs this rank.
                    with self.during_compute(i):
                        self.run_empty_pass(i)
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
            if is_last_backward:
                self.engine.on_reduce(i.section)
        with activity.during("its last sends", Waiting.PEERS):
            transport.finish_step()
        self.save_prefetched()
        if self.in_flight:
            raise RuntimeError(
                f"rank {self.engine.rank}: the program ended before {sorted(self.in_flight)} were done"
            )
        return self.loss

    # Compute.

    def run_forward(self, i: Instruction) -> None:
        """Runs the forward of one micro-batch and keeps its state while anything still needs it."""
        engine, micro = self.engine, self.micro_batch(i.section, i.micro)
        with_grad, own = engine.backward_owed[i.section], self.dealt.own_part(micro, engine.rank)
        live = _InFlightMicroBatch(with_grad, None, self.step.schedule.is_of_next_batch(micro))
        live.part = None if own is micro else _OwnPart(own, self.dealt.subgroup_size(micro))
        if own.samples:
            self.compute_forward(i, own, live)
        else:
            self.receive_edges(i.section, i.micro, live)
            exchange = engine.exchanges.get(i.section)
            with self.during_compute(i):
                # Other ranks compute their parts, and what they gather or exchange needs this one.
                if exchange is not None:
                    live.exchange_end = exchange.run_empty_forward(with_grad)
        if live.part is not None:
            live.part.outputs, live.outputs = live.outputs, self.join_outputs(i, micro, live.outputs)
        self.keep_outputs(i, live)
        if not live.is_prefetched:
            self.count_loss(i, live)
        self.expect_consumers(i, live)
        # A forward without gradients and without consumers leaves nothing behind.
        if with_grad or live.pending_consumers or live.is_prefetched:
            self.in_flight[i.section, i.micro] = live

    def compute_forward(self, i: Instruction, micro: MicroBatch, live: _InFlightMicroBatch) -> None:
        """Computes a micro-batch, or this rank's part of one: sets outputs and loss terms of `live`."""
        engine, section = self.engine, self.engine.sections[i.section]
        batch = self.step.load_batch(micro)
        live.draws = section.draws = self.random_draws(micro)
        section.statistics, section.places = self.step.statistics, self.find_places(micro)
        edges, exchange = self.receive_edges(i.section, i.micro, live), engine.exchanges.get(i.section)
        case = section.select_case(batch)
        if not edges.keys() >= set(case.receives):
            raise RuntimeError(
                f"`{i}`: case {case.method} takes edges {sorted(case.receives)}, but received {sorted(edges)}"
            )
        with (
            self.during_compute(i),
            torch.set_grad_enabled(live.backward_owed),
            forward_context(live.draws),
            self.record_saved(i.section, live) as live.saved,
        ):
            if exchange is not None:
                exchange.begin_forward()
            row_ranks = engine.cp_sizes[i.section] if live.part is None else live.part.row_ranks
            live.outputs, live.loss_terms = section(case, batch, edges, engine.evaluates, row_ranks)
            if exchange is not None:
                live.exchange_end = exchange.end_forward()
            if i.section in engine.norms:
                engine.norms[i.section].end_pass(True, engine.device)

    def record_saved(
        self, section: str, live: _InFlightMicroBatch
    ) -> AbstractContextManager[SavedActivations | None]:
        """Moves what a forward saves to host memory, if its section asks for it."""
        activations = self.engine.activations if live.backward_owed else None
        return nullcontext() if activations is None else activations.record_forward(section)

    def fetch_for_backward(self, program: Sequence[Instruction], index: int) -> None:
        """Starts to fetch what the first backward after an instruction needs first, if it is in host
        memory."""
        if self.engine.activations is None:
            return
        after = next((i for i in program[index + 1 :] if i.kind == "B"), None)
        live = self.in_flight.get((after.section, after.micro)) if after is not None else None
        if live is not None and live.saved is not None:
            live.saved.fetch_last()

    def join_outputs(self, i: Instruction, micro: MicroBatch, own: Tensors) -> Tensors:
        """Returns the outgoing edges of a dealt micro-batch, given those of this rank's part."""
        found: Tensors = {}
        for edge in self.engine.edges_out_of[i.section]:
            layout, part = self.layouts[edge.name], self.dealt.own_part(micro, self.engine.rank).samples
            if layout.is_whole:
                self.check_edge_shape(i, edge, own, layout.tensor_shape("src", i.micro))
                if edge.name in own:
                    values = own[edge.name].detach()
                    found[edge.name] = values.requires_grad_(self.engine.returns_gradient[edge.name])
                continue
            if part:
                self.check_edge_shape(i, edge, own, layout.shape_of_samples("src", part))
            values = own[edge.name].detach() if edge.name in own else None
            joined = self.join_parts(layout, "src", micro, values)
            if joined is not None:
                found[edge.name] = joined.requires_grad_(self.engine.returns_gradient[edge.name])
        return found

    def join_parts(
        self, layout: EdgeLayout, side: str, micro: MicroBatch, own: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Joins the tensors (or gradients) of an edge that the subgroups of a dealt micro-batch have, each on
        all of its ranks; None if none has any. Rows of subgroups without one are zeros. Collective."""
        parts, row_ranks = self.dealt.parts(micro), self.dealt.subgroup_size(micro)
        group = self.engine.sections[micro.section].row_groups[self.engine.cp_sizes[micro.section]]
        # Each rank gives a slice of its subgroup's tensor, and whether there is one: zeros are not none.
        slices = [
            slice_bounds(layout.part_numel(side, part), place, row_ranks)
            for part in parts
            for place in range(row_ranks)
        ]
        sizes, (start, stop) = [stop - start + 1 for start, stop in slices], slices[group.index]
        flat = torch.zeros(stop - start + 1, dtype=layout.dtype, device=self.engine.device)
        if own is not None:
            flat[:-1] = layout.pack_part(own, side, parts[group.index // row_ranks])[start:stop]
            flat[-1] = 1
        gathered = group.all_gather(flat, sizes).split(sizes)
        if not any(bool(piece[-1]) for piece in gathered):
            return None
        shape = layout.shape_of_samples(side, micro.samples)
        whole = torch.zeros(shape, dtype=layout.dtype, device=self.engine.device)
        for number, part in enumerate(parts):
            pieces = gathered[number * row_ranks : (number + 1) * row_ranks]
            joined = torch.cat([piece[:-1] for piece in pieces])
            layout.unpack_part(joined, whole, side, micro.samples, part)
        return whole

    def run_empty_pass(self, i: Instruction) -> None:
        """Takes part in what other replicas exchange in a round in which this rank has no samples."""
        if (norms := self.engine.norms.get(i.section)) is not None:
            if i.kind == "B":
                norms.share_gradients([False] * len(self.result_names(i.section)), self.engine.device)
            norms.follow_pass(i.kind == "F", self.engine.device)
            return
        exchange = self.engine.exchanges.get(i.section)
        if exchange is None:
            return
        if i.kind == "B":
            self.empty_passes.pop((i.section, i.micro)).sum().backward()
            return
        with_grad = self.engine.backward_owed[i.section]
        chain = exchange.run_empty_forward(with_grad)
        if with_grad:
            self.empty_passes[i.section, i.micro] = chain

    def keep_outputs(self, i: Instruction, live: _InFlightMicroBatch) -> None:
        """Takes the tensors that `metrics()` asks for out of the loss terms of an evaluation."""
        keeps = self.engine.rank == self.ranks_of(i.section, i.micro)[0]
        for name in [n for n in live.loss_terms if n.startswith(OUTPUT_PREFIX)]:
            tensor = live.loss_terms.pop(name)
            if keeps:
                self.engine.outputs[name.removeprefix(OUTPUT_PREFIX), i.micro] = tensor

    def count_loss(self, i: Instruction, live: _InFlightMicroBatch) -> None:
        """Adds the loss terms of a micro-batch, on the first rank of its replica only; those of the parts of
        a dealt one, on the first rank of each subgroup."""
        ranks = self.ranks_of(i.section, i.micro)
        if live.part is not None:
            if ranks.index(self.engine.rank) % (self.engine.tp_sizes[i.section] * live.part.row_ranks) == 0:
                self.add_loss(live.loss_terms, live.part.micro)
        elif self.engine.rank == ranks[0]:
            self.add_loss(live.loss_terms, self.micro_batch(i.section, i.micro))

    def find_places(self, micro: MicroBatch) -> BatchPlaces:
        """Returns the places of a micro-batch's samples among those with known rows, in a first pass among
        those of the batch."""
        places = torch.tensor(micro.samples)
        for rows in self.step.statistics.values():
            if isinstance(rows, BatchRows):
                return BatchPlaces(places + self.step.first_sample, len(rows.values))
        return BatchPlaces(places, self.own_samples)

    def expect_consumers(self, i: Instruction, live: _InFlightMicroBatch) -> None:
        """Counts how often the outputs of a forward will be taken, by messages and by sections of this
        rank."""
        for edge in self.engine.edges_out_of[i.section]:
            self.check_edge_shape(i, edge, live.outputs, self.layouts[edge.name].tensor_shape("src", i.micro))
            live.pending_consumers += sum(
                self.consumer_count(*self.endpoint_ranks(edge, pair))
                for pair in self.layouts[edge.name].pairs_of_micro_batch("src", i.micro)
            )

    def run_backward(self, i: Instruction) -> None:
        """Runs the backward of one micro-batch: all of it, or only the input gradients if the section's
        backward is split."""
        live = self.in_flight[i.section, i.micro]
        gradients = self.receive_gradients(i.section, i.micro, live.outputs)
        roots = self.own_roots(i, live, gradients)
        coefficients = self.step.coefficients
        assert coefficients is not None
        roots += [  # a term without a coefficient is not in the loss of this batch
            (t, torch.full_like(t, coefficients[name]))
            for name, t in live.loss_terms.items()
            if t.requires_grad and not is_statistic(name) and name in coefficients
        ]
        if not roots and i.section in self.engine.exchanges:  # other ranks need this one in the backward
            own = live.outputs if live.part is None else live.part.outputs
            ends = (*own.values(), *live.loss_terms.values())
            roots = [(t, torch.zeros_like(t)) for t in ends if t.requires_grad]
        if live.exchange_end is not None and live.exchange_end.requires_grad:
            roots.append((live.exchange_end, torch.zeros_like(live.exchange_end)))
        norms = self.engine.norms.get(i.section)
        if norms is not None:
            roots += self.shared_roots(i.section, live, {id(t) for t, _ in roots}, norms)
        accumulating = self.engine.accumulating(i.section)
        if live.saved is not None and self.engine.activations is not None:
            self.engine.activations.begin_backward(live.saved)
        with self.during_compute(i), backward_context(live.draws), accumulating:
            whole = i.micro in self.step.schedule.whole_backwards.get(i.section, ())
            if self.engine.splits_backward[i.section] and not whole:
                live.weight_backward = split_backward(roots, self.computed_leaves(live))
            elif roots:
                torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
            if norms is not None:
                norms.end_pass(False, self.engine.device)
        if live.saved is not None:
            live.saved.end_backward()
            live.saved = None
        if live.part is not None:
            self.join_leaf_gradients(i, live, live.part)
        # Consumers that return a gradient have taken their tensors before this backward; the others may do so
        # later. Detaching what they take frees the graph.
        without_gradient = [
            e.name for e in self.engine.edges_out_of[i.section] if not self.engine.returns_gradient[e.name]
        ]
        live.outputs = {
            name: live.outputs[name].detach() for name in without_gradient if name in live.outputs
        }
        live.loss_terms, live.backward_owed = {}, self.engine.splits_backward[i.section]
        # From now on, producers upstream take the gradients of the received edges.
        live.pending_consumers += sum(
            self.consumer_count(*reversed(self.endpoint_ranks(self.engine.edges[name], pair)))
            for name in live.edge_leaves
            for pair in self.layouts[name].pairs_of_micro_batch("dst", i.micro)
        )
        if live.pending_consumers == 0 and not live.backward_owed:
            del self.in_flight[i.section, i.micro]

    def result_names(self, section: str) -> list[str]:
        """Returns the names of the edges and terms that a section computes."""
        terms = [t.name for t in self.engine.plan.terms if t.section == section]
        return [*(e.name for e in self.engine.edges_out_of[section]), *terms]

    def shared_roots(
        self, section: str, live: _InFlightMicroBatch, own: Container[int], norms: SynchronizedNorms
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the results without a gradient here that have one on another replica, with zeros: the
        statistics of the others depend on this rank's samples. own: ids of results with a gradient."""
        found = live.outputs | live.loss_terms
        results = [found.get(name) for name in self.result_names(section)]
        needed = norms.share_gradients([id(t) in own for t in results], self.engine.device)
        return [
            (t, torch.zeros_like(t))
            for t, wanted in zip(results, needed, strict=True)
            if wanted and t is not None and id(t) not in own and t.requires_grad
        ]

    def own_roots(
        self, i: Instruction, live: _InFlightMicroBatch, gradients: Tensors
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the outputs that this rank computed, each with its gradient, given those of the whole
        micro-batch."""
        if live.part is None:
            return [(live.outputs[name], g) for name, g in gradients.items()]
        whole, own = self.micro_batch(i.section, i.micro).samples, live.part.micro.samples
        return [
            (
                out,
                gradients[name] if layout.is_whole else layout.take_part(gradients[name], "src", whole, own),
            )
            for name, out in live.part.outputs.items()
            for layout in [self.layouts[name]]
            if name in gradients and out.requires_grad
        ]

    def computed_leaves(self, live: _InFlightMicroBatch) -> list[torch.Tensor]:
        """Returns the leaves that this rank computed from: of a dealt micro-batch those of its part."""
        if live.part is None:
            return list(live.edge_leaves.values())
        whole = (leaf for name, leaf in live.edge_leaves.items() if self.layouts[name].is_whole)
        return [*whole, *live.part.edge_leaves.values()]

    def join_leaf_gradients(self, i: Instruction, live: _InFlightMicroBatch, part: _OwnPart) -> None:
        """Gives the leaves of a dealt micro-batch their gradients, joined from the parts that the ranks
        computed."""
        micro = self.micro_batch(i.section, i.micro)
        for name, leaf in live.edge_leaves.items():
            if self.layouts[name].is_whole:
                continue  # the leaf is that of the part, and so are messages
            own = part.edge_leaves.get(name)
            leaf.grad = self.join_parts(self.layouts[name], "dst", micro, None if own is None else own.grad)
        part.edge_leaves, part.outputs = {}, {}

    def run_weight_backward(self, i: Instruction) -> None:
        """Runs the second part of a split backward: the parameters' gradients."""
        live = self.in_flight[i.section, i.micro]
        accumulating = self.engine.accumulating(i.section)
        with self.during_compute(i), backward_context(live.draws), accumulating:
            if live.weight_backward is not None:  # else the first part has computed all
                live.weight_backward()
        live.weight_backward, live.backward_owed = None, False
        if live.pending_consumers == 0:
            del self.in_flight[i.section, i.micro]

    def add_loss(self, terms: Tensors, micro: MicroBatch) -> None:
        """Adds loss terms (0-dim numerators) times their coefficients to the loss, or to the scalar that they
        log. Without coefficients, sums the numerators by term, those of statistics too; rows stand at the
        places of their samples."""
        for name, numerator in terms.items():
            if self.step.coefficients is None:
                value = numerator.detach().double()
                if is_gathered(name):
                    rows = value.reshape(len(micro.samples), -1)
                    value = BatchPlaces(torch.tensor(micro.samples), self.own_samples).place_rows(rows)
                self.numerators[name] = self.numerators[name] + value if name in self.numerators else value
                continue
            if is_statistic(name) or name not in self.step.coefficients:
                continue
            share = numerator.detach().double() * self.step.coefficients[name]
            if logs := logged_scalar_name(name):
                self.logged[logs] += share
            else:
                self.loss += share

    # Messages on edges.

    def receive_edges(self, section: str, micro: int, live: _InFlightMicroBatch) -> Tensors:
        """Returns the tensors of the edges into a micro-batch, without edges that carry none of its samples.
        Leaves of edges that return a gradient are kept in `live`."""
        edges: Tensors = {}
        for edge in self.engine.edges_into[section]:
            layout = self.layouts[edge.name]
            incoming = layout.pairs_of_micro_batch("dst", micro)
            if not incoming:
                continue
            tensor = self.assemble_edge(edge, layout, incoming, micro)
            has_gradient, leaves = self.engine.returns_gradient[edge.name], live.edge_leaves
            if live.part is not None and not layout.is_whole:
                if has_gradient:
                    leaves[edge.name] = _make_leaf(tensor)
                own, leaves = live.part.micro.samples, live.part.edge_leaves
                if not layout.carried_samples("dst", own):
                    continue
                tensor = layout.take_part(tensor, "dst", self.micro_batch(section, micro).samples, own)
            if has_gradient:
                leaves[edge.name] = leaf = _make_leaf(tensor)
                tensor = _AttachReceived.apply(leaf, tensor)
            edges[edge.name] = tensor
        return edges

    def assemble_edge(
        self, edge: Edge, layout: EdgeLayout, incoming: Sequence[MicroBatchPair], micro: int
    ) -> torch.Tensor:
        """Assembles the tensor of an edge as the consumer expects it from the messages of several producer
        micro-batches, cut and padded to the consumer's sizes."""
        if layout.is_whole:
            message = self.receive_forward(edge, incoming[0])
            # The same memory, but not as a view of the message, so that a block may write to it in place.
            alias = message.new_empty(0).set_(message)  # pyright: ignore[reportCallIssue, reportArgumentType]
            return alias.resize_(layout.tensor_shape("dst", micro))
        tensor = layout.make_padding(self.micro_batch(edge.dst, micro).samples, self.engine.device)
        for pair in incoming:
            layout.unpack_message(self.receive_forward(edge, pair), tensor, "dst", pair)
        return tensor

    def receive_forward(self, edge: Edge, pair: MicroBatchPair) -> torch.Tensor:
        """Returns the values of the rows of `pair` (flat), from other ranks or from a section of this
        rank."""
        sources, targets = self.endpoint_ranks(edge, pair)
        if self.engine.rank not in sources:
            parts = [
                self.take_message_slice(edge, "fwd", pair, part)
                for part in self.arriving_slices(sources, targets)
            ]
            return self.gather_message(parts, edge, edge.dst, pair, sources, targets)
        message = self.layouts[edge.name].pack_message(
            self.in_flight[edge.src, pair[0]].outputs[edge.name].detach(), "src", pair
        )
        self.release_consumer(edge.src, pair[0])
        return message

    def receive_gradients(self, section: str, micro: int, outs: Tensors) -> Tensors:
        """Returns the gradient of each outgoing edge that the loss depends on, in the shape of the edge's
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
        """Returns the gradient of the rows of `pair` (flat), None if the loss does not depend on them."""
        targets, sources = self.endpoint_ranks(edge, pair)
        if self.engine.rank in sources:
            message = self.pack_gradient(edge, pair)
            self.release_consumer(edge.dst, pair[1])
            return message
        parts = [
            self.take_message_slice(edge, "bwd", pair, part)
            for part in self.arriving_slices(sources, targets)
        ]
        if not all(bool(part[-1]) for part in parts):  # see `pack_flagged_gradient`
            return None
        return self.gather_message([part[:-1] for part in parts], edge, edge.src, pair, sources, targets)

    def gather_message(
        self,
        parts: Sequence[torch.Tensor],
        edge: Edge,
        section: str,
        pair: MicroBatchPair,
        sources: Ranks,
        targets: Ranks,
    ) -> torch.Tensor:
        """Joins this rank's slices of a message to `section` with the slices that the other ranks of its
        replica received, or of its subgroup if subgroups have messages of their own. Collective where not
        each rank received all of it."""
        received, layout = parts[0] if len(parts) == 1 else torch.cat(list(parts)), self.layouts[edge.name]
        if (subgroups := layout.subgroup_count(pair)) > 1:
            return self.gather_in_subgroup(received, section, layout.message_numel(pair), subgroups)
        lengths = gather_counts(sources, targets, layout.message_numel(pair))
        return self.engine.groups[section].all_gather(received, lengths) if any(lengths) else received

    def gather_in_subgroup(
        self, received: torch.Tensor, section: str, size: int, subgroups: int
    ) -> torch.Tensor:
        """Joins this rank's slice of a message of `size` entries with those of its subgroup: of neighbouring
        ranks of tp first, then of the ranks of cp."""
        tp, row_ranks = self.engine.tp_sizes[section], self.engine.cp_sizes[section] // subgroups
        bounds = [slice_bounds(size, k, tp * row_ranks) for k in range(tp * row_ranks)]
        lengths, module = [stop - start for start, stop in bounds], self.engine.sections[section]
        at = 0
        if row_ranks > 1:
            rows = module.row_groups[row_ranks]
            at = rows.index * tp
        if module.group is not None:
            received = module.group.all_gather(received, lengths[at : at + tp])
        if row_ranks == 1:
            return received
        return module.row_groups[row_ranks].all_gather(
            received, [sum(lengths[k : k + tp]) for k in range(0, tp * row_ranks, tp)]
        )

    def pack_gradient(self, edge: Edge, pair: MicroBatchPair, *more: torch.Tensor) -> torch.Tensor | None:
        """Packs the gradient of `pair` into a flat message, followed by `more`; None if there is no
        gradient."""
        gradient = self.in_flight[edge.dst, pair[1]].edge_leaves[edge.name].grad
        if gradient is None:
            return None
        return self.layouts[edge.name].pack_message(gradient, "dst", pair, *more)

    def pack_flagged_gradient(self, edge: Edge, pair: MicroBatchPair, start: int, stop: int) -> torch.Tensor:
        """Packs entries `start` to `stop` of a gradient message, followed by the flag 1. Without a gradient,
        the values and the flag are zeros: the producer must tell a missing gradient from a zero one."""
        dtype, device = self.layouts[edge.name].dtype, self.engine.device
        message = self.pack_gradient(edge, pair, torch.ones(1, dtype=dtype, device=device))
        if message is None:
            return torch.zeros(stop - start + 1, dtype=dtype, device=device)
        if stop - start + 1 == message.numel():
            return message
        return torch.cat([message[start:stop], message[-1:]])

    def send_message(self, i: Instruction) -> None:
        """Sends the tensor or gradient of a SEND instruction."""
        edge, message = self.engine.edges[i.edge], message_of_instruction(i)
        layout = self.layouts[edge.name]
        start, stop = message.slice_bounds(layout)
        with self.transfer_event("SEND", message, self.engine.rank, i.peer):
            if message.direction == "fwd":
                output = self.in_flight[edge.src, i.src_micro].outputs[edge.name].detach()
                values = layout.pack_message(output, "src", message.pair)[start:stop]
                self.release_consumer(edge.src, i.src_micro)
            else:
                values = self.pack_flagged_gradient(edge, message.pair, start, stop)
                self.release_consumer(edge.dst, i.dst_micro)
            self.engine.transport.send(message, values)

    def take_message_slice(
        self, edge: Edge, direction: str, pair: MicroBatchPair, part: MessageSlice
    ) -> torch.Tensor:
        """Waits for one slice of a message and returns its values."""
        message = Message(edge.name, direction, pair, part.sender, part.index, part.count)
        waits = edge.dst if direction == "fwd" else edge.src
        timed = self.engine.stopwatch.time_section(self.engine.whole_section[waits], "R")
        waiting = self.engine.trace.activity.during(message, Waiting.PEERS)
        with waiting, timed, self.transfer_event("RECV", message, part.sender, self.engine.rank):
            return self.engine.transport.take_values(message)

    def release_consumer(self, section: str, micro: int) -> None:
        """Records that one consumer has taken its part of a micro-batch's tensors; the last one frees them,
        unless a backward is owed."""
        live = self.in_flight[section, micro]
        live.pending_consumers -= 1
        if live.pending_consumers == 0 and not live.backward_owed and not live.is_prefetched:
            del self.in_flight[section, micro]

    # Prefetching of the next step.

    def restore_prefetched(self) -> None:
        """Makes the micro-batches that the previous step computed in advance part of this step: their losses
        count and their outputs are sent now."""
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
        """Keeps micro-batches of the next global batch for the next step."""
        if self.engine.prefetched:
            raise RuntimeError(
                f"rank {self.engine.rank}: {sorted(self.engine.prefetched)} were prefetched for this step,"
                " which does not use them"
            )
        for name, micros in self.step.schedule.micro_batches.items():
            for number, m in enumerate(m for m in micros if self.step.schedule.is_of_next_batch(m)):
                live = self.in_flight.get((name, m.index))
                if live is not None and not live.pending_consumers:
                    self.engine.prefetched[name, number] = self.in_flight.pop((name, m.index))

    # Helpers.

    def seed_of(self, micro: MicroBatch) -> int:
        """Returns the seed of the step that a micro-batch belongs to."""
        return self.step.later_seed if self.step.schedule.is_of_next_batch(micro) else self.step.seed

    def micro_batch(self, section: str, index: int) -> MicroBatch:
        return self.step.schedule.micro_batches[section][index]

    def random_draws(self, micro: MicroBatch) -> MicroBatchDraws | None:
        """Returns the random numbers of a micro-batch, None for a model without random ops."""
        if self.engine.randomness is None:
            return None
        seed = self.seed_of(micro)
        keys = [self.sample_keys[s] for s in micro.samples]
        return self.engine.randomness.make_draws(seed, keys, [self.sizes[s] for s in micro.samples])

    def ranks_of(self, section: str, index: int) -> Ranks:
        """Returns the ranks of a micro-batch's replica."""
        return self.engine.replica_ranks[section][self.micro_batch(section, index).replica]

    def endpoint_ranks(self, edge: Edge, pair: MicroBatchPair) -> tuple[Ranks, Ranks]:
        """Returns the ranks of the producing and of the consuming replica."""
        return self.ranks_of(edge.src, pair[0]), self.ranks_of(edge.dst, pair[1])

    def arriving_slices(self, sources: Ranks, targets: Ranks) -> list[MessageSlice]:
        """Returns the slices of a message that this rank receives."""
        return [part for part in route_message(sources, targets) if part.receiver == self.engine.rank]

    def consumer_count(self, sources: Ranks, targets: Ranks) -> int:
        """Counts how often this rank's tensor is taken: once per slice that it sends, and once if this rank
        also belongs to the receiving replica."""
        rank = self.engine.rank
        return sum(part.sender == rank for part in route_message(sources, targets)) + (rank in targets)

    def check_edge_shape(self, i: Instruction, edge: Edge, outs: Tensors, shape: tuple[int, ...]) -> None:
        """Raises if a forward's output does not have the shape and dtype that its consumers expect; messages
        carry no header, so a wrong shape would be cut wrongly without an error.

        A case omits an edge without rows; its messages are empty. If the stages of a pipeline select cases
        that do not use an edge, zeros are sent, which the receiving stage does not read.
        """
        layout = self.layouts[edge.name]
        if not layout.pairs_of_micro_batch("src", i.micro):
            return
        if edge.name not in outs and (layout.is_whole or shape[edge.dim] == 0):
            outs[edge.name] = torch.zeros(shape, dtype=layout.dtype, device=self.engine.device)
        if edge.name not in outs:
            raise RuntimeError(f"`{i}`: the section's case does not compute edge {edge.name}")
        tensor = outs[edge.name]
        if tuple(tensor.shape) == shape and tensor.dtype != layout.dtype:
            raise RuntimeError(
                f"`{i}`: edge {edge.name} is {tensor.dtype}, but the plan has {layout.dtype}: the model was "
                "cast after the plan was made"
            )
        if tuple(tensor.shape) != shape:
            actual = f"{tensor.dtype}{list(tensor.shape)}"
            raise RuntimeError(
                f"`{i}`: edge {edge.name} is {actual}, but the plan has {layout.dtype}{list(shape)}"
            )

    def sample_ids(self, samples: Sequence[int]) -> list[int]:
        """Returns the dataset indices of samples, for the trace."""
        return [self.step.samples[s].id for s in samples]

    @contextmanager
    def during_compute(self, i: Instruction) -> Iterator[None]:
        """Surrounds the computation of an instruction: times and traces it, and makes the pass through
        gathered units (zero3)."""
        gatherer, micro = self.engine.gatherers.get(i.section), self.micro_batch(i.section, i.micro)
        # Without samples no layer runs, but their experts may compute for other ranks.
        self.engine.before_compute(i.section, not self.dealt.own_part(micro, self.engine.rank).samples)
        timed = self.engine.stopwatch.time_section(self.engine.whole_section[i.section], i.kind)
        with self.compute_event(i, micro), timed:
            if gatherer is not None:
                gatherer.begin_pass(backward=i.kind == "B")
            yield
            if gatherer is not None:
                gatherer.end_pass()

    def compute_event(self, i: Instruction, micro: MicroBatch) -> AbstractContextManager[None]:
        """Returns the trace event of a computation."""
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
        own = self.dealt.own_part(micro, self.engine.rank)
        return self.engine.trace.record_event(
            f"{i.kind} {i.section} {i.micro}", **args, samples=self.sample_ids(own.samples), **ahead
        )

    def transfer_event(self, kind: str, message: Message, src: int, dst: int) -> AbstractContextManager[None]:
        """Returns the trace event of sending or receiving a message."""
        if not self.engine.trace.is_active:
            return nullcontext()
        layout = self.layouts[message.edge]
        args = {"kind": kind, "edge": message.edge, "direction": message.direction, "src": src, "dst": dst}
        size = message.numel(layout) * layout.dtype.itemsize
        engine, (first, second) = self.engine, message.pair
        step = f"{'eval' if engine.evaluates else 'step'} {engine.step_count}"
        args["flow"] = (
            f"{step} {message.edge} {message.direction} {first}>{second} {src}>{dst} {message.part}"
        )
        return self.engine.trace.record_event(
            f"{kind} {message.edge}", **args, samples=self.sample_ids(layout.pairs[message.pair]), bytes=size
        )
