"""One rank of a run: its place among the ranks, its device, the plan, the user's model file, and what all of
that must satisfy.

`Run` is the first thing that a rank makes. It refuses what cannot work before any process waits for another:
the wrong number of ranks, a model that has changed, a directory that cannot be written.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from secc.runtime.data.data_plane import DataPlane
from secc.runtime.data.epoch_order import Epochs
from secc.runtime.errors import UserError
from secc.runtime.host.child_processes import keep_freed_memory
from secc.runtime.model.meta_build import meta_model
from secc.runtime.monitoring.chrome_trace import Trace
from secc.runtime.monitoring.run_summary import cores_here
from secc.runtime.parameters import checkpoint
from secc.runtime.parameters.mixed_precision import compute_in
from secc.runtime.parameters.rank_weights import build_model, canonical_names, load_user_model
from secc.runtime.parameters.zero3 import Gathered
from secc.runtime.plan import schema as plan
from secc.runtime.plan.replica_routes import replicas
from secc.runtime.plan.schema import Plan
from secc.runtime.rerecording.rerecorder import Rerecorder
from secc.runtime.schedule.cross_step_prefetch import with_run_ahead
from secc.runtime.schedule.scheduler import Orders
from secc.runtime.sections.base import load_section
from secc.runtime.tensor_parallel.parameter_cuts import Cut, cut_parameters, cuts_of
from secc.runtime.training.options import Options

DEFAULT_STEPS = 100
MOST_RECORDERS = 4  # processes of a rank, unless the user wants more: a step has few micro-batches for one


class Terms(Protocol):
    """The plan's module `sections/terms.py`: the loss is the sum of coefficient times numerator over its
    terms, plus `CONSTANT`."""

    @property
    def LEAVES(self) -> Mapping[str, Any]:
        """Name -> function of a batch: sums over samples that coefficients are made of."""
        ...

    @property
    def BUFFERS(self) -> tuple[str, ...]:
        """The constants that were buffers of the model when the plan was made, as `buffer:name`."""
        ...

    def constants(self, name: str, device: torch.device) -> torch.Tensor:
        """A constant of the plan."""
        ...

    @property
    def CONSTANT(self) -> float:
        """What the loss has beside its terms; counted once."""
        ...

    def coefficients(
        self, leaves: Mapping[str, float], size: Mapping[str, int], pattern: frozenset[str]
    ) -> dict[str, float]:
        """Each term's coefficient, from the sums of the leaves over the global batch, its sizes and its union
        of optional keys."""
        ...


class Run(ExitStack):
    """This rank's part of a run; a context that joins the process group and leaves it. Raises UserError for
    what cannot be run."""

    def __init__(self, directory: Path, options: Options, terms: Terms) -> None:
        super().__init__()
        self.directory, self.options, self.terms = directory, options, terms
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.plan = with_run_ahead(plan.load(directory), options.run_ahead)
        check_world(self.plan, self.world_size)
        self.device = _device()
        self.user = load_user_model(self.plan, directory)
        self.log_dir = options.log_dir or directory / "logs"
        self.resume = checkpoint.find(options.resume) if options.resume else None
        self.about = checkpoint.read_manifest(self.resume) if self.resume else None
        epochs = Epochs(len(self.user.dataset()), self.plan.global_batch, epochs=options.epochs)
        self.steps = options.steps or epochs.steps or DEFAULT_STEPS
        if self.about is not None:
            _check_resume(self.plan, self.about, options, self.steps)
        self.seed = options.seed if options.seed is not None else self.about.seed if self.about else 0
        self.shuffle = options.shuffle or bool(self.about and self.about.shuffle)
        self.trace = Trace(options.trace, self.rank, self.device)
        if self.rank == 0:
            _check_outputs(self.log_dir, options)
        self.order = Orders(self.plan, options.order)
        self.cuts: dict[str, Cut] = {}  # the parameters of which this rank has a part
        self.data = self._data()  # forks its loader, so before process groups and GPU contexts

    def __enter__(self) -> Run:
        super().__enter__()
        self.callback(self.data.close)
        if self.device.type == "cpu":
            torch.set_num_threads(1)
            keep_freed_memory()
            dist.init_process_group("gloo")
        else:
            torch.cuda.set_device(self.device)
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=self.device)
        self.callback(dist.destroy_process_group)
        self.trace.begin(", ".join(s.name for s in self.plan.sections if self.rank in s.mesh.ranks))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if kind is not None:
            return None  # the process ends at once: leaving in order would wait for ranks that are gone
        self.trace.close()
        return super().__exit__(None, None, None)

    def _data(self) -> DataPlane:
        return DataPlane(
            self.user,
            self.plan,
            self.rank,
            self.world_size,
            self.seed,
            leaves=self.terms.LEAVES,
            shuffle=self.shuffle,
            epochs=self.options.epochs,
            skip_bad=self.options.skip_bad_samples,
            workers=self.options.workers,
            order=self.order,
            device=self.device,
            start=self.about.step if self.about else 0,
            ahead=1 + (self.records_ahead and self.plan.run_ahead_gib > 0),
            rerecorder=self._rerecorder(),
            recorders=self.recorders,
        )

    @property
    def recorders(self) -> int:
        """How many processes record glue beside the loader: what the user says, else as many as there are
        cores that nothing else has."""
        if self.options.recorders is not None or not self.records_ahead:
            return self.options.recorders or 0
        cores = cores_here() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return max(0, min(MOST_RECORDERS, cores - 1 - self.options.workers))

    @property
    def processes_here(self) -> int:
        """How many processes of the run compute on this machine's cores: loaders, and the ranks where these
        have no GPUs."""
        each = self.options.workers + self.recorders + (self.device.type == "cpu")
        return each * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    @property
    def records_ahead(self) -> bool:
        """Whether glue is recorded anew for most micro-batches, so that it pays to plan a step before the one
        before it trains."""
        return any(not case.spare for case in self.plan.recorded)

    def _rerecorder(self) -> Rerecorder | None:
        """Records the glue that values decide; it loads the sections of this rank on a model of its own."""
        if not self.plan.recorded:
            return None
        mine = [s for s in self.plan.sections if self.rank in s.mesh.ranks]
        return Rerecorder(
            self.plan,
            lambda: compute_in(meta_model(self.user), self.plan.dtype),
            lambda model: [load_section(self.directory, s, model) for s in mine],
        )

    def model(self) -> nn.Module:
        """The user's model with this rank's weights; what only other ranks need is on the meta device."""
        built = build_model(self.plan, self.user, self.rank, self.device, self.seed, self.options.init)
        model = built.model
        shapes, canonical = {name: p.shape for name, p in model.named_parameters()}, canonical_names(model)
        self.cuts = cuts_of(self.plan, self.rank, shapes, canonical)
        cut_parameters(model, self.cuts, built.stored)
        self.gathered = Gathered(self.plan, model, self.rank, self.device, self.cuts, canonical, built.stored)
        if self.resume is not None:
            checkpoint.load_model(self.resume, model, self.cuts, self.gathered)
        return model


def check_buffers(terms: Terms, model: nn.Module) -> None:
    """Refuse a model with other values in the buffers that the loss's coefficients are made of than the plan
    has."""
    buffers = dict(model.named_buffers())
    for constant in terms.BUFFERS:
        name = constant.partition(":")[2]
        expected = terms.constants(constant, torch.device("cpu"))
        if not torch.equal(buffers[name].detach().cpu().to(expected.dtype), expected):
            message = f"the buffer {name}, by which the loss is weighted, has other values than when the plan was made"
            raise UserError(
                message,
                remedy="compile again; let model() always fill it alike, not from weights that it loads",
            )


def check_world(plan: Plan, world_size: int) -> None:
    """Refuse more or fewer ranks than the plan is made for, and meshes that step programs do not express."""
    if world_size != plan.world_size or "MASTER_ADDR" not in os.environ:
        found = (
            f"{world_size} were started"
            if world_size != plan.world_size
            else "run.py was started without torchrun"
        )
        raise UserError(
            f"the plan is made for {plan.world_size} ranks, but {found}",
            remedy=f"start it with `torchrun --nproc-per-node {plan.world_size} run.py`, or compile for another cluster",
        )
    try:
        for section in plan.sections:
            replicas(section)
    except ValueError as error:
        raise UserError(f"the plan cannot be run: {error}", remedy="compile with pp=1") from None


def _device() -> torch.device:
    """A GPU of its own for each rank of this machine, or the CPU for all of them."""
    local, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (
        torch.device("cuda", local)
        if torch.cuda.is_available() and torch.cuda.device_count() >= ranks
        else torch.device("cpu")
    )


def _check_resume(plan: Plan, about: checkpoint.Manifest, options: Options, steps: int) -> None:
    if about.global_batch != plan.global_batch:
        message = f"the checkpoint was made with global batches of {about.global_batch} samples, the plan has {plan.global_batch}"
        raise UserError(message, str(options.resume), f"compile with --global-batch {about.global_batch}")
    if about.step >= steps:
        given = f"--epochs {options.epochs}" if options.epochs else f"--steps {steps}"
        message = f"the checkpoint is of step {about.step}, so {given} leaves nothing to do"
        raise UserError(
            message,
            str(options.resume),
            "give the number of the last step or epoch, counted from the start of training",
        )


def _check_outputs(log_dir: Path, options: Options) -> None:
    """Fail now rather than after the first step."""
    wanted = [
        ("--log-dir", log_dir),
        ("--save", options.save),
        ("--trace", options.trace and options.trace.parent),
    ]
    for option, directory in wanted:
        if directory is None:
            continue
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(
                f"cannot write to the directory: {reason}", str(directory), f"give another {option}"
            ) from None
    if options.trace is not None and options.trace.is_dir():
        raise UserError("the trace file is a directory", str(options.trace), "give another --trace")
