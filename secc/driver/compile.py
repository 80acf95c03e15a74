"""The way from `model.py` to a plan: one function that reads as the list of its steps.

The command line, the checks and the tests all compile through here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from xdsl.dialects.builtin import ModuleOp, StringAttr

from secc import __version__, pass_pipeline, process_map
from secc.cluster import parse
from secc.codegen import plan_builder as plan_codegen
from secc.codegen.fused_module import fused_module, rewrites
from secc.codegen.plan_files import plan_files, section_files
from secc.codegen.plan_writer import write
from secc.cost.counting.annotate_calls import Costs, keep, learn, measure
from secc.cost.counting.example_arguments import Samples
from secc.cost.counting.fused_costs import PREFIX
from secc.cost.model import measured_costs as costs
from secc.driver.pass_driver import Planned, Planner, Source
from secc.errors import UserError
from secc.frontend.capture import eager_failure, to_ir
from secc.frontend.capture.capture import Capture, capture
from secc.frontend.capture.linear_blocks import note_linear
from secc.frontend.dataset import padding_policy as widths
from secc.frontend.dataset import statistics
from secc.frontend.dataset.input_symbols import Inputs, describe
from secc.frontend.dataset.sampling import survey
from secc.frontend.dataset.survey import Survey
from secc.frontend.fusion.declare_rewrites import declare
from secc.frontend.fusion.find_fusions import Looked, find
from secc.frontend.tp_search.possible_tp import Limits, note_limits
from secc.ir.analysis import fusion_report
from secc.ir.dialect.ops import graph_of
from secc.passes.fusion.fuse_when import reason_against
from secc.runtime.fusion.install import installed
from secc.runtime.model.meta_build import meta_model
from secc.runtime.model.user_file import UserModel, load
from secc.runtime.parameters.elementwise_check import refusal
from secc.runtime.parameters.mixed_precision import check_model, compute_in, dtype_of
from secc.runtime.parameters.rank_weights import parameter_table
from secc.runtime.plan import schema as plan_schema
from secc.runtime.plan.schema import ModelRef, Plan

Step = Callable[[str], contextlib.AbstractContextManager[None]]
FITS_BYTES = 2 << 30  # a model up to this size is built here to show its plan exact
PASSES = (
    "canonicalize,dce,normalize-loss,dce,fuse-linear-loss{fuse-linear-loss},annotate-patterns,infer-modes,fuse-blocks{fuse-blocks},"
    "coarsen{coarsen},annotate-costs,sink-boundaries{sink},allocate{allocate},place,split-stages,shard-tensors,shard-logits,"
    "insert-transfers,lower"
)


@dataclass(frozen=True)
class Options:
    """What the user may decide about a plan; the fields are the options of `secc compile`."""

    cluster: str = "local"
    global_batch: int = 32
    strategy: str = "auto"
    objective: str = "time"  # or "gpus": as few ranks as a step of `step_time` seconds takes
    step_time: float = 0.0
    set: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    max_sections: int | None = None
    stats_samples: int = 64
    widths: str = "auto"
    small: bool = False
    fuse: bool | None = None  # None: where the cluster has GPUs
    without: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()
    stats: Path | None = None
    skip_bad_samples: bool = False
    costs: str = ""  # the file of measured costs
    dtype: str = ""  # "bf16": compute in it, with float32 masters
    run_ahead: str = "auto"  # GiB on a rank
    refused: tuple[str, ...] = ()  # choices that `allocate` must not make
    stages: tuple[str, ...] = ()  # NAME.pp=N for which layers were captured
    known: tuple[str, ...] = ()  # all choices of the plan for which they were
    proven: tuple[str, ...] = ()  # what the solver has proven of it


@dataclass
class Compiled:
    """A plan in memory and how it came about: the lowered IR, the dumps between passes, what was surveyed,
    the model if it fits here.

    `source` is what other plans for the model can be made from, `options` what the plan was compiled with.
    """

    plan: Plan
    module: ModuleOp
    dumps: list[tuple[str, str]]
    constants: dict[str, torch.Tensor]
    user: UserModel
    survey: Survey
    inputs: Inputs
    model: nn.Module | None
    seconds: dict[str, float]
    source: Source
    options: Options

    def write(
        self, directory: Path, page: Callable[[Plan], str], beside: Mapping[str, str] | None = None
    ) -> None:
        """Write the plan directory, with `page(plan)` as its report and files `beside`; a plan that is there
        is replaced."""
        # Relative, so that a plan and its model may move together and equal inputs give equal plans.
        model = dataclasses.replace(
            self.plan.model, path=os.path.relpath(self.user.path.resolve(), directory.resolve())
        )
        plan = dataclasses.replace(self.plan, model=model)
        write(
            directory,
            plan_files(plan, self.module, self.dumps, self.constants, self.user.path.read_text(), page(plan))
            | dict(beside or {}),
        )

    def write_sections(self, directory: Path) -> None:
        """Write only what the check needs: plan.json and sections/."""
        write(
            directory,
            {"plan.json": plan_schema.to_json(self.plan)}
            | section_files(self.plan, self.module, self.constants),
        )


@dataclass(frozen=True)
class _Known:
    """What need not be found again when layers are captured: costs of blocks, also with fused operators,
    places to fuse, cuts of layers."""

    costs: Costs = field(default_factory=dict)
    fused: Costs = field(default_factory=dict)
    looked: Looked = field(default_factory=Looked)
    limits: Limits = field(default_factory=Limits)


class _Clock:
    """Tells the user which step is running, and keeps how long each took."""

    def __init__(self, progress: Callable[[str], None] | None) -> None:
        self.progress, self.seconds = progress or (lambda _: None), dict[str, float]()

    @contextlib.contextmanager
    def step(self, name: str):
        self.progress(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def compile_model(
    path: str | Path, options: Options, progress: Callable[[str], None] | None = None
) -> Compiled:
    """Compile a model file. Raises UserError for everything that is wrong with the model or the options."""
    _look_at(options)
    clock = _Clock(progress)
    user, meta, ref, drawn, inputs, captured = front(path, options, clock.step)
    with clock.step("build the model here"):
        model = _real_model(user, meta, options.small)
    with clock.step("compare widths"):
        width = (
            options.widths
            if options.widths != "auto"
            else widths.choose(user, drawn, inputs, model, captured.draws)
        )

    known, batches = _Known(), [user.collate([d.sample]) for d in drawn.drawn if d.sample is not None]

    def make(captured: Capture) -> ModuleOp:
        samples = Samples(batches, captured.constants)
        module = _module(user, meta, samples, captured, width, options, clock, known)
        with clock.step("look how blocks can be cut"):
            note_limits(module, meta, model, user, drawn, samples, parse(options.cluster), known.limits)
        return module

    def text(**changes: tuple[str, ...]) -> str:
        return pipeline_text(dataclasses.replace(options, **changes))

    source = Source(user, meta, model, drawn, inputs, batches, captured, make, text)
    try:
        planned = Planner(source, options.set, clock.step, clock.progress).plan()
    except UserError:
        if not captured.spare:
            raise
        source = dataclasses.replace(source, captured=captured.without_spare())
        planned = Planner(source, options.set, clock.step, clock.progress).plan()
    made = plan_codegen.build(
        planned.module, ref, {"secc": __version__, "torch": torch.__version__.split("+")[0]}
    )
    made = dataclasses.replace(made, checks=made.checks | _notes(planned, drawn, options))
    model = model if model is None else compute_in(model, options.dtype)
    return Compiled(
        made,
        planned.module,
        planned.dumps,
        planned.captured.constants,
        user,
        drawn,
        inputs,
        model,
        clock.seconds,
        source,
        options,
    )


def _look_at(options: Options) -> None:
    """Refuse what is wrong in the options alone, before a model is read."""
    pass_pipeline.parse(pipeline_text(options))
    dtype_of(options.dtype)
    cluster = parse(options.cluster)
    if options.costs:
        costs.read(Path(options.costs)).check(cluster)


def front(
    path: str | Path, options: Options, step: Step
) -> tuple[UserModel, nn.Module, ModelRef, Survey, Inputs, Capture]:
    """The model file, the model on the meta device and as plans know it, what its samples look like, and its
    capture."""
    with step("read the model file"):
        user = load(path)
        if options.small:
            user.use_small()
    with step("build the model on the meta device"):
        meta = meta_model(user, small=options.small)
        ref = model_ref(user, meta)
        check_model(meta, options.dtype)
        compute_in(meta, options.dtype)
    with step("draw samples"):
        drawn = survey(user, options.stats_samples, skip_bad=options.skip_bad_samples)
        inputs = describe(user, drawn)
    with step("capture"):
        try:
            drawn, inputs, captured = _captured(user, meta, drawn, inputs)
        except UserError as error:
            raise _plain_failure(error, user, meta, drawn, options) or error from None
        inputs = statistics.ahead(user, drawn, captured.inputs)
        inputs = inputs if options.stats is None else statistics.read(options.stats, inputs, drawn)
        captured = dataclasses.replace(captured, inputs=inputs)
    return user, meta, ref, drawn, inputs, captured


def _module(
    user: UserModel,
    meta: nn.Module,
    samples: Samples,
    captured: Capture,
    width: str,
    options: Options,
    clock: _Clock,
    known: _Known,
) -> ModuleOp:
    """The IR of a capture, with what else passes need to know: what blocks cost, and what in them can be
    fused."""
    module = to_ir.to_ir(captured)
    note_linear(module, meta)
    graph_of(module).properties["widths"] = StringAttr(width)
    if options.dtype:
        graph_of(module).attributes["dtype"] = StringAttr(options.dtype)
    if reason := unshardable(user, meta):
        graph_of(module).attributes["unshardable"] = StringAttr(reason)
    with clock.step("measure blocks"):
        if not reason_against(_when(options), options.cluster):
            with process_map.beside(lambda: learn(module, meta, samples, known.costs)) as learnt:
                _look_for_fusions(module, meta, options, samples, known)
                keep(module, meta, learnt(), known.costs)
        measure(module, meta, samples, known=known.costs)
        if options.costs:
            costs.read(Path(options.costs)).write(module, meta)
    return module


def _look_for_fusions(
    module: ModuleOp, meta: nn.Module, options: Options, samples: Samples, known: _Known
) -> None:
    """Declare what `fuse-blocks` may rewrite in the user's modules, and measure the calls with all of it
    too."""
    graph = graph_of(module)
    declare(graph, find(meta, graph.blocks, options.without, known.looked))
    if graph.rewrites:
        with installed(meta, rewrites(graph), fused_module(graph)):
            measure(module, meta, samples, PREFIX, known.fused)


def unshardable(user: UserModel, meta: nn.Module) -> str:
    """Why replicas cannot share the user's optimizer between them, "" if they can."""
    trained = [(name, p) for name, p in meta.named_parameters() if p.requires_grad]
    if not trained:
        return ""
    try:
        return refusal(user.optimizer(trained)) or ""
    except UserError as error:
        return f"optimizer() could not be asked here: {error.message}"


