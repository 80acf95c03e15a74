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
from xdsl.passes import ModulePass

from secc import __version__, process_map
from secc.cluster import parse_cluster
from secc.codegen import plan_builder as plan_codegen
from secc.codegen.fused_module import plan_rewrites, render_fused_module
from secc.codegen.plan_files import build_plan_files, build_section_files
from secc.codegen.plan_writer import write_plan_files
from secc.cost.counting.annotate_calls import (
    KnownCallCosts,
    annotate_calls,
    measure_unknown_calls,
    store_call_costs,
)
from secc.cost.counting.example_arguments import CollatedSamples
from secc.cost.counting.fused_costs import FUSED_PREFIX
from secc.cost.model import measured_costs as costs
from secc.driver.compile_options import CompileOptions
from secc.driver.default_pipeline import build_pipeline, fusion_mode
from secc.driver.pass_driver import CapturedModel, PlannedModule, Planner
from secc.errors import UserError
from secc.frontend.capture import eager_failure, to_ir
from secc.frontend.capture.capture import Capture, capture_model
from secc.frontend.capture.linear_blocks import annotate_linear_blocks
from secc.frontend.dataset import padding_policy as widths
from secc.frontend.dataset import statistics
from secc.frontend.dataset.input_symbols import ModelInputs, describe_inputs
from secc.frontend.dataset.sampling import survey_dataset
from secc.frontend.dataset.survey import DatasetSurvey
from secc.frontend.fusion.declare_rewrites import declare_rewrites
from secc.frontend.fusion.find_fusions import TracedSites, find_fusions
from secc.frontend.tp_search.possible_tp import MappingsByLayer, annotate_possible_tp
from secc.ir.dialect.ops import graph_of
from secc.passes.fusion.fuse_when import reason_not_to_fuse
from secc.runtime.fusion.install import installed_temporarily
from secc.runtime.model.meta_build import build_meta_model
from secc.runtime.model.user_file import UserModel, load_model_file
from secc.runtime.parameters.elementwise_check import why_not_elementwise
from secc.runtime.parameters.mixed_precision import cast_model, check_trainable_dtype, compute_dtype
from secc.runtime.parameters.rank_weights import describe_parameters
from secc.runtime.plan import schema as plan_schema
from secc.runtime.plan.schema import ModelRef, Plan

TimedStep = Callable[[str], contextlib.AbstractContextManager[None]]
MAX_LOCAL_MODEL_BYTES = 2 << 30  # a model up to this size is built here to show its plan exact


@dataclass
class CompiledPlan:
    """A plan in memory and how it came about: the lowered IR, the dumps between passes, what was surveyed,
    the model if it fits here.

    `source` is what other plans for the model can be made from, `options` what the plan was compiled with.
    """

    plan: Plan
    module: ModuleOp
    dumps: list[tuple[str, str]]
    constants: dict[str, torch.Tensor]
    user: UserModel
    survey: DatasetSurvey
    inputs: ModelInputs
    model: nn.Module | None
    step_seconds: dict[str, float]
    captured_model: CapturedModel
    options: CompileOptions

    def write_plan(
        self, directory: Path, page: Callable[[Plan], str], beside: Mapping[str, str] | None = None
    ) -> None:
        """Write the plan directory, with `page(plan)` as its report and files `beside`; a plan that is there
        is replaced."""
        # Relative, so that a plan and its model may move together and equal inputs give equal plans.
        model = dataclasses.replace(
            self.plan.model, path=os.path.relpath(self.user.path.resolve(), directory.resolve())
        )
        plan = dataclasses.replace(self.plan, model=model)
        write_plan_files(
            directory,
            build_plan_files(
                plan, self.module, self.dumps, self.constants, self.user.path.read_text(), page(plan)
            )
            | dict(beside or {}),
        )

    def write_sections(self, directory: Path) -> None:
        """Write only what the check needs: plan.json and sections/."""
        write_plan_files(
            directory,
            {"plan.json": plan_schema.plan_to_json(self.plan)}
            | build_section_files(self.plan, self.module, self.constants),
        )


@dataclass(frozen=True)
class _CaptureCache:
    """What need not be found again when layers are captured: costs of blocks, also with fused operators,
    places to fuse, cuts of layers."""

    costs: KnownCallCosts = field(default_factory=dict)
    fused_costs: KnownCallCosts = field(default_factory=dict)
    traced_sites: TracedSites = field(default_factory=TracedSites)
    mappings: MappingsByLayer = field(default_factory=MappingsByLayer)


