"""The training loop of a rank: takes planned steps, executes their programs, reduces gradients, and updates
parameters.

Every rank computes the same schedules from the same metadata, so only tensors and sums are exchanged. The
optimizer and the scheduler are the user's, constructed over all trained parameters, as in one process, and
then left with those of this rank's sections; a rank without trainable parameters has neither.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from secc.runtime.comm.p2p_channels import Transport
from secc.runtime.comm.p2p_rounds import RoundTransport
from secc.runtime.data.data_plane import BadSampleError, GlobalBatch
from secc.runtime.errors import UserError, printable_text
from secc.runtime.fusion.install import install_fused, read_fused_source
from secc.runtime.host.activity import Waiting
from secc.runtime.host.hidden_ranks import hidden_process_group
from secc.runtime.model.item_seeds import derive_item_seed, seeded_rngs
from secc.runtime.monitoring.json_lines import say
from secc.runtime.monitoring.metrics import MetricsLog
from secc.runtime.monitoring.run_summary import summary_lines
from secc.runtime.monitoring.section_times import (
    SectionSeconds,
    SectionTimesLog,
    section_time_columns,
)
from secc.runtime.parameters import checkpoint
from secc.runtime.parameters.checkpoint_copies import CopyName
from secc.runtime.parameters.checkpoint_folder import FoundCheckpoint
from secc.runtime.parameters.checkpoint_writer import CheckpointSaver, FinishedSave
from secc.runtime.parameters.elementwise_check import (
    CannotProbe,
    why_coupled,
    why_not_elementwise,
    why_not_stepwise,
)
from secc.runtime.parameters.equal_values import SetValues, find_unequal_value
from secc.runtime.parameters.equal_writes import find_unequal_write
from secc.runtime.parameters.gradient_reduction import GradientReducer, build_reduction_groups
from secc.runtime.parameters.host_copies import HostCopies
from secc.runtime.parameters.mixed_precision import cast_model, compute_dtype
from secc.runtime.parameters.offloaded_optimizer import OffloadedOptimizer, offloaded_parameter_names
from secc.runtime.parameters.outside_weights import STEP_CALLBACK, find_partial_weights
from secc.runtime.parameters.parameter_gathers import ParameterGathers
from secc.runtime.parameters.rank_weights import canonical_names, state_dict_owners
from secc.runtime.parameters.sharded_optimizer import shard_optimizer
from secc.runtime.parameters.weight_average import WeightAverage
from secc.runtime.plan.replica_routes import Ranks, ranks_by_replica, tp_ranks_of
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import exchanges_tokens
from secc.runtime.schedule.cross_step_prefetch import find_prefetchable_sections
from secc.runtime.sections import recompute
from secc.runtime.sections.base import SectionModule
from secc.runtime.sections.batch_statistic import BatchValues
from secc.runtime.sections.row_layers import install_row_layers, install_row_modules
from secc.runtime.sections.synchronized_norms import SynchronizedNorms, find_batch_norms
from secc.runtime.tensor_parallel import styles
from secc.runtime.tensor_parallel.expert_parallel import TokenExchange
from secc.runtime.tensor_parallel.replica_group import (
    ReplicaGroups,
    ReplicaProcessGroup,
    make_exchange_groups,
    make_norm_groups,
    make_replica_groups,
)
from secc.runtime.training.bad_tokens import naming_bad_tokens
from secc.runtime.training.best_checkpoint import BestCheckpoint
from secc.runtime.training.callbacks import Callbacks, StepResult
from secc.runtime.training.engine import Engine, StepInput
from secc.runtime.training.evaluation import EvaluationResult, Evaluator
from secc.runtime.training.first_pass import FirstPass, count_first_passes
from secc.runtime.training.generation import FUNCTION, SampleGenerator
from secc.runtime.training.nonfinite_search import NonFiniteEvent, NonFiniteSearch
from secc.runtime.training.offloaded_activations import ActivationOffload
from secc.runtime.training.rank_context import RankContext
from secc.runtime.training.rendezvous import attempt_name
from secc.runtime.training.run_reports import RunReports
from secc.runtime.training.run_settings import (
    check_change,
    check_settings,
    describe_settings,
    share_settings,
)
from secc.runtime.training.step_batches import StepBatches
from secc.runtime.training.step_planner import PlannedStep, plan_steps
from secc.runtime.training.stop_request import StopRequest

TRANSPORTS = {"channels": Transport, "rounds": RoundTransport}


@dataclass(frozen=True)
class StepTotals:
    """Sums of a step over all ranks, on the host: the loss, the norm of all gradients, the learning rate,
    mean seconds in which a rank waited for gradients, further scalars, and seconds by section and kind."""

    loss: float
    norm: float
    learning_rate: float
    exposed_s: float
    logged: dict[str, float]
    section_seconds: SectionSeconds


class Trainer:
    """Trains this rank's sections. Construct it at the same point on all ranks, because creating process
    groups is collective.

    `context`: this rank of the run. `model`: the user's model from `RankContext.load_model`. `sections`: this
    rank's generated section modules on that model. `callbacks`: objects with `on_step`, `on_save` or
    `on_evaluate` methods (`secc.runtime.training.callbacks`), called after the model file's functions.
    """

    def __init__(
        self,
        context: RankContext,
        model: nn.Module,
        sections: Sequence[SectionModule],
        callbacks: Sequence[object] = (),
    ) -> None:
        self.context, self.model, self.terms = context, model, context.terms
        self.plan, self.options = context.plan, context.options
        context.phases.begin("install the sections, make the optimizer")
        canonical = canonical_names(model)
        params = dict(model.named_parameters())
        self._weight_names = [*params, *dict(model.named_buffers())]
        reductions = build_reduction_groups(
            self.plan, [n for n, p in params.items() if p.requires_grad], canonical
        )
        # The wrappers of a module's forward nest in the order in which they are installed: fused code first
        # (innermost), then tensor-parallel collectives, recomputation, rows of sequences, and gathers around
        # all of it.
        install_fused(model, self.plan.rewrites, read_fused_source(context.directory))
        groups = make_replica_groups(self.plan, context.rank)
        exchange_groups = make_exchange_groups(self.plan, context.rank)
        exchanges = {n: TokenExchange(g) for n, g in exchange_groups.items()}
        styles.install_styles(self.plan, model, groups.tp, exchanges)
        exchanges = {n: e for n, e in exchanges.items() if e.experts}  # a stage may have no mixture
        install_row_modules(self.plan, model, context.rank)
        norm_groups = make_norm_groups(self.plan, context.rank)
        norms = {
            s.name: SynchronizedNorms(find_batch_norms(model, s.blocks), norm_groups.get(s.name))
            for s in self.plan.sections
            if s.whole_batch and context.rank in s.mesh.ranks
        }
        for section in self.plan.sections:
            if context.rank in section.mesh.ranks:
                recompute.install_recompute(
                    model, section.blocks, section.recompute, section.weight_permille > 0
                )
        for name, exchange in exchanges.items():
            exchange.assign_layers(
                recompute.units_of_blocks(model, self.plan.find_section(name).blocks), recompute.is_recomputed
            )
            exchange.require = context.zero3.unit_requirement(name)
        install_row_layers(self.plan, model, context.rank)
        activations = self._offload_activations(model)
        context.zero3.wrap_units()
        self.reducer = GradientReducer(
            reductions,
            params,
            context.rank,
            context.device,
            context.parameter_cuts,
            compute_dtype(self.plan.dtype),
            context.zero3.sharded_units,
        )
        # Masters have been made, so the model can now be cast; parameters of no section keep their dtype.
        used = {canonical[n] for s in self.plan.sections for n in s.params}
        cast_model(model, self.plan.dtype, but=params.keys() - used)
        layers = {s.name: recompute.units_of_blocks(model, s.units) for s in self.plan.sections if s.units}
        blocks = {s.name: s.units for s in self.plan.sections}
        self.gathers = ParameterGathers(model, self.reducer.sharded_buckets, layers, blocks)
        transport = TRANSPORTS[self.options.comm](
            self.plan, context.rank, context.device, self.options.debug_comm
        )
        held_sections = {s.name: s for s in sections}
        for section in sections:
            section.group = groups.tp.get(section.name)
            section.row_groups = groups.cp[section.name]
        self.engine = Engine(
            self.plan,
            held_sections,
            transport,
            self.reducer.start_section,
            context.trace,
            self.reducer.arm_overlap_hooks,
            groups.replica,
            context.zero3.gatherers,
            exchanges=exchanges,
            accumulating=self.reducer.dropping_repeated,
            activations=activations,
            before_compute=self.gathers.before_compute,
            norms={name: norms[name] for name in norm_groups},
        )
        self._time_collectives(groups, exchange_groups | norm_groups)
        self._first_pass = (
            FirstPass(self.plan, model, self.engine, self.options.order)
            if count_first_passes(self.plan)
            else None
        )
        self._callbacks, self._any_rank_hears_steps = Callbacks(context.user_model, callbacks), False
        first_trained = min((r for h in reductions for r in h.ranks), default=0)  # rank with an optimizer
        self._reports_learning_rate = context.rank == first_trained
        self._owned_names = self._find_owned_names(model)
        self._trained_names = {n for h in reductions if context.rank in h.ranks for n in h.names}
        self.optimizer = self._make_optimizer(params, {n for h in reductions for n in h.names})
        self.offload = self._offload_optimizer(offloaded_parameter_names(self.plan, context.rank, canonical))
        copied = self.reducer.sharded_slices.keys() | self.reducer.masters.keys()
        self._partial_weights = find_partial_weights(
            self.plan,
            context.rank,
            model,
            canonical,
            {n: h.ranks for h in reductions for n in h.names},
            held={n for n, p in params.items() if not p.is_meta},
            in_parts=context.parameter_cuts.keys() | context.zero3.parameter_names,
            copied={n for n, p in params.items() if p in copied},
            early=self._find_early_sections(),
        )
        self._set_values = SetValues(model, context.user_model)
        if self.optimizer is not None:
            self._partial_weights.watch_hooks(self.optimizer)
        self._initial_options = (
            checkpoint.describe_options(self.optimizer, self.reducer.optimized_slices)
            if self.optimizer is not None
            else {}
        )
        self.scheduler = (
            context.user_model.build_scheduler(self.optimizer, context.last_step)
            if self.optimizer is not None
            else None
        )
        self._settings = describe_settings(
            context.seed,
            context.shuffle,
            self.options.clip,
            context.user_model.describe_samples() if self.options.eval_only is None else "",
            context.model_settings,
            self.optimizer,
            self.scheduler,
            context.last_step,
        )
        if first_trained and context.rank in (0, first_trained):
            self._settings |= share_settings(context.store, self._settings, context.rank == first_trained)
        if context.resumed is not None and context.rank == 0 and not self.options.eval_only:
            recorded, where = context.resumed.manifest.settings or {}, str(context.resumed.path)
            for note in check_settings(recorded, self._settings, self.options.allow_change, where):
                sys.stderr.write(note + "\n")
        self.step_number = context.first_step
        self.average = self._make_average()
        self._evaluator = Evaluator(context, model, self.engine) if context.evaluation_data else None
        best = self.options.keep_best
        self._best = (
            BestCheckpoint(
                best, self.options.save, self.options.patience, self.options.eval_every, self.step_number
            )
            if best is not None and self.options.save is not None
            else None
        )
        self._stops_early = False
        if context.resumed is not None and not self.options.eval_only:
            self._load_optimizer(context.resumed)
        self.metrics, self.section_times = None, None
        if context.rank == 0:
            self.metrics = MetricsLog(context.log_dir, context.last_step, run=context.run_id)
            self.section_times = SectionTimesLog(context.log_dir, self.plan)
        self._saver = CheckpointSaver(context.checkpoint_writer, context.trace.activity)
        self._save_stage_ended = False
        self.stop_request, self._stops, self._callback_failed = StopRequest(), False, False
        self.stop_request.listen()
        self.reports = RunReports(context) if context.rank == 0 and self.options.report_to else None
        generates = context.rank == 0 and context.user_model.defines(FUNCTION) and self.options.save
        self._generator = (
            SampleGenerator(context.directory, context.log_dir, self.average is not None)
            if generates
            else None
        )
        self._step_start = time.perf_counter()

    def _load_optimizer(self, resumed: FoundCheckpoint) -> None:
        """Reads the states of the optimizer and the scheduler. Where the user allows that these have changed,
        options that differ are those of the model file, and its scheduler takes the steps of the checkpoint
        from the start. Collective. Raises UserError for changes that are not allowed."""
        allowed = self.options.allow_change
        changed = checkpoint.find_changed_options(resumed.files, self._initial_options)
        for change in changed[:1]:
            check_change("optimizer", str(change), allowed, str(resumed.path))
        renews = "scheduler" in allowed or ("optimizer" in allowed and bool(changed))
        if isinstance(self.scheduler, ReduceLROnPlateau):
            renews = False  # what a plateau has seen is in the checkpoint only
        elif renews and self.scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the optimizer has not stepped
                for _ in range(resumed.manifest.step):
                    self.scheduler.step()
        checkpoint.load_optimizer_state(
            resumed.files,
            self.optimizer,
            self.scheduler,
            self.reducer.optimized_slices,
            self.context.rank,
            changed,
            not renews,
            self.offload.parameters if self.offload is not None else (),
        )
        if self.offload is not None:
            self.offload.move_states_to_host()

    def _time_collectives(
        self, groups: ReplicaGroups, other_groups: Mapping[str, ReplicaProcessGroup]
    ) -> None:
        """Lets the stopwatch time how long this rank waits for the collectives of each section."""
        stopwatch, whole = self.engine.stopwatch, self.engine.whole_section
        of_rows = [(name, group) for name, by_size in groups.cp.items() for group in by_size.values()]
        by_section = (groups.replica, groups.tp, other_groups, self.engine.gatherers)
        for name, group in itertools.chain(of_rows, *(found.items() for found in by_section)):
            group.timed = partial(stopwatch.time_collective, whole[name])
        self.reducer.timed = self.gathers.timed = lambda section: stopwatch.time_collective(whole[section])

    def plan_steps(self) -> Iterator[PlannedStep]:
        """Yields the remaining steps of the run; the data of the next one loads while one trains.

        If glue is re-recorded per micro-batch, the next step is also planned one step early, so that its
        recordings are made in the meantime. After the last step, or a request to stop, rank 0 prints the
        run's summary. Raises UserError if the plan does not compute what plain PyTorch computes, and for what
        a callback has raised, once all ranks have ended and saved.
        """
        phases = self.context.phases
        if self.context.first_check is not None:
            phases.begin("wait for the comparison with plain PyTorch")
            self.context.first_check.finish()
        phases.begin("load and order the first batch")
        self._step_start = time.perf_counter()
        self.context.trace.activity.step = self.step_number + 1
        if self.options.eval_only:
            phases.finish()
            self.evaluate()
        else:
            yield from self._plan_training()
            self.gathers.finish_all()
        if self._callbacks.error is not None:
            raise self._callbacks.error
        if self._generator is not None:
            activity = self.context.trace.activity
            with activity.during("its samples", Waiting.WRITER, may_take_long=True):
                self._generator.finish()
            self._report_samples()
        if self.metrics is not None and self.section_times is not None:
            self.metrics.close()
            if self.reports is not None:
                self.reports.close()
            for line in summary_lines(
                self.plan, self.section_times.steps, self.context.log_dir, self.context.local_process_count
            ):
                sys.stderr.write(printable_text(line, newlines=True) + "\n")
            if (self._stops or self._callback_failed) and self.step_number < self.context.last_step:
                sys.stderr.write(self._stop_message() + "\n")

    def _stop_message(self) -> str:
        """Returns what a user should know after a request to stop was met, or a callback has failed."""
        why = "as asked" if self._stops else "because a callback failed"
        stopped = f"stopped {why} after step {self.step_number} of {self.context.last_step}"
        if self.options.save is None:
            return f"{stopped}; nothing was saved, because there was no --save"
        return f"{stopped} and saved to {self.options.save}\n  what to do: add --resume auto to continue"

    def _plan_training(self) -> Iterator[PlannedStep]:
        context = self.context
        try:
            for step in plan_steps(context, self.step_number, context.last_step, context.records_ahead):
                context.phases.finish()
                with context.trace.record_step(self.step_number + 1):
                    yield step
                if self._stops_early or self._stops or self._callback_failed:
                    return
        except BadSampleError:
            if self.options.save is not None and self.step_number > context.first_step:
                self.save_checkpoint()
            raise

    def train_step(self, step: PlannedStep) -> float:
        """Trains on one global batch: one optimizer step. Returns the loss over the whole global batch, which
        is the same on every rank."""
        batch = step.batch
        coefficients = self.context.loss_coefficients(batch.batch_sums, batch.sizes, batch.pattern)
        self.reducer.reset_gradients()
        seed, later_seed = (
            derive_item_seed(self.context.seed, -1, number) for number in (batch.step, batch.step + 1)
        )
        batches = StepBatches(self.context.data_plane, step, self.context.trace)
        trace_event = self.context.trace.record_event
        with naming_bad_tokens(step, self.context):
            statistics = self._find_statistics(batch, coefficients, seed)
            with trace_event("PROGRAM", kind="PROGRAM"):
                share = self.engine.run_step(
                    StepInput(
                        step.schedule,
                        step.samples,
                        batches.load_batch,
                        coefficients,
                        seed,
                        later_seed,
                        statistics,
                    )
                )
        reduction_start = time.perf_counter()
        if self.offload is not None:
            self.offload.prefetch()
        with trace_event("GRADIENTS", kind="GRADIENTS"):
            self.reducer.finish_reduction()
        exposed_s = time.perf_counter() - reduction_start
        with trace_event("NORM", kind="NORM"):
            squared = self.reducer.squared_norm()
        with trace_event("TOTALS", kind="TOTALS"):
            totals = self._sum_over_ranks(share, squared, batches, exposed_s)
        loss, norm = totals.loss, totals.norm
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        updates = is_finite or self._accepts_nonfinite(step, loss, norm)
        with trace_event("OPTIMIZER", kind="OPTIMIZER"):
            self._step_optimizer(loss, norm, updates)
        self.step_number += 1
        self.context.trace.activity.step = self.step_number + 1
        seconds = self._finish_step(step, totals)
        if self.section_times is not None:
            self.section_times.log_step(
                self.step_number,
                seconds,
                totals.section_seconds,
                step.samples,
                step.schedule,
            )
        return totals.loss

    def _find_statistics(
        self, batch: GlobalBatch, coefficients: Mapping[str, float], seed: int
    ) -> BatchValues:
        """Returns the statistics of a global batch that its loss depends on. Collective if there are any."""
        if self._first_pass is None:
            return {}
        data, trace = self.context.data_plane, self.context.trace
        alone = PlannedStep(batch, None, self._first_pass.schedule(batch.samples))
        batches = StepBatches(data, alone, trace)
        with trace.record_event("FIRST PASS", kind="PROGRAM"):
            return self._first_pass.find_statistics(
                batch.samples,
                batches.load_batch,
                coefficients,
                seed,
                lambda own: data.exchange_values(own.to(self.context.device), 0).sum(0).cpu(),
            )

    def _accepts_nonfinite(self, step: PlannedStep, loss: float, norm: float) -> bool:
        """Says where a loss or gradient norm that is not finite comes from, and tells whether the optimizer
        may step. Collective, and the same on all ranks. Raises UserError with --on-nan stop, after saving the
        state from before the step."""
        event, number = self._find_nonfinite(step), self.step_number + 1
        found = f"first in {event}" if event is not None else "found in no module when the step ran again"
        message = f"step {number}: the loss is {loss:g} and the gradient norm {norm:g}, {found}"
        if self.options.on_nan == "stop":
            if self.options.save is not None and number > self.context.first_step + 1:
                self.save_checkpoint()
            remedy = "correct the model or the samples, or give --on-nan skip to go on without such steps"
            raise UserError(message, remedy=remedy)
        if self.context.rank == 0:
            skips = self.options.on_nan == "skip"
            then = "the optimizer does not step" if skips else "the optimizer steps nevertheless"
            sys.stderr.write(f"{message}; {then}\n")
        return self.options.on_nan == "warn"

    def _find_nonfinite(self, step: PlannedStep) -> NonFiniteEvent | None:
        """Runs the program of a step again with hooks, without what it prefetches. Collective."""
        batch, data = step.batch, self.context.data_plane
        alone = PlannedStep(batch, None, self.context.schedule_batch(batch.samples))
        activity = self.context.trace.activity
        search = NonFiniteSearch(self.plan, alone.schedule, [s.id for s in batch.samples], activity)
        coefficients = self.context.loss_coefficients(batch.batch_sums, batch.sizes, batch.pattern)
        seed = derive_item_seed(self.context.seed, -1, batch.step)
        batches = StepBatches(data, alone, self.context.trace)
        prefetched, self.engine.prefetched = self.engine.prefetched, {}
        self.reducer.reset_gradients()
        with search.watch(self.model):
            statistics = self._find_statistics(batch, coefficients, seed)
            share = self.engine.run_step(
                StepInput(
                    alone.schedule,
                    alone.samples,
                    batches.load_batch,
                    coefficients,
                    seed,
                    statistics=statistics,
                )
            )
        search.note_loss(share)
        self.reducer.finish_reduction()
        self.engine.prefetched = prefetched
        return search.find_first(data)

    def _step_optimizer(self, loss: float, norm: float, updates: bool) -> None:
        """Clips gradients, steps the optimizer, starts to send updated parameters to their replicas, and
        steps the scheduler. Without `updates` only the scheduler steps, so that it stays at the step's
        number."""
        if not updates:
            if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step()
            return
        self.gathers.finish_all()
        if self.options.clip is not None:
            self.reducer.clip_gradients(norm, self.options.clip)
        with hidden_process_group():
            if self.offload is not None:
                self.offload.step()
            elif self.optimizer is not None:
                self.optimizer.step()
        if self.average is not None:
            if self.offload is not None:
                self.offload.wait_until_on_host()
            self.average.update()
        self.reducer.write_weights()
        self.gathers.start_all()
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)
        elif self.scheduler is not None:
            self.scheduler.step()

    def _sum_over_ranks(
        self, share: torch.Tensor, squared: torch.Tensor, batches: StepBatches, exposed_s: float
    ) -> StepTotals:
        """Sums all scalars of a step over ranks in one exchange. Also agrees on whether to stop after this
        step, and on whether a checkpoint in the background has come further.

        `share`: this rank's share of the loss; `squared`: its share of the squared gradient norm;
        `exposed_s`: the seconds that it waited for gradients.
        """
        recording = batches.recording_metrics(1 / self.context.world_size) if self.plan.recorded else {}
        counted = recording
        if any(map(exchanges_tokens, self.plan.sections)):
            rows = sum(exchange.take_sent_rows() for exchange in self.engine.exchanges.values())
            counted = {**recording, "expert_rows_sent": float(rows)}
        names = [*self.engine.logged, *counted]
        local_seconds, columns = self.engine.stopwatch.take_seconds(), section_time_columns(self.plan)
        times = [local_seconds.get((name, kind), 0.0) / n for name, kind, n in columns]
        rate = self._learning_rate() if self._reports_learning_rate else 0.0
        failed = self._callbacks.error is not None
        hears = self._callbacks.hears_steps
        flags = (failed, self._saver.is_stage_done(), self.stop_request.is_set, hears)
        # One copy to the device and one back: each of them makes the host wait.
        on_device = torch.stack([share, squared, *self.engine.logged.values()])
        on_host = [*counted.values(), rate, exposed_s / self.context.world_size, *times, *map(float, flags)]
        own = torch.cat([on_device, torch.tensor(on_host, dtype=share.dtype).to(share.device)])
        exchanged = self.context.data_plane.exchange_values(own, self.context.last_step)
        loss, squared_norm, *sums = exchanged.sum(0).tolist()
        logged, (rate, exposed_s, *rest) = dict(zip(names, sums, strict=False)), sums[len(names) :]
        failures, ended_stages, stops, listeners = rest[len(times) :]
        self._any_rank_hears_steps = listeners > 0
        self._stops, self._callback_failed = stops > 0, failures > 0
        self._save_stage_ended = int(ended_stages) == self.context.world_size
        seconds = {
            (name, kind): total for (name, kind, _), total in zip(columns, rest[: len(times)], strict=True)
        }
        norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
        return StepTotals(loss + self.terms.CONSTANT, norm, rate, exposed_s, logged, seconds)

    def _learning_rate(self) -> float:
        """The learning rate of this rank's first parameter group, 0 without an optimizer."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return float(groups[0].get("lr", 0.0)) if groups else 0.0

    def _finish_step(self, step: PlannedStep, totals: StepTotals) -> float:
        """Logs the step, calls the user's callbacks, and evaluates and saves if that is due. Returns the
        seconds of the step."""
        seconds, batch = time.perf_counter() - self._step_start, step.batch
        result = StepResult(
            self.step_number,
            totals.loss,
            totals.norm,
            totals.learning_rate,
            len(batch.samples),
            batch.tokens,
            seconds,
            self.context.rank,
            self.context.world_size,
            totals.logged,
        )
        if self.metrics is not None:
            values = {
                "step": result.step,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "learning_rate": result.learning_rate,
                "samples": result.samples,
                "tokens": result.tokens,
            }
            skipped = {"skipped": len(batch.skipped_indices)} if self.options.skip_bad_samples else {}
            self.metrics.log_step({**totals.logged} | values | skipped | {"step_time_s": seconds})
        if self.reports is not None:
            self.reports.log_step(result, step, totals.section_seconds, totals.exposed_s)
        self._report_samples()
        written = set[str]()
        if self._callbacks.hears_steps:
            self.gathers.finish_all()
        if self._any_rank_hears_steps:
            self._set_values.note_values()
            if self._callbacks.hears_steps:
                self._call_on_step(result, written)
            self._refuse_unequal_writes(written)
        if self._evaluator is not None and self._is_evaluation_due():
            self.evaluate()
        if self._save_stage_ended:
            with self.context.trace.record_event("SAVE", kind="SAVE"):
                self._report_save(self._saver.end_stage())
        if self.options.save is not None and self._is_save_due():
            with self.context.trace.record_event("SAVE", kind="SAVE"):
                in_background = self.options.save_async and not self._is_last_step()
                self.save_checkpoint(in_background=in_background)
        self.context.trace.activity.end_step(seconds)
        self._step_start = time.perf_counter()
        return seconds

    def _call_on_step(self, result: StepResult, written: set[str]) -> None:
        """Calls the callbacks of a step, and adds the weights that they write to to `written`."""
        on_step = self._partial_weights.watch_callback(STEP_CALLBACK, self._callbacks.on_step, written)
        # The same random numbers on all ranks: what they write to their weights must be equal.
        with seeded_rngs(derive_item_seed(self.context.seed, -3, self.step_number), self.context.device):
            try:
                on_step(result)
            except UserError as error:
                self._callbacks.error = error

    def _refuse_unequal_writes(self, written: Collection[str]) -> None:
        """Raises UserError on all ranks if what callbacks have written differs between ranks. Collective."""

        def exchange_numbers(values: Sequence[float]) -> torch.Tensor:
            own = torch.tensor(values, dtype=torch.float64, device=self.context.device)
            return self.context.data_plane.exchange_values(own, 0).cpu()

        weights, failed = self._partial_weights, self._callbacks.error is not None
        whole = {n: t for n, t in weights.tensors.items() if n not in weights.missing}
        found = find_unequal_write(self._weight_names, whole, written, failed, exchange_numbers)
        if found is not None:
            raise found.as_error("on_step")
        if (value := find_unequal_value(self._set_values, failed, exchange_numbers)) is not None:
            raise value.as_error("on_step")

    def _find_early_sections(self) -> list[str]:
        """Names the sections of this rank that compute for the next step before a step has ended."""
        if not self.plan.run_ahead_gib:
            return []
        found = find_prefetchable_sections(self.plan, SectionGraph(self.plan))
        return [s.name for s in found if self.context.rank in s.mesh.ranks]

    def _report_samples(self) -> None:
        """Reports the texts that were generated since the last call to the trackers."""
        if self._generator is not None and self.reports is not None:
            for step, texts in self._generator.take_samples().items():
                self.reports.log_samples(texts, step)

    def _is_evaluation_due(self) -> bool:
        every = self.options.eval_every
        return every is not None and (
            self.step_number % every == 0 or self.step_number == self.context.last_step
        )

    def evaluate(self) -> list[EvaluationResult]:
        """Evaluates the model, or the average of its weights if the run keeps one, on `eval_dataset()`, logs
        the results, and saves the checkpoint if it is the best. Collective."""
        if self._evaluator is None:
            raise UserError("this run does not evaluate", remedy="start it with --eval-every N")
        self.gathers.finish_all()
        weights = self.average.in_use() if self.average is not None else nullcontext()
        with self.context.trace.record_event("EVALUATE", kind="EVALUATE"):
            with weights:
                self._send_averaged()
                results = self._evaluator.evaluate()
            self._send_averaged()
        if self.metrics is not None:
            for result in results:
                self.metrics.log_evaluation(
                    self.step_number,
                    result.name,
                    result.values,
                    result.samples,
                    result.tokens,
                    result.seconds,
                )
        for result in results:
            if self.reports is not None:
                self.reports.log_evaluation(self.step_number, result)
            self._callbacks.on_evaluate(result)
        if self._best is not None and not self.options.eval_only:
            values = {name: value for r in results for name, value in r.metric_names().items()}
            if self._best.is_improved(self.step_number, values):
                saved = self.save_checkpoint(self._best.folder, keep=1)
                if saved and self.context.rank == 0:
                    self._best.record()
            self._stops_early = self._best.gives_up(self.step_number)
        return results

    def _send_averaged(self) -> None:
        """Sends trained weights to their replicas after averages were put in their place, or taken out."""
        if self.average is not None:
            if self.offload is not None:
                self.offload.write_weights()
            self.reducer.write_weights()
            self.gathers.start_all()
            self.gathers.finish_all()

    def _make_average(self) -> WeightAverage | None:
        """Returns the average of the weights, continued from the resumed checkpoint; None if the run keeps
        none. Raises UserError if it is to be evaluated, but the checkpoint has none."""
        resumed, only = self.context.resumed, self.options.eval_only
        if self.options.ema is None and only != "ema":
            return None
        average = WeightAverage(
            self.options.ema or 0.0, self.reducer.optimized_slices, self._optimized_values
        )
        if resumed is not None and not average.load(resumed.files):
            if only == "ema":
                message = "the checkpoint has no average of the weights"
                raise UserError(
                    message, str(resumed.path), "evaluate it without --ema, or train with --ema D"
                )
            if self.context.rank == 0:
                sys.stderr.write("the checkpoint has no average of the weights: it starts from its weights\n")
        return average

    def _is_save_due(self) -> bool:
        every = self.options.save_every
        return self._is_last_step() or (every is not None and self.step_number % every == 0)

    def _is_last_step(self) -> bool:
        ends = self._stops_early or self._stops or self._callback_failed
        return ends or self.step_number == self.context.last_step

    def save_checkpoint(
        self, folder: Path | None = None, keep: int | None = None, in_background: bool = False
    ) -> bool:
        """Writes a checkpoint to `folder`, which keeps the newest `keep`; by default as --save and --keep
        say. The one before is finished first. Returns False if it could not be written. Collective."""
        folder, keep = (folder, keep) if folder is not None else (self.options.save, self.options.keep)
        assert folder is not None
        self.gathers.finish_all()
        self._report_save(self._saver.finish_save())
        if self.offload is not None:
            self.offload.wait_until_on_host()
        zero3 = self.context.zero3
        # In mixed precision, float32 masters are saved in place of the trained parameters.
        written = self._owned_names - (self._trained_names if self.plan.dtype else set[str]())
        held = checkpoint.model_state(self.model, self.context.parameter_cuts, zero3.parameter_names)
        state = {k: v for k, v in held.items() if k.removeprefix("model/") in written}
        state |= checkpoint.slice_state(
            zero3.slices_to_save(self.context.parameter_cuts, self._owned_names), self._optimized_values
        )
        if self.optimizer is not None:
            state |= self._master_state()
            state |= checkpoint.optimizer_state(
                self.optimizer,
                self.reducer.optimized_slices,
                self._value_owned_names(),
                self._option_owned_names(),
                self.context.rank,
            )
            owned = self._option_owned_names()
            options = {name: found for name, found in self._initial_options.items() if name in owned}
            state[f"options/{self.context.rank}"] = options
        if self.scheduler is not None:
            state[f"scheduler/{self.context.rank}"] = self.scheduler.state_dict()
        if self.average is not None:
            state |= self.average.state(self._value_owned_names())
        context = self.context
        manifest = checkpoint.make_manifest(
            self.model,
            self.step_number,
            context.seed,
            context.shuffle,
            self.plan.global_batch,
            context.run_id,
            str(context.directory.resolve()),
            self._settings,
            context.data_plane.position_after(self.step_number),
        )
        is_main = folder == self.options.save
        copy_name = None
        if self.options.replicate and is_main:
            copy_name = CopyName(attempt_name(), self.step_number)
        keep_every = self.options.keep_every if is_main else None
        self._saver.start_save(folder, state, manifest, keep, in_background, copy_name, keep_every)
        return in_background or self._report_save(self._saver.finish_save())

    def _report_save(self, saved: FinishedSave | None) -> bool:
        """Calls the user's callbacks with a checkpoint that was saved, or says why it was not and returns
        False. Raises UserError if the run ends here: its last weights would be lost without it."""
        if saved is None:
            return True
        if not saved.failure:
            if self.context.rank == 0:
                self._callbacks.on_save(saved.path)
            if self._generator is not None and saved.directory == self.options.save:
                self._generator.start(saved.path)
            return True
        message = f"the checkpoint of step {saved.step} was not saved: {saved.failure}"
        if self._is_last_step() and saved.step == self.step_number:
            remedy = f"{saved.remedy}, or give another --save; then --resume from the checkpoint before"
            raise UserError(message, str(saved.directory), remedy)
        if self.context.rank == 0:
            text = f"{message}; training goes on, checkpoints before it stay"
            say(f"warning: {printable_text(text)}\n  what to do: {saved.remedy}")
        return False

    def _master_state(self) -> dict[str, Any]:
        """Returns the float32 masters that this rank writes; empty without mixed precision."""
        if not self.plan.dtype:
            return {}
        owned = self._value_owned_names()
        return checkpoint.slice_state(
            {p: part for p, part in self.reducer.optimized_slices.items() if part.name in owned},
            self._optimized_values,
        )

    def _optimized_values(self, param: nn.Parameter) -> torch.Tensor:
        """Returns the values of what the optimizer updates, wherever they are."""
        return param.data if self.offload is None else self.offload.values(param)

    def _find_owned_names(self, model: nn.Module) -> set[str]:
        """Returns the state-dict entries that this rank writes: each entry that no earlier rank holds, and
        its parts of cut parameters if its replica is the first."""
        owners = state_dict_owners(self.plan, model)
        own_replicas, own_copies = set[Ranks](), dict[str, Ranks]()
        canonical = canonical_names(model)
        for section in (s for s in self.plan.sections if self.context.rank in s.mesh.ranks):
            replicas, count = ranks_by_replica(section), section.mesh.expert_replicas
            number = next(i for i, ranks in enumerate(replicas) if self.context.rank in ranks)
            own_replicas.add(tp_ranks_of(section, self.context.rank))
            # Replicas with different experts hold one copy of these together.
            # Of ranks with other rows of the same samples, each has all parts that the first of them have.
            first = replicas[number].index(self.context.rank) // section.mesh.tp * section.mesh.tp
            copy = (r[first : first + section.mesh.tp] for r in replicas[number // count * count :][:count])
            routed = (canonical[s.name] for s in section.shards if s.replicas > 1)
            own_copies |= dict.fromkeys(routed, tuple(itertools.chain.from_iterable(copy)))
        return {
            n
            for n, r in owners.items()
            if r == self.context.rank
            or r in own_copies.get(n, ())
            or (
                n in self.context.parameter_cuts
                and n not in own_copies
                and any(r in ranks for ranks in own_replicas)
            )
        }

    def _value_owned_names(self) -> set[str]:
        """Returns the parameters for which this rank writes its part of the optimizer states."""
        sharded = {pair[1].name for pair in self.reducer.sharded_slices.values() if pair is not None}
        whole = {p.name for p in self.reducer.optimized_slices.values()} - sharded
        return whole & self._owned_names | sharded - self.reducer.counted_elsewhere

    def _option_owned_names(self) -> set[str]:
        """Returns the parameters for which this rank writes optimizer options and scalar states: those with
        their first entry on this rank."""
        values = self._value_owned_names()
        return {
            p.name for p in self.reducer.optimized_slices.values() if p.has_first_entry and p.name in values
        }

    def _make_optimizer(
        self, params: Mapping[str, nn.Parameter], trained: Collection[str]
    ) -> torch.optim.Optimizer | None:
        """Constructs the user's optimizer, then leaves this rank's trained parameters in it (tied parameters
        once), with sharded parameters replaced by slices and float32 parameters by masters.

        params: of the model. trained: names of those that any rank trains. Raises UserError if the plan
        shards the optimizer, but it is not elementwise, or if the rank has only some of the parameters, but
        it is coupled.
        """
        if not self._trained_names or self.options.eval_only:
            return None
        # As in one process, for options that depend on a parameter's place or on how many there are.
        every = [(name, p) for name, p in params.items() if p.requires_grad]
        others = {p: None for name, p in every if name not in self._trained_names}
        try:
            optimizer = self.context.user_model.build_optimizer(every)
            shard_optimizer(optimizer, others)
        except UserError:  # it reads values of parameters of other ranks, which are on the meta device
            optimizer = self._make_optimizer_of([(name, p) for name, p in every if p not in others])
        if optimizer is None:
            return None
        if self.reducer.sharded_slices or self.context.parameter_cuts:
            reason = why_not_elementwise(optimizer)
            if reason is not None and not self.reducer.sharded_slices:
                names = [s.name for s in self.plan.sections if s.shards]
                remedy = f"compile again with --set {names[0]}.tp=1"
                raise UserError(f"parameters cannot be cut over ranks: {reason}", remedy=remedy)
            if reason is not None:
                names = [s.name for s in self.plan.sections if s.sharding != "none"]
                remedy = f"compile again with --set {names[0]}.sharding=none"
                raise UserError(f"optimizer states cannot be sharded: {reason}", remedy=remedy)
        if len(self._trained_names) < len(trained):
            with suppress(CannotProbe):  # the plan's notes tell the user that it could not be tried
                if reason := why_coupled(optimizer):
                    message = f"sections cannot be trained on different ranks: {reason}"
                    raise UserError(message, remedy="compile again, with this optimizer in the model file")
        shard_optimizer(optimizer, {**self.reducer.sharded_slices, **self.reducer.masters})
        return optimizer

    def _make_optimizer_of(self, owned: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer | None:
        """Constructs the user's optimizer over parameters of this rank alone; None if the user trains none
        of them."""
        try:
            return self.context.user_model.build_optimizer(owned)
        except UserError as error:
            if isinstance(error.__cause__, ValueError) and "empty parameter list" in str(error.__cause__):
                return None
            raise

    def _offload_activations(self, model: nn.Module) -> ActivationOffload | None:
        """Returns what moves saved activations to host memory, None if no section of this rank asks for
        it."""
        layers = {
            s.name: recompute.units_of_blocks(model, s.blocks)
            for s in self.plan.sections
            if s.offload == "activations" and self.context.rank in s.mesh.ranks
        }
        return ActivationOffload(layers, model, HostCopies(self.context.device)) if layers else None

    def _offload_optimizer(self, names: Collection[str]) -> OffloadedOptimizer | None:
        """Moves the optimizer states and masters of the parameters `names` to host memory. Raises UserError
        if the optimizer does not update parameters independently of each other."""
        offloaded = [p for p, part in self.reducer.optimized_slices.items() if part.name in names]
        if self.optimizer is None or not offloaded:
            return None
        reason = why_not_stepwise(self.optimizer)
        if reason is not None:
            section = next(s.user_section_name for s in self.plan.sections if s.offload == "optimizer")
            raise UserError(
                f"optimizer states cannot be kept in host memory: {reason}",
                remedy=f"compile again with --set {section}.offload=none",
            )
        copies = HostCopies(self.context.device)
        return OffloadedOptimizer(self.optimizer, offloaded, self.reducer.master_groups, copies)
