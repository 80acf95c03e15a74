"""One rank of a run: its rank and device, the plan, the user's model file, and the checks before it starts.

A rank constructs its `RankContext` first. It rejects what cannot work before any process waits for another: a
wrong number of ranks, a changed model, a directory that is not writable.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from secc.runtime.comm.host_staged_group import register_backend
from secc.runtime.data.data_plane import DataPlane
from secc.runtime.data.drawn_sums import find_drawn_sums
from secc.runtime.data.epoch_order import EvaluationOrder, repeated_samples_text
from secc.runtime.data.mixed_order import make_sample_order
from secc.runtime.data.sample_metadata import find_placed_rows
from secc.runtime.errors import RunComplete, UserError, printable_text
from secc.runtime.host.child_processes import keep_freed_memory
from secc.runtime.host.cpu_cores import available_cores
from secc.runtime.host.folder_lock import hold_lock
from secc.runtime.model.imported_code import import_package_modules
from secc.runtime.model.item_seeds import derive_item_seed
from secc.runtime.model.meta_build import build_meta_model
from secc.runtime.model.user_file import UserModel
from secc.runtime.monitoring.chrome_trace import ChromeTrace
from secc.runtime.monitoring.metrics import find_lost_steps
from secc.runtime.monitoring.start_phases import StartPhases
from secc.runtime.monitoring.trackers import check_installed
from secc.runtime.parameters.checkpoint import load_model_state
from secc.runtime.parameters.checkpoint_copies import COPIES_VARIABLE, link_copies
from secc.runtime.parameters.checkpoint_folder import (
    FoundCheckpoint,
    check_folder_is_free,
    find_checkpoint,
    has_checkpoints,
    hash_files,
)
from secc.runtime.parameters.checkpoint_writer import BackgroundWriter
from secc.runtime.parameters.mixed_precision import cast_model
from secc.runtime.parameters.rank_weights import build_rank_model, canonical_names, load_user_model
from secc.runtime.parameters.shared_digests import SharedDigests
from secc.runtime.parameters.zero3 import Zero3State
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.replica_routes import ranks_by_replica
from secc.runtime.plan.schema import Plan
from secc.runtime.rerecording.rerecorder import Rerecorder
from secc.runtime.schedule.cross_step_prefetch import with_prefetch_memory
from secc.runtime.schedule.scheduler import ScheduleCache
from secc.runtime.sections.base import load_section_module
from secc.runtime.tensor_parallel.parameter_cuts import ParameterCut, cut_parameters, find_parameter_cuts
from secc.runtime.training.attention_kernels import choose_attention_kernels
from secc.runtime.training.evaluation_data import EvaluationData
from secc.runtime.training.first_check import start_first_check
from secc.runtime.training.hang_watch import HangWatch, StackFile
from secc.runtime.training.machine_check import check_gpu_memory, check_machine
from secc.runtime.training.options import RunOptions
from secc.runtime.training.rendezvous import attempt_number, connect_agent_store, is_joinable, open_store
from secc.runtime.training.run_settings import describe_model

DEFAULT_STEPS = 100
_HASHING_TIMEOUT = timedelta(days=1)  # a launcher ends ranks that wait for one that is gone
_COLLECTIVE_TIMEOUT = timedelta(days=1)  # the watch against hangs is much earlier and says more
MAX_RECORDERS = 4  # per rank, unless --recorders says more: a step has few micro-batches per rank


class LossTermsModule(Protocol):
    """The plan's module `sections/terms.py`. The loss is the sum over its terms of coefficient times
    numerator, plus `CONSTANT`."""

    @property
    def LEAVES(self) -> Mapping[str, Any]:
        """Name -> function of a batch: batch-wide sums that the coefficients are made of."""
        ...

    @property
    def BUFFERS(self) -> tuple[str, ...]:
        """The constants that were buffers of the model when the plan was made, as `buffer:name`."""
        ...

    def constants(self, name: str, device: torch.device) -> torch.Tensor:
        """Returns a constant of the plan."""
        ...

    @property
    def CONSTANT(self) -> float:
        """The constant part of the loss; counted once."""
        ...

    def coefficients(
        self, leaves: Mapping[str, float], size: Mapping[str, int], pattern: frozenset[str]
    ) -> dict[str, float]:
        """Returns the coefficient of each term from the batch-wide sums, the sizes, and the optional keys of
        the global batch."""
        ...


class RankContext(ExitStack):
    """This rank's part of a run; a context manager that joins the process group and leaves it. Raises
    UserError for a run that cannot start."""

    def __init__(self, directory: Path, options: RunOptions, terms: LossTermsModule) -> None:
        super().__init__()
        self.directory, self.options, self.terms = directory, options, terms
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.phases = StartPhases(is_silent=self.rank > 0)
        self.plan = with_prefetch_memory(load_plan(directory), options.run_ahead)
        check_world_size(self.plan, self.world_size)
        first = self.rank - int(os.environ.get("LOCAL_RANK", "0"))  # on this machine
        if options.emulate is None:
            local_ranks = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            check_machine(self.plan, local_ranks, options.share_gpus)
        if options.replicate and COPIES_VARIABLE not in os.environ:
            message = "--replicate needs secc's launcher, which keeps the copies"
            raise UserError(message, remedy="start the plan by `secc run`")
        self.phases.begin("read the model file and its dataset")
        self.device = _choose_device(options.share_gpus)
        self.user_model = load_user_model(self.plan, directory)
        if options.emulate is None:  # before loaders are forked: they build the model, too
            import_package_modules(self.plan.model.modules)
        self.log_dir = options.log_dir or directory / "logs"
        if self.rank == 0:
            _check_writable(self.log_dir, options)
            if options.eval_only is None:
                self._lock_folders()  # before the ranks look for a checkpoint that another run may replace
        self.resumed = self._find_resumed()
        manifest = self.resumed.manifest if self.resumed else None
        self.last_step = options.steps or DEFAULT_STEPS
        if options.eval_only is None:
            self._check_dataset()
        if self.resumed is not None:
            _check_resumption(self.plan, self.resumed, options, self.last_step, self.rank)
        self.first_step = manifest.step if manifest else 0
        self.run_id = (manifest.run if manifest else None) or uuid.uuid4().hex  # rank 0's is the run's
        self.seed = options.seed if options.seed is not None else manifest.seed if manifest else 0
        self.shuffle = options.shuffle or bool(manifest and manifest.shuffle)
        self.trace = ChromeTrace(options.trace, self.rank, self.device)
        if self.rank == 0:
            check_installed(options.report_to)
            if options.save is not None:
                check_folder_is_free(options.save, self.resumed)
            for note in _resumption_notes(options, self.resumed, self.log_dir):
                sys.stderr.write(printable_text(note, newlines=True) + "\n")
        self.schedule_batch = ScheduleCache(self.plan, options.order)
        self.parameter_cuts: dict[str, ParameterCut] = {}  # parameters that tensor parallelism cuts
        self.phases.begin("start the loaders")
        self.stacks = StackFile()  # before loaders are forked, so that they write theirs there
        # All of these fork, which is safe only before process groups and GPU contexts exist.
        checks = self.rank == 0 and options.first_check and not (options.emulate or options.eval_only)
        self.first_check = start_first_check(self.plan, directory, self.user_model) if checks else None
        self.evaluation_data = None
        if options.eval_only is None:
            self.data_plane = self._make_data_plane()
        if options.evaluates:
            self.evaluation_data = self._make_evaluation_data()
            if options.eval_only is not None:
                self.data_plane = self.evaluation_data.data_plane
        saves = options.save is not None and not (options.emulate or options.eval_only)
        self.checkpoint_writer = BackgroundWriter() if saves and options.save_async else None

    def _check_dataset(self) -> None:
        """Finds the last step of `--epochs`, and says if samples repeat in a batch. Opens the dataset, which
        an evaluation alone does not."""
        sample_count, global_batch = self.user_model.sample_count, self.plan.global_batch
        if self.rank == 0 and sample_count is not None and sample_count < global_batch:
            sys.stderr.write(f"{repeated_samples_text(sample_count, global_batch)}\n")
        epochs = make_sample_order(self.user_model, global_batch, epochs=self.options.epochs)
        self.last_step = self.options.steps or epochs.step_count or DEFAULT_STEPS

    def _find_resumed(self) -> FoundCheckpoint | None:
        """Returns the checkpoint that the run continues from; None if it starts from the beginning. The ranks
        hash its files together, if there is a store already."""
        options, hashes = self.options, hash_files
        store = connect_agent_store(_HASHING_TIMEOUT) if self.world_size > 1 else None
        if store is not None:
            hashes = SharedDigests(store, self.rank, self.world_size).hash_files
        if _continues_by_itself(options) and options.save is not None:
            copies = link_copies(options.save, store, self.rank, self.world_size)
            if copies is not None or has_checkpoints(options.save):
                return find_checkpoint(options.save, hashes, copies)
        return find_checkpoint(options.resume, hashes) if isinstance(options.resume, Path) else None

    def _lock_folders(self) -> None:
        """Keeps other runs out of the folders that this one writes into. Raises UserError if one is there."""
        holder, remedy = "another run writes its {} into the directory", "wait for it, or give another {}"
        folders = [("logs", "--log-dir", self.log_dir), ("checkpoints", "--save", self.options.save)]
        for what, option, folder in folders:
            if folder is not None:
                lock = folder / f".{what}.lock"
                self.enter_context(hold_lock(lock, folder, holder.format(what), remedy.format(option)))

    def __enter__(self) -> RankContext:
        super().__enter__()
        self.callback(self.data_plane.close)
        if self.evaluation_data is not None and self.options.eval_only is None:
            self.callback(self.evaluation_data.data_plane.close)
        if self.checkpoint_writer is not None:
            self.callback(self.checkpoint_writer.close)
        ranks = "rank" if self.world_size == 1 else "ranks"
        self.phases.begin(f"connect {self.world_size} {ranks}")
        store = self.store = open_store(self.rank, self.plan.hash)
        if self.device.type == "cpu":
            torch.set_num_threads(1)
            keep_freed_memory()
        else:
            torch.cuda.set_device(self.device)
            choose_attention_kernels(self.plan)
        if self.options.hang_timeout is not None:
            self._watch(store.clone(), self.options.hang_timeout)
        meeting: dict[str, Any] = {
            "store": store,
            "rank": self.rank,
            "world_size": self.world_size,
            "timeout": _COLLECTIVE_TIMEOUT,
        }
        if self.options.share_gpus:
            dist.init_process_group(register_backend(stage_all=self.device.type == "cpu"), **meeting)
        elif self.device.type == "cpu":
            dist.init_process_group("gloo", **meeting)
        else:
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=self.device, **meeting)
        self.callback(dist.destroy_process_group)
        self.trace.start_trace(", ".join(s.name for s in self.plan.sections if self.rank in s.mesh.ranks))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if kind is not None:
            return None  # the process exits at once: cleaning up would wait for ranks that are gone
        self.trace.close()
        return super().__exit__(None, None, None)

    def _watch(self, store: Any, timeout: float) -> None:
        """Starts to watch this rank's progress."""
        planes = [self.data_plane]
        if self.evaluation_data is not None:
            planes.append(self.evaluation_data.data_plane)
        watch = HangWatch(
            self.trace.activity,
            self.stacks,
            store,
            self.rank,
            self.world_size,
            timeout,
            self.log_dir,
            lambda: any(plane.is_waiting for plane in planes),
        )
        self.callback(watch.close)

    def _make_data_plane(self) -> DataPlane:
        return DataPlane(
            self.user_model,
            self.plan,
            self.rank,
            self.world_size,
            self.seed,
            leaves=self.terms.LEAVES,
            placed_rows=find_placed_rows(self.terms),
            drawn=find_drawn_sums(self.terms, self.plan, lambda step: derive_item_seed(self.seed, -1, step)),
            shuffle=self.shuffle,
            epochs=self.options.epochs,
            skip_bad=self.options.skip_bad_samples,
            workers=self.options.workers,
            order=self.schedule_batch,
            device=self.device,
            start=self.first_step,
            ahead=1 + (self.records_ahead and self.plan.run_ahead_gib > 0),
            rerecorder=self._make_rerecorder(),
            recorders=self.recorder_count,
            resumed=self.resumed.manifest.data if self.resumed is not None else None,
            accepts_change="dataset" in self.options.allow_change,
            saves=self.rank == 0 and self.options.save is not None,
        )

    def _make_evaluation_data(self) -> EvaluationData:
        def make_data_plane(user: UserModel, batches: EvaluationOrder) -> DataPlane:
            return DataPlane(
                user,
                self.plan,
                self.rank,
                self.world_size,
                self.seed,
                leaves=self.terms.LEAVES,
                placed_rows=find_placed_rows(self.terms),
                drawn=find_drawn_sums(
                    self.terms, self.plan, lambda _: derive_item_seed(self.seed, -2, 0), evaluates=True
                ),
                skip_bad=self.options.skip_bad_samples,
                # Each further worker would read all of a stream.
                workers=min(self.options.workers, 1) if user.evaluates_streams else self.options.workers,
                device=self.device,
                rerecorder=self._make_rerecorder(evaluates=True),
                batches=batches,
            )

        o = self.options
        return EvaluationData(
            self.plan, self.rank, self.user_model, o.eval_batch, o.order, self.trace, make_data_plane
        )

    def loss_coefficients(
        self, batch_sums: Mapping[str, float], sizes: Mapping[str, int], pattern: frozenset[str]
    ) -> dict[str, float]:
        """Returns the coefficients of the loss terms for a batch with these batch-wide sums, sizes and
        optional inputs. Raises UserError if the plan has no loss for the combination of inputs."""
        try:
            return self.terms.coefficients(batch_sums, sizes, pattern)
        except KeyError:
            message = f"the plan has no loss for a batch with {sorted(pattern) or 'no optional inputs'}"
            remedy = "let dataset() show such samples earlier, or compile again with more --stats-samples"
            raise UserError(message, remedy=remedy) from None

    @property
    def recorder_count(self) -> int:
        """The number of processes that re-record glue next to the loader: as given, else the cores of this
        rank that nothing else uses."""
        if self.options.recorders is not None or not self.records_ahead:
            return self.options.recorders or 0
        cores = available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return max(0, min(MAX_RECORDERS, cores - 1 - self.options.workers))

    @property
    def local_process_count(self) -> int:
        """The number of processes of this run that compute on this machine's cores: loaders, recorders, and
        ranks on the CPU."""
        each = self.options.workers + self.recorder_count + (self.device.type == "cpu")
        return each * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    @property
    def records_ahead(self) -> bool:
        """Whether glue is re-recorded for most micro-batches, so that planning one step early pays."""
        return any(not case.spare for case in self.plan.recorded)

    def _make_rerecorder(self, evaluates: bool = False) -> Rerecorder | None:
        """Returns what re-records data-dependent glue, with this rank's sections on a model of its own, in
        eval mode if it `evaluates`; None if the plan needs none."""
        if not self.plan.recorded:
            return None

        def make_model() -> nn.Module:
            model = cast_model(build_meta_model(self.user_model), self.plan.dtype)
            return model.eval() if evaluates else model

        own_sections = [s for s in self.plan.sections if self.rank in s.mesh.ranks]
        return Rerecorder(
            self.plan,
            make_model,
            lambda model: [load_section_module(self.directory, s, model) for s in own_sections],
        )

    def _ranks_on_device(self) -> list[int]:
        """Returns the ranks that compute on this rank's device."""
        if not self.options.share_gpus or self.device.type == "cpu":
            return [self.rank]
        gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
        local_ranks = range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        return [self.rank - local + other for other in local_ranks if other % gpus == local % gpus]

    def load_model(self) -> nn.Module:
        """Returns the user's model with this rank's weights; parameters that only other ranks need are on the
        meta device. Collective if the model is large or a checkpoint is resumed. Raises UserError for a GPU
        with too little memory."""
        self.phases.begin(
            "build the model" if self.resumed is None else "build the model, load the checkpoint"
        )
        check_gpu_memory(self.plan, self._ranks_on_device(), self.device)
        built = build_rank_model(
            self.plan, self.user_model, self.rank, self.device, self.seed, self.options.init
        )
        model = built.model
        self.model_settings = describe_model(model)
        shapes, canonical = {name: p.shape for name, p in model.named_parameters()}, canonical_names(model)
        self.parameter_cuts = find_parameter_cuts(self.plan, self.rank, shapes, canonical)
        cut_parameters(model, self.parameter_cuts, built.deferred_sources)
        self.zero3 = Zero3State(
            self.plan, model, self.rank, self.device, self.parameter_cuts, canonical, built.deferred_sources
        )
        if self.resumed is not None:
            load_model_state(self.resumed.files, model, self.parameter_cuts, self.zero3)
        return model