class _StepClock:
    """Tells the user which step is running, and keeps how long each took."""

    def __init__(self, progress: Callable[[str], None] | None) -> None:
        self.report_progress, self.seconds = progress or (lambda _: None), dict[str, float]()

    @contextlib.contextmanager
    def measure(self, name: str):
        self.report_progress(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def compile_model(
    path: str | Path, options: CompileOptions, progress: Callable[[str], None] | None = None
) -> CompiledPlan:
    """Compile a model file. Raises UserError for everything that is wrong with the model or the options."""
    _validate_options(options)
    clock = _StepClock(progress)
    user, meta, ref, drawn, inputs, captured = load_and_capture(path, options, clock.measure)
    with clock.measure("build the model here"):
        model = _build_model_if_small(user, meta, options.small)
    with clock.measure("compare widths"):
        width = (
            options.widths
            if options.widths != "auto"
            else widths.choose_padding_policy(user, drawn, inputs, model, captured.draws)
        )

    known, batches = (
        _CaptureCache(),
        [user.collate([d.sample]) for d in drawn.drawn_samples if d.sample is not None],
    )

    def make(captured: Capture) -> ModuleOp:
        samples = CollatedSamples(batches, captured.constants)
        module = _build_annotated_ir(user, meta, samples, captured, width, options, clock, known)
        with clock.measure("look how blocks can be cut"):
            annotate_possible_tp(
                module, meta, model, user, drawn, samples, parse_cluster(options.cluster), known.mappings
            )
        return module

    def make_passes(**changes: tuple[str, ...]) -> tuple[ModulePass, ...]:
        return build_pipeline(dataclasses.replace(options, **changes))

    source = CapturedModel(user, meta, model, drawn, inputs, batches, captured, make, make_passes)
    try:
        planned = Planner(source, options.set, clock.measure, clock.report_progress).plan_model()
    except UserError:
        if not captured.has_fallbacks:
            raise
        source = dataclasses.replace(source, capture=captured.without_fallbacks())
        planned = Planner(source, options.set, clock.measure, clock.report_progress).plan_model()
    made = plan_codegen.build_plan(
        planned.module, ref, {"secc": __version__, "torch": torch.__version__.split("+")[0]}
    )
    made = dataclasses.replace(made, checks=made.checks | _collect_notes(planned, drawn, options))
    model = model if model is None else cast_model(model, options.dtype)
    return CompiledPlan(
        made,
        planned.module,
        planned.dumps,
        planned.capture.constants,
        user,
        drawn,
        inputs,
        model,
        clock.seconds,
        source,
        options,
    )


def _validate_options(options: CompileOptions) -> None:
    """Refuse what is wrong in the options alone, before a model is read."""
    build_pipeline(options)
    compute_dtype(options.dtype)
    cluster = parse_cluster(options.cluster)
    if options.costs:
        costs.read_measured_costs(Path(options.costs)).check_hardware(cluster)


def load_and_capture(
    path: str | Path, options: CompileOptions, step: TimedStep
) -> tuple[UserModel, nn.Module, ModelRef, DatasetSurvey, ModelInputs, Capture]:
    """The model file, the model on the meta device and as plans know it, what its samples look like, and its
    capture."""
    with step("read the model file"):
        user = load_model_file(path)
        if options.small:
            user.use_small_dataset()
    with step("build the model on the meta device"):
        meta = build_meta_model(user, small=options.small)
        ref = make_model_ref(user, meta)
        check_trainable_dtype(meta, options.dtype)
        cast_model(meta, options.dtype)
    with step("draw samples"):
        drawn = survey_dataset(user, options.stats_samples, skip_bad=options.skip_bad_samples)
        inputs = describe_inputs(user, drawn)
    with step("capture"):
        try:
            drawn, inputs, captured = _capture_with_or_without_crops(user, meta, drawn, inputs)
        except UserError as error:
            raise _find_eager_failure(error, user, meta, drawn, options) or error from None
        inputs = statistics.apply_declared_sizes(user, drawn, captured.inputs)
        inputs = inputs if options.stats is None else statistics.read_statistics(options.stats, inputs, drawn)
        captured = dataclasses.replace(captured, inputs=inputs)
    return user, meta, ref, drawn, inputs, captured


def _build_annotated_ir(
    user: UserModel,
    meta: nn.Module,
    samples: CollatedSamples,
    captured: Capture,
    width: str,
    options: CompileOptions,
    clock: _StepClock,
    known: _CaptureCache,
) -> ModuleOp:
    """The IR of a capture, with what else passes need to know: what blocks cost, and what in them can be
    fused."""
    module = to_ir.capture_to_ir(captured)
    annotate_linear_blocks(module, meta)
    graph_of(module).properties["widths"] = StringAttr(width)
    if options.dtype:
        graph_of(module).attributes["dtype"] = StringAttr(options.dtype)
    if reason := unshardable_reason(user, meta):
        graph_of(module).attributes["unshardable"] = StringAttr(reason)
    with clock.measure("measure blocks"):
        if not reason_not_to_fuse(fusion_mode(options), options.cluster):
            with process_map.run_in_background(
                lambda: measure_unknown_calls(module, meta, samples, known.costs)
            ) as learnt:
                _declare_fusions(module, meta, options, samples, known)
                store_call_costs(module, meta, learnt(), known.costs)
        annotate_calls(module, meta, samples, known=known.costs)
        if options.costs:
            costs.read_measured_costs(Path(options.costs)).annotate_module(module, meta)
    return module


def _declare_fusions(
    module: ModuleOp, meta: nn.Module, options: CompileOptions, samples: CollatedSamples, known: _CaptureCache
) -> None:
    """Declare what `fuse-blocks` may rewrite in the user's modules, and measure the calls with all of it
    too."""
    graph = graph_of(module)
    declare_rewrites(graph, find_fusions(meta, graph.blocks, options.without, known.traced_sites))
    if graph.rewrites:
        with installed_temporarily(meta, plan_rewrites(graph), render_fused_module(graph)):
            annotate_calls(module, meta, samples, FUSED_PREFIX, known.fused_costs)


def unshardable_reason(user: UserModel, meta: nn.Module) -> str:
    """Why replicas cannot share the user's optimizer between them, "" if they can."""
    trained = [(name, p) for name, p in meta.named_parameters() if p.requires_grad]
    if not trained:
        return ""
    try:
        return why_not_elementwise(user.build_optimizer(trained)) or ""
    except UserError as error:
        return f"optimizer() could not be asked here: {error.message}"


def _capture_with_or_without_crops(
    user: UserModel, meta: nn.Module, drawn: DatasetSurvey, inputs: ModelInputs
) -> tuple[DatasetSurvey, ModelInputs, Capture]:
    """Capture; where the model refuses shortened samples, with the dataset's own lengths as constants."""
    try:
        return drawn, inputs, capture_model(user, meta, drawn, inputs)
    except UserError:
        if not drawn.has_crops:
            raise
    whole = drawn.without_crops()
    inputs = describe_inputs(user, whole)
    return whole, inputs, capture_model(user, meta, whole, inputs)


def _find_eager_failure(
    error: UserError, user: UserModel, meta: nn.Module, drawn: DatasetSurvey, options: CompileOptions
) -> UserError | None:
    """What plain PyTorch says of the first samples where the user's code raised an error, if the model is
    small enough to ask it."""
    model = _build_model_if_small(user, meta, options.small) if eager_failure.is_user_error(error) else None
    return (
        None
        if model is None
        else eager_failure.find_eager_failure(
            user, model, [d.sample for d in drawn.drawn_samples if d.sample is not None][:2]
        )
    )


def _collect_notes(
    planned: PlannedModule, drawn: DatasetSurvey, options: CompileOptions
) -> dict[str, list[str]]:
    """What was chosen differently than planned, for the report: one line each, with place and cause."""
    notes = planned.capture.notes
    found = dict.fromkeys(
        f"{n.path + ': ' if n.path else ''}{n.reason}{f' ({n.where})' if n.where else ''}" for n in notes
    )
    found |= dict.fromkeys(drawn.skipped_samples)
    found |= dict.fromkeys(
        f"{choice} was taken back: {why}" for choice, why in planned.refused_choices.items()
    )
    if options.stats is not None:
        found[f"how frequent and how large samples are is taken from {options.stats.name}"] = None
    return {"notes": list(found)} if found else {}


def make_model_ref(user: UserModel, meta: nn.Module) -> ModelRef:
    """What ties a plan to its model: the file, its hash, and the parameters with shapes and whether they
    train."""
    return ModelRef(str(user.path.resolve()), user.sha256, describe_parameters(meta))


def _build_model_if_small(user: UserModel, meta: nn.Module, small: bool) -> nn.Module | None:
    """The model with random weights in float32, or None if it is too large to build here."""
    size = sum(p.numel() * 4 for p in meta.parameters())
    if size > MAX_LOCAL_MODEL_BYTES:
        return None
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        model = user.build_small_model() if small else user.build_model()
    if model is None:
        raise UserError(
            "the model file has no small_model()",
            str(user.path),
            "define small_model() or check without --small",
        )
    return model.float()