def _captured(
    user: UserModel, meta: nn.Module, drawn: Survey, inputs: Inputs
) -> tuple[Survey, Inputs, Capture]:
    """Capture; where the model refuses shortened samples, with the dataset's own lengths as constants."""
    try:
        return drawn, inputs, capture(user, meta, drawn, inputs)
    except UserError:
        if not drawn.cropped:
            raise
    whole = drawn.without_crops()
    inputs = describe(user, whole)
    return whole, inputs, capture(user, meta, whole, inputs)


def _plain_failure(
    error: UserError, user: UserModel, meta: nn.Module, drawn: Survey, options: Options
) -> UserError | None:
    """What plain PyTorch says of the first samples where the user's code raised an error, if the model is
    small enough to ask it."""
    model = _real_model(user, meta, options.small) if eager_failure.is_of_user(error) else None
    return (
        None
        if model is None
        else eager_failure.failure(user, model, [d.sample for d in drawn.drawn if d.sample is not None][:2])
    )


def _notes(planned: Planned, drawn: Survey, options: Options) -> dict[str, list[str]]:
    """What was chosen differently than planned, for the report: one line each, with place and cause."""
    notes = planned.captured.notes
    found = dict.fromkeys(
        f"{n.path + ': ' if n.path else ''}{n.reason}{f' ({n.where})' if n.where else ''}" for n in notes
    )
    found |= dict.fromkeys(drawn.skipped)
    found |= dict.fromkeys(f"{choice} was taken back: {why}" for choice, why in planned.refused.items())
    if options.stats is not None:
        found[f"how frequent and how large samples are is taken from {options.stats.name}"] = None
    return {"notes": list(found)} if found else {}