def check_loss_buffers(terms: LossTermsModule, model: nn.Module) -> None:
    """Raises UserError if buffers that the loss's coefficients are computed from have other values than when
    the plan was made."""
    buffers = dict(model.named_buffers())
    for constant in terms.BUFFERS:
        name = constant.partition(":")[2]
        expected = terms.constants(constant, torch.device("cpu"))
        if not torch.equal(buffers[name].detach().cpu().to(expected.dtype), expected):
            raise UserError(
                f"the buffer {name}, by which the loss is weighted, has other values than when the plan was"
                " made",
                remedy="compile again; let model() always fill it with the same values, not from weights"
                " that it loads",
            )


def check_world_size(plan: Plan, world_size: int) -> None:
    """Raises UserError for a wrong number of ranks, and for meshes that step programs cannot express."""
    if world_size != plan.world_size or not is_joinable():
        problem = f"{world_size} were started"
        if world_size == plan.world_size:
            problem = "run.py was started by itself"
        raise UserError(
            f"the plan is made for {plan.world_size} ranks, but {problem}",
            remedy=f"start it with `secc run` or `torchrun --nproc-per-node {plan.world_size} run.py`, or"
            " compile for another cluster",
        )
    try:
        for section in plan.sections:
            ranks_by_replica(section)
    except ValueError as error:
        raise UserError(f"the plan cannot be run: {error}", remedy="compile with pp=1") from None


