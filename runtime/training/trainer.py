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
from secc.runtime.comm.p2p_rounds import Exchanges
from secc.runtime.data.data_plane import GlobalBatch
from secc.runtime.errors import UserError
from secc.runtime.fusion.install import install, read
from secc.runtime.model.item_seeds import item_seed
from secc.runtime.monitoring.metrics import Metrics
from secc.runtime.monitoring.run_summary import summary
from secc.runtime.monitoring.section_times import Spent, Times, columns
from secc.runtime.parameters import checkpoint
from secc.runtime.parameters.elementwise_check import refusal
from secc.runtime.parameters.gradient_reduction import Reducer, holders
from secc.runtime.parameters.mixed_precision import compute_in, dtype_of
from secc.runtime.parameters.rank_weights import canonical_names, owners
from secc.runtime.parameters.sharded_optimizer import shard_optimizer
from secc.runtime.plan.replica_routes import replicas
from secc.runtime.sections import recompute
from secc.runtime.sections.base import Section
from secc.runtime.tensor_parallel import styles
from secc.runtime.tensor_parallel.replica_group import make_groups
from secc.runtime.training.engine import Engine, StepInput
from secc.runtime.training.rank_context import Run
from secc.runtime.training.step_batches import Loading
from secc.runtime.training.step_planner import Step, steps

TRANSPORTS = {"channels": Transport, "rounds": Exchanges}