def pipeline_text(options: Options) -> str:
    """The pipeline string that these options ask for."""
    coarsen = {
        "max-sections": options.max_sections, "sections": options.sections,
        "cluster": options.cluster, "global-batch": options.global_batch,
    }  # fmt: skip
    allocate = {
        "cluster": options.cluster, "global-batch": options.global_batch, "strategy": options.strategy,
        "set": options.set, "refused": options.refused, "stages": options.stages, "known": options.known,
        "proven": options.proven,
        **({"run-ahead": options.run_ahead} if options.run_ahead != "auto" else {}),
        **({"objective": options.objective, "step-time": options.step_time} if options.objective != "time" or options.step_time else {}),
    }  # fmt: skip
    text = _fusing(options).replace("normalize-loss", f"normalize-loss{_spec({'accept': options.accept})}")
    for name, asked in {
        "coarsen": coarsen,
        "sink": {"cluster": options.cluster},
        "allocate": allocate,
    }.items():
        text = text.replace(f"{{{name}}}", _spec(asked))
    return text


def _fusing(options: Options) -> str:
    """The pipeline with the options of its fusing passes, or without these passes. Raises UserError for a
    rule that there is not."""
    fusion_report.check(options.without)
    text = PASSES
    for name in dict.fromkeys(fusion_report.RULES.values()):
        asked = _spec(
            {
                "without": fusion_report.of_pass(options.without, name),
                "when": _when(options),
                "cluster": options.cluster,
            }
        )
        text = (
            text.replace(f"{name}{{{name}}}", f"{name}{asked}")
            if options.fuse is not False
            else text.replace(f"{name}{{{name}}},", "")
        )
    return text


