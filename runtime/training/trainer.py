"""The loop of a rank: the next global batch, its schedule, the check, the step program, gradients, the
optimizer.

Every rank computes the same schedule from the same metadata, so nothing but tensors and sums is exchanged.
The optimizer and the scheduler are the user's, over the parameters of this rank's sections; a rank without
trainable parameters has neither.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from secc.runtime.comm.p2p_channels import Transport
from secc.runtime.comm.p2p_rounds import RoundTransport
from secc.runtime.data.data_plane import GlobalBatch
from secc.runtime.errors import UserError
from secc.runtime.fusion.install import install_fused, read_fused_source
from secc.runtime.model.item_seeds import derive_item_seed
from secc.runtime.monitoring.metrics import MetricsLog
from secc.runtime.monitoring.run_summary import summary_lines
from secc.runtime.monitoring.section_times import SectionSeconds, SectionTimesLog, section_time_columns
from secc.runtime.parameters import checkpoint
from secc.runtime.parameters.elementwise_check import why_not_elementwise
from secc.runtime.parameters.gradient_reduction import GradientReducer, build_reduction_groups
from secc.runtime.parameters.mixed_precision import cast_model, compute_dtype
from secc.runtime.parameters.rank_weights import canonical_names, state_dict_owners
from secc.runtime.parameters.sharded_optimizer import shard_optimizer
from secc.runtime.plan.replica_routes import ranks_by_replica
from secc.runtime.sections import recompute
from secc.runtime.sections.base import SectionModule
from secc.runtime.tensor_parallel import styles
from secc.runtime.tensor_parallel.replica_group import make_replica_groups
from secc.runtime.training.engine import Engine, StepInput
from secc.runtime.training.rank_context import RankContext
from secc.runtime.training.step_batches import StepBatches
from secc.runtime.training.step_planner import PlannedStep, plan_steps

TRANSPORTS = {"channels": Transport, "rounds": RoundTransport}


class Trainer:
    """Trains this rank's sections. Made on all ranks at the same place, because making process groups is
    collective."""

    def __init__(self, run: RankContext, model: nn.Module, sections: Sequence[SectionModule]) -> None:
        self.context, self.model, self.terms = run, model, run.terms
        self.plan, self.options = run.plan, run.options
        canonical = canonical_names(model)
        params = dict(model.named_parameters())
        held = build_reduction_groups(self.plan, [n for n, p in params.items() if p.requires_grad], canonical)
        install_fused(model, self.plan.rewrites, read_fused_source(run.directory))
        groups = make_replica_groups(self.plan, run.rank)
        styles.install_styles(self.plan, model, groups)
        for section in self.plan.sections:
            if run.rank in section.mesh.ranks:
                recompute.install_recompute(model, section.blocks, section.recompute)
        run.zero3.wrap_units()
        self.reducer = GradientReducer(
            held,
            params,
            run.rank,
            run.device,
            run.parameter_cuts,
            compute_dtype(self.plan.dtype),
            run.zero3.sharded_units,
        )
        used = {canonical[n] for s in self.plan.sections for n in s.params}
        cast_model(model, self.plan.dtype, but=params.keys() - used)
        transport = TRANSPORTS[self.options.comm](self.plan, run.rank, run.device, self.options.debug_comm)
        held_sections = {s.name: s for s in sections}
        for section in sections:
            section.group = groups.get(section.name)
        self.engine = Engine(
            self.plan,
            held_sections,
            transport,
            self.reducer.start_section,
            run.trace,
            self.reducer.arm_overlap_hooks,
            groups,
            run.zero3.gatherers,
        )
        self._owned_names = self._find_owned_names(model)
        self._trained_names = {n for h in held if run.rank in h.ranks for n in h.names}
        self.optimizer = self._make_optimizer(
            {params[n]: n for h in held if run.rank in h.ranks for n in h.names}
        )
        self.scheduler = (
            run.user_model.build_scheduler(self.optimizer) if self.optimizer is not None else None
        )
        self.step_number = run.resumed_manifest.step if run.resumed_manifest else 0
        if run.resumed_checkpoint is not None:
            checkpoint.load_optimizer_state(
                run.resumed_checkpoint,
                self.optimizer,
                self.scheduler,
                self.reducer.optimized_slices,
                run.rank,
            )
        self.metrics = MetricsLog(run.log_dir, run.last_step) if run.rank == 0 else None
        self.section_times = SectionTimesLog(run.log_dir, self.plan) if run.rank == 0 else None
        self._step_start = time.perf_counter()

    def plan_steps(self) -> Iterator[PlannedStep]:
        """The global batches that are left to train; the next one loads while one trains.

        Where glue is recorded anew, its order is planned ahead too, so that its recordings are made
        meanwhile.
        """
        self._step_start = time.perf_counter()
        yield from plan_steps(self.context, self.step_number, ahead=self.context.records_ahead)
        if self.metrics is not None and self.section_times is not None:
            self.metrics.close()
            self.section_times.close()
            for line in summary_lines(
                self.plan, self.section_times.steps, self.context.log_dir, self.context.local_process_count
            ):
                sys.stderr.write(line + "\n")

    def train_step(self, step: PlannedStep) -> float:
        """One optimizer step on a global batch of `batches`. Returns the loss over the whole of it, which
        every rank computes."""
        batch = step.batch
        coefficients = self._loss_coefficients(batch)
        self.reducer.reset_gradients()
        seed, later_seed = (
            derive_item_seed(self.context.seed, -1, number) for number in (batch.step, batch.step + 1)
        )
        loading = StepBatches(self.context.data_plane, step, self.context.trace)
        event = self.context.trace.record_event
        with event("PROGRAM", kind="PROGRAM"):
            share = self.engine.run_step(
                StepInput(step.schedule, step.samples, loading.load_batch, coefficients, seed, later_seed)
            )
        with event("GRADIENTS", kind="GRADIENTS"):
            self.reducer.finish_reduction()
        with event("NORM", kind="NORM"):
            squared = self.reducer.squared_norm()
        with event("TOTALS", kind="TOTALS"):
            loss, norm, logged, spent = self._sum_over_ranks(share, squared, loading)
        with event("OPTIMIZER", kind="OPTIMIZER"):
            self._step_optimizer(loss, norm)
        self.step_number += 1
        seconds = self._finish_step(batch, loss, float(norm), logged)
        if self.section_times is not None:
            self.section_times.log_step(self.step_number, seconds, spent, step.samples, step.schedule)
        return loss

    def _step_optimizer(self, loss: float, norm: torch.Tensor) -> None:
        """The optimizer's and the scheduler's step."""
        if self.options.clip is not None:
            self.reducer.clip_gradients(norm, self.options.clip)
        if self.optimizer is not None:
            self.optimizer.step()
        self.reducer.gather_parameters()
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)
        elif self.scheduler is not None:
            self.scheduler.step()

    def _loss_coefficients(self, batch: GlobalBatch) -> dict[str, float]:
        """The loss terms' factors. Raises UserError if the plan knows no loss for the batch's optional
        inputs."""
        pattern = frozenset[str]().union(*(s.pattern for s in batch.samples))
        try:
            return self.terms.coefficients(batch.batch_sums, batch.sizes, pattern)
        except KeyError:
            message = (
                f"the plan knows no loss for a global batch with {sorted(pattern) or 'no optional inputs'}"
            )
            remedy = "let dataset() show such samples earlier, or compile again with more --stats-samples"
            raise UserError(message, remedy=remedy) from None

    def _sum_over_ranks(
        self, share: torch.Tensor, squared: torch.Tensor, loading: StepBatches
    ) -> tuple[float, torch.Tensor, dict[str, float], SectionSeconds]:
        """The loss, the gradients' global norm, the scalars that are logged, and what sections took, from
        this rank's shares of each.

        `squared` is its share of the squared norm.
        """
        waited = loading.recording_metrics(1 / self.context.world_size) if self.plan.recorded else {}
        shares = self.engine.logged | {name: share.new_tensor(seconds) for name, seconds in waited.items()}
        own, names = self.engine.stopwatch.take_seconds(), section_time_columns(self.plan)
        times = [share.new_tensor(own.get((name, kind), 0.0) / tp) for name, kind, tp in names]
        totals = self.context.data_plane.exchange_values(
            torch.stack([share, squared, *shares.values(), *times]), self.context.last_step
        ).sum(0)
        logged = dict(zip(shares, found := totals[2:].tolist(), strict=False))
        spent = {
            (name, kind): seconds
            for (name, kind, _), seconds in zip(names, found[len(shares) :], strict=True)
        }
        return float(totals[0]) + self.terms.CONSTANT, totals[1].sqrt(), logged, spent

    def _finish_step(
        self, batch: GlobalBatch, loss: float, norm: float, logged: Mapping[str, float]
    ) -> float:
        """Log the step and save where that is due. Returns the step's seconds."""
        now = time.perf_counter()
        seconds = now - self._step_start
        if self.metrics is not None:
            values = {
                "step": self.step_number,
                "loss": loss,
                "grad_norm": norm,
                "samples": len(batch.samples),
                "tokens": batch.tokens,
            }
            skipped = {"skipped": len(batch.skipped_indices)} if self.options.skip_bad_samples else {}
            self.metrics.log_step({**logged} | values | skipped | {"step_time_s": seconds})
        self._step_start = time.perf_counter()
        if self.options.save is not None and self._is_save_due():
            self.save_checkpoint()
        return seconds

    def _is_save_due(self) -> bool:
        every = self.options.save_every
        return self.step_number == self.context.last_step or (
            every is not None and self.step_number % every == 0
        )

    def save_checkpoint(self) -> None:
        """Write a checkpoint of all ranks. Collective."""
        assert self.options.save is not None
        gathered = self.context.zero3
        own = self._owned_names - (
            self._trained_names if self.plan.dtype else set[str]()
        )  # of the rest masters are saved
        held = checkpoint.model_state(self.model, self.context.parameter_cuts, gathered.parameter_names)
        state = {k: v for k, v in held.items() if k.removeprefix("model/") in own}
        state |= checkpoint.slice_state(gathered.slices_to_save(self.context.parameter_cuts))
        if self.optimizer is not None:
            pieces = self.reducer.optimized_slices
            state |= self._master_state()
            state |= checkpoint.optimizer_state(
                self.optimizer,
                pieces,
                self._value_owned_names(),
                self._option_owned_names(),
                self.context.rank,
            )
        if self.scheduler is not None:
            state[f"scheduler/{self.context.rank}"] = self.scheduler.state_dict()
        about = checkpoint.make_manifest(
            self.model, self.step_number, self.context.seed, self.context.shuffle, self.plan.global_batch
        )
        checkpoint.save_checkpoint(self.options.save, state, about)

    def _master_state(self) -> dict[str, Any]:
        """What this rank writes of the parameters that compute in fewer bits than the optimizer updates."""
        if not self.plan.dtype:
            return {}
        owned = self._value_owned_names()
        return checkpoint.slice_state(
            {p: piece for p, piece in self.reducer.optimized_slices.items() if piece.name in owned}
        )

    def _find_owned_names(self, model: nn.Module) -> set[str]:
        """The entries of the state dict that this rank writes: those that it is the first to hold, or its
        parts of cut ones."""
        first = state_dict_owners(self.plan, model)
        together = {
            ranks for s in self.plan.sections for ranks in ranks_by_replica(s) if self.context.rank in ranks
        }
        return {
            n
            for n, r in first.items()
            if r == self.context.rank
            or (n in self.context.parameter_cuts and any(r in ranks for ranks in together))
        }

    def _value_owned_names(self) -> set[str]:
        """The parameters of whose optimizer states this rank writes what it has."""
        sharded = {found[1].name for found in self.reducer.sharded_slices.values() if found is not None}
        whole = {p.name for p in self.reducer.optimized_slices.values()} - sharded
        return whole & self._owned_names | sharded - self.reducer.counted_elsewhere

    def _option_owned_names(self) -> set[str]:
        """The parameters whose optimizer options and scalar states this rank writes: who has the first
        entry."""
        values = self._value_owned_names()
        return {
            p.name for p in self.reducer.optimized_slices.values() if p.has_first_entry and p.name in values
        }

    def _make_optimizer(self, trained: Mapping[nn.Parameter, str]) -> torch.optim.Optimizer | None:
        """The user's optimizer over this rank's trainable parameters, one entry for each, also if it is tied;
        slices of sharded ones.

        Raises UserError if it cannot be sharded as the plan wants.
        """
        if not trained:
            return None
        try:
            optimizer = self.context.user_model.build_optimizer(
                [(name, param) for param, name in trained.items()]
            )
        except UserError as error:
            # The user trains only some parameters, and this rank has none of them.
            if isinstance(error.__cause__, ValueError) and "empty parameter list" in str(error.__cause__):
                return None
            raise
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
        shard_optimizer(optimizer, {**self.reducer.sharded_slices, **self.reducer.masters})
        return optimizer