class Trainer:
    """Trains this rank's sections. Made on all ranks at the same place, because making process groups is
    collective."""

    def __init__(self, run: Run, model: nn.Module, sections: Sequence[Section]) -> None:
        self.run, self.model, self.terms = run, model, run.terms
        self.plan, self.options = run.plan, run.options
        canonical = canonical_names(model)
        params = dict(model.named_parameters())
        held = holders(self.plan, [n for n, p in params.items() if p.requires_grad], canonical)
        install(model, self.plan.rewrites, read(run.directory))
        groups = make_groups(self.plan, run.rank)
        styles.install(self.plan, model, groups)
        for section in self.plan.sections:
            if run.rank in section.mesh.ranks:
                recompute.install(model, section.blocks, section.recompute)
        run.gathered.install()
        self.reducer = Reducer(
            held, params, run.rank, run.device, run.cuts, dtype_of(self.plan.dtype), run.gathered.flats
        )
        used = {canonical[n] for s in self.plan.sections for n in s.params}
        compute_in(model, self.plan.dtype, but=params.keys() - used)
        transport = TRANSPORTS[self.options.comm](self.plan, run.rank, run.device, self.options.debug_comm)
        held_sections = {s.name: s for s in sections}
        for section in sections:
            section.group = groups.get(section.name)
        self.engine = Engine(
            self.plan,
            held_sections,
            transport,
            self.reducer.start,
            run.trace,
            self.reducer.expect,
            groups,
            run.gathered.passes,
        )
        self._owned = self._owned_names(model)
        self._trained = {n for h in held if run.rank in h.ranks for n in h.names}
        self.optimizer = self._make_optimizer(
            {params[n]: n for h in held if run.rank in h.ranks for n in h.names}
        )
        self.scheduler = run.user.scheduler(self.optimizer) if self.optimizer is not None else None
        self.step_number = run.about.step if run.about else 0
        if run.resume is not None:
            checkpoint.load_optimizer(
                run.resume, self.optimizer, self.scheduler, self.reducer.pieces, run.rank
            )
        self.metrics = Metrics(run.log_dir, run.steps) if run.rank == 0 else None
        self.times = Times(run.log_dir, self.plan) if run.rank == 0 else None
        self._since = time.perf_counter()

    def batches(self) -> Iterator[Step]:
        """The global batches that are left to train; the next one loads while one trains.

        Where glue is recorded anew, its order is planned ahead too, so that its recordings are made
        meanwhile.
        """
        self._since = time.perf_counter()
        yield from steps(self.run, self.step_number, ahead=self.run.records_ahead)
        if self.metrics is not None and self.times is not None:
            self.metrics.close()
            self.times.close()
            for line in summary(self.plan, self.times.steps, self.run.log_dir, self.run.processes_here):
                sys.stderr.write(line + "\n")

    def step(self, step: Step) -> float:
        """One optimizer step on a global batch of `batches`. Returns the loss over the whole of it, which
        every rank computes."""
        batch = step.batch
        coefficients = self._coefficients(batch)
        self.reducer.reset()
        seed, later_seed = (item_seed(self.run.seed, -1, number) for number in (batch.step, batch.step + 1))
        loading = Loading(self.run.data, step, self.run.trace)
        event = self.run.trace.event
        with event("PROGRAM", kind="PROGRAM"):
            share = self.engine.run(
                StepInput(step.schedule, step.samples, loading.batch, coefficients, seed, later_seed)
            )
        with event("GRADIENTS", kind="GRADIENTS"):
            self.reducer.finish()
        with event("NORM", kind="NORM"):
            squared = self.reducer.squared_norm()
        with event("TOTALS", kind="TOTALS"):
            loss, norm, logged, spent = self._totals(share, squared, loading)
        with event("OPTIMIZER", kind="OPTIMIZER"):
            self._update(loss, norm)
        self.step_number += 1
        seconds = self._finish_step(batch, loss, float(norm), logged)
        if self.times is not None:
            self.times.log(self.step_number, seconds, spent, step.samples, step.schedule)
        return loss

    def _update(self, loss: float, norm: torch.Tensor) -> None:
        """The optimizer's and the scheduler's step."""
        if self.options.clip is not None:
            self.reducer.clip(norm, self.options.clip)
        if self.optimizer is not None:
            self.optimizer.step()
        self.reducer.gather()
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)
        elif self.scheduler is not None:
            self.scheduler.step()

    def _coefficients(self, batch: GlobalBatch) -> dict[str, float]:
        """The loss terms' factors. Raises UserError if the plan knows no loss for the batch's optional
        inputs."""
        pattern = frozenset[str]().union(*(s.pattern for s in batch.samples))
        try:
            return self.terms.coefficients(batch.leaves, batch.sizes, pattern)
        except KeyError:
            message = (
                f"the plan knows no loss for a global batch with {sorted(pattern) or 'no optional inputs'}"
            )
            remedy = "let dataset() show such samples earlier, or compile again with more --stats-samples"
            raise UserError(message, remedy=remedy) from None

    def _totals(
        self, share: torch.Tensor, squared: torch.Tensor, loading: Loading
    ) -> tuple[float, torch.Tensor, dict[str, float], Spent]:
        """The loss, the gradients' global norm, the scalars that are logged, and what sections took, from
        this rank's shares of each.

        `squared` is its share of the squared norm.
        """
        waited = loading.spent(1 / self.run.world_size) if self.plan.recorded else {}
        shares = self.engine.logged | {name: share.new_tensor(seconds) for name, seconds in waited.items()}
        own, names = self.engine.stopwatch.take(), columns(self.plan)
        times = [share.new_tensor(own.get((name, kind), 0.0) / tp) for name, kind, tp in names]
        totals = self.run.data.exchange(
            torch.stack([share, squared, *shares.values(), *times]), self.run.steps
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
        seconds = now - self._since
        if self.metrics is not None:
            values = {
                "step": self.step_number,
                "loss": loss,
                "grad_norm": norm,
                "samples": len(batch.samples),
                "tokens": batch.tokens,
            }
            skipped = {"skipped": len(batch.skipped)} if self.options.skip_bad_samples else {}
            self.metrics.log({**logged} | values | skipped | {"step_time_s": seconds})
        self._since = time.perf_counter()
        if self.options.save is not None and self._save_due():
            self.save()
        return seconds

    def _save_due(self) -> bool:
        every = self.options.save_every
        return self.step_number == self.run.steps or (every is not None and self.step_number % every == 0)

    def save(self) -> None:
        """Write a checkpoint of all ranks. Collective."""
        assert self.options.save is not None
        gathered = self.run.gathered
        own = self._owned - (
            self._trained if self.plan.dtype else set[str]()
        )  # of the rest masters are saved
        held = checkpoint.model_state(self.model, self.run.cuts, gathered.names)
        state = {k: v for k, v in held.items() if k.removeprefix("model/") in own}
        state |= checkpoint.piece_state(gathered.written(self.run.cuts))
        if self.optimizer is not None:
            pieces = self.reducer.pieces
            state |= self._masters()
            state |= checkpoint.optimizer_state(
                self.optimizer, pieces, self._values_owned(), self._options_owned(), self.run.rank
            )
        if self.scheduler is not None:
            state[f"scheduler/{self.run.rank}"] = self.scheduler.state_dict()
        about = checkpoint.manifest(
            self.model, self.step_number, self.run.seed, self.run.shuffle, self.plan.global_batch
        )
        checkpoint.save(self.options.save, state, about)

    def _masters(self) -> dict[str, Any]:
        """What this rank writes of the parameters that compute in fewer bits than the optimizer updates."""
        if not self.plan.dtype:
            return {}
        owned = self._values_owned()
        return checkpoint.piece_state(
            {p: piece for p, piece in self.reducer.pieces.items() if piece.name in owned}
        )

    def _owned_names(self, model: nn.Module) -> set[str]:
        """The entries of the state dict that this rank writes: those that it is the first to hold, or its
        parts of cut ones."""
        first = owners(self.plan, model)
        together = {ranks for s in self.plan.sections for ranks in replicas(s) if self.run.rank in ranks}
        return {
            n
            for n, r in first.items()
            if r == self.run.rank or (n in self.run.cuts and any(r in ranks for ranks in together))
        }

    def _values_owned(self) -> set[str]:
        """The parameters of whose optimizer states this rank writes what it has."""
        sharded = {found[1].name for found in self.reducer.slices.values() if found is not None}
        whole = {p.name for p in self.reducer.pieces.values()} - sharded
        return whole & self._owned | sharded - self.reducer.repeated

    def _options_owned(self) -> set[str]:
        """The parameters whose optimizer options and scalar states this rank writes: who has the first
        entry."""
        values = self._values_owned()
        return {p.name for p in self.reducer.pieces.values() if p.first and p.name in values}

    def _make_optimizer(self, trained: Mapping[nn.Parameter, str]) -> torch.optim.Optimizer | None:
        """The user's optimizer over this rank's trainable parameters, one entry for each, also if it is tied;
        slices of sharded ones.

        Raises UserError if it cannot be sharded as the plan wants.
        """
        if not trained:
            return None
        try:
            optimizer = self.run.user.optimizer([(name, param) for param, name in trained.items()])
        except UserError as error:
            # The user trains only some parameters, and this rank has none of them.
            if isinstance(error.__cause__, ValueError) and "empty parameter list" in str(error.__cause__):
                return None
            raise
        if self.reducer.slices or self.run.cuts:
            reason = refusal(optimizer)
            if reason is not None and not self.reducer.slices:
                names = [s.name for s in self.plan.sections if s.shards]
                remedy = f"compile again with --set {names[0]}.tp=1"
                raise UserError(f"parameters cannot be cut over ranks: {reason}", remedy=remedy)
            if reason is not None:
                names = [s.name for s in self.plan.sections if s.sharding != "none"]
                remedy = f"compile again with --set {names[0]}.sharding=none"
                raise UserError(f"optimizer states cannot be sharded: {reason}", remedy=remedy)
        shard_optimizer(optimizer, {**self.reducer.slices, **self.reducer.masters})
        return optimizer