def _when(options: Options) -> str:
    """When the fusing passes put operators in, as they take it."""
    return {None: "auto", True: "always", False: "never"}[options.fuse]


def _spec(options: Mapping[str, object]) -> str:
    """`{a=1 b="x","y"}`; options that are None or empty keep the pass's default."""

    def text(value: object) -> str:
        if isinstance(value, tuple):
            return ",".join(text(v) for v in value)  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, float):
            return f"{value:.9f}"  # pipeline strings know no exponents
        return f'"{value}"' if isinstance(value, str) else str(value)

    parts = [f"{name}={text(value)}" for name, value in options.items() if value is not None and value != ()]
    return f"{{{' '.join(parts)}}}" if parts else ""


def model_ref(user: UserModel, meta: nn.Module) -> ModelRef:
    """What ties a plan to its model: the file, its hash, and the parameters with shapes and whether they
    train."""
    return ModelRef(str(user.path.resolve()), user.sha256, parameter_table(meta))


def _real_model(user: UserModel, meta: nn.Module, small: bool) -> nn.Module | None:
    """The model with random weights in float32, or None if it is too large to build here."""
    size = sum(p.numel() * 4 for p in meta.parameters())
    if size > FITS_BYTES:
        return None
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        model = user.small_model() if small else user.model()
    if model is None:
        raise UserError(
            "the model file has no small_model()",
            str(user.path),
            "define small_model() or check without --small",
        )
    return model.float()