def _choose_device(share_gpus: bool) -> torch.device:
    """Returns the GPU of this rank if the machine has one for each of its ranks, or has any and they share
    them; else the CPU."""
    local, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus >= ranks or (gpus and share_gpus):
        return torch.device("cuda", local % gpus)
    return torch.device("cpu")


def _continues_by_itself(options: RunOptions) -> bool:
    """Tells whether the run takes the newest checkpoint in --save, if there is one, and else starts as its
    options say: with --resume auto, and after a failure."""
    return options.resume == "auto" or attempt_number() > 0


def _resumption_notes(options: RunOptions, resumed: FoundCheckpoint | None, log_dir: Path) -> Iterator[str]:
    """Yields what a user should know about where the run starts, a line each."""
    if resumed is not None:
        yield from resumed.notes()
    if not _continues_by_itself(options):
        return
    if resumed is not None:
        yield f"continuing from {resumed.path}"
    elif options.save is not None:
        yield f"no checkpoint in {options.save}: starting"
    if attempt_number():
        steps, seconds = find_lost_steps(log_dir, resumed.manifest.step if resumed else 0)
        yield f"restart {attempt_number()}: {steps} steps ({seconds:.1f} s) were lost and are computed again"


def _check_resumption(
    plan: Plan, resumed: FoundCheckpoint, options: RunOptions, steps: int, rank: int
) -> None:
    """Raises UserError if the checkpoint does not fit the plan or leaves nothing to train; ends the process
    with 0 if that is no error."""
    manifest, where = resumed.manifest, str(resumed.path)
    if manifest.global_batch != plan.global_batch:
        message = (
            f"the checkpoint was made with global batches of {manifest.global_batch} samples, the plan has"
            f" {plan.global_batch}"
        )
        raise UserError(message, where, f"compile with --global-batch {manifest.global_batch}")
    if manifest.step >= steps and _continues_by_itself(options) and not options.eval_only:
        if rank == 0:
            sys.stderr.write(f"the run is complete: {where} is of step {manifest.step} of {steps}\n")
        raise RunComplete(0)
    if manifest.step >= steps and not options.eval_only:
        given = f"--epochs {options.epochs}" if options.epochs else f"--steps {steps}"
        message = f"the checkpoint is of step {manifest.step}, so {given} leaves nothing to do"
        raise UserError(
            message,
            where,
            "give the number of the last step or epoch, counted from the start of training",
        )


def _check_writable(log_dir: Path, options: RunOptions) -> None:
    """Raises UserError for an output directory that cannot be written, now rather than after the first
    step."""
    wanted = [
        ("--log-dir", log_dir),
        ("--save", options.save),
        ("--trace", options.trace and options.trace.parent),
    ]
    for option, directory in wanted:
        if directory is None:
            continue
        try:
            if directory.exists() and not directory.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(
                f"cannot write to the directory: {reason}", str(directory), f"give another {option}"
            ) from None
    try:
        if options.trace is not None and options.trace.is_dir():
            raise UserError("the trace file is a directory", str(options.trace), "give another --trace")
        if options.trace is not None and options.trace.exists() and not options.trace.is_file():
            raise UserError(
                "cannot write the trace: no regular file", str(options.trace), "give another --trace"
            )
    except OSError as error:  # a name that is too long
        message = f"cannot write the trace file: {error.strerror}"
        raise UserError(message, str(options.trace), "give another --trace") from None
