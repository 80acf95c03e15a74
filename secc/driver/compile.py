"""Compiles a model file to a plan; `compile_model` reads as the list of its steps.

The command line, the exactness check and the tests all compile through here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from math import gcd
from pathlib import Path

import torch
from torch import nn
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.passes import ModulePass

from secc import __version__, process_map
from secc.alloc.problem.build_problem import PARALLEL_PRICING_RANKS
from secc.alloc.problem.pins import check_pins, named_sections
from secc.cluster import parse_cluster
from secc.codegen import plan_builder as plan_codegen
from secc.codegen.fused_module import plan_rewrites, render_fused_module
from secc.codegen.left_out_terms import describe_left_out_terms
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
from secc.cost.model.expert_parallel_cost import busiest_part
from secc.cost.model.section_cost import DEFAULT_EXPERT_LOAD, counted_expert_parts, float_attribute
from secc.driver import plan_origin
from secc.driver.activation_room import subtract_whole_parameters
from secc.driver.compile_options import CompileOptions
from secc.driver.default_pipeline import build_pipeline, fusion_mode
from secc.driver.pass_driver import CapturedModel, PlannedModule, Planner
from secc.driver.python_draws import GeneratorStates, name_draws
from secc.driver.start_state import StartState
from secc.errors import UserError
from secc.frontend.capture import eager_failure, to_ir
from secc.frontend.capture.block_layouts import annotate_block_layouts
from secc.frontend.capture.capture import Capture, capture_model
from secc.frontend.capture.code_blocks import PartTries
from secc.frontend.capture.linear_blocks import annotate_linear_blocks
from secc.frontend.capture.rare_samples import find_rare_samples, find_uncovered_line
from secc.frontend.capture.whole_blocks import find_whole_blocks
from secc.frontend.dataset import padding_policy as widths
from secc.frontend.dataset import statistics
from secc.frontend.dataset.input_symbols import ModelInputs, describe_inputs
from secc.frontend.dataset.packing_check import check_packing
from secc.frontend.dataset.sampling import survey_dataset
from secc.frontend.dataset.small_samples import survey_small_samples
from secc.frontend.dataset.survey import DatasetSurvey
from secc.frontend.fusion.declare_rewrites import declare_rewrites
from secc.frontend.fusion.find_fusions import TracedSites, find_fusions
from secc.frontend.tp_search.expert_cuts import annotate_experts
from secc.frontend.tp_search.listed_rows import annotate_listed_rows
from secc.frontend.tp_search.possible_tp import MappingsByLayer, annotate_possible_tp
from secc.frontend.tp_search.routing_counts import (
    COUNTED_SAMPLES,
    PERMILLE,
    RoutingCounts,
    annotate_routing,
    count_routing,
)
from secc.ir.analysis.dataflow import get_number, get_string
from secc.ir.analysis.tp_layouts import expert_counts
from secc.ir.dialect.ops import WHOLE_ATTRIBUTE, GraphOp, graph_of
from secc.ir.dialect.readable_names import to_identifier
from secc.passes.allocate import Allocate
from secc.passes.fusion.fuse_when import reason_not_to_fuse
from secc.passes.loss.gathered_rows import check_names
from secc.passes.sections.block_groups import parse_section_pins, split_section_pin
from secc.runtime.fusion.install import installed_temporarily
from secc.runtime.host.cpu_threads import limit_threads, restore_threads
from secc.runtime.host.gc_control import pause_gc, slow_gc
from secc.runtime.model import imported_code
from secc.runtime.model.meta_build import build_meta_model
from secc.runtime.model.outlined_forward import StatementRange
from secc.runtime.model.user_file import UserModel, load_model_file
from secc.runtime.parameters.elementwise_check import CannotProbe, why_coupled, why_not_elementwise
from secc.runtime.parameters.mixed_precision import cast_model, check_trainable_dtype, compute_dtype
from secc.runtime.parameters.optimizer_parts import (
    find_outside_parameters,
    why_not_apart,
    why_not_sliced,
    why_whole_model,
)
from secc.runtime.parameters.outside_weights import find_hook_conflict
from secc.runtime.parameters.rank_weights import describe_parameters, imported_file_copy
from secc.runtime.plan import schema as plan_schema
from secc.runtime.plan.schema import ModelRef, Plan
from secc.runtime.sections.gradient_hooks import describe_hook, iter_gradient_hooks

TimedStep = Callable[[str], contextlib.AbstractContextManager[None]]
WIDTHS = ("auto", "own", "global")  # of micro-batches
_PROBED_STEPS = 1000  # of a run, for a scheduler that is made to see whether it can be
PACK_CHOICES = ("never", "always", "auto")
MAX_GLOBAL_BATCH = 1 << 17  # samples; the search orders each, which takes some 60 KB of memory a sample
_FEW_SAMPLES = 8  # in the batch that explains an error of forward
MAX_LOCAL_MODEL_BYTES = 2 << 30  # a model up to this size is built here to show its plan exact


@dataclass
class CompiledPlan:
    """A plan in memory, with the artefacts of its compilation.

    module: the lowered IR. dumps: (pass name, IR text) after each pass. constants: tensors that forward makes
    from Python data, by name. model: the model with random weights, None if it is too large to build here.
    step_seconds: wall-clock seconds of each compilation step. captured_model: what other plans for the same
    model can be made from. start: what the model kept before forward ran.
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
    start: StartState | None = None
    unloaded: StartState | None = None

    def write_plan(
        self, directory: Path, page: Callable[[Plan], str], other_files: Mapping[str, str] | None = None
    ) -> None:
        """Writes the plan directory, replacing an existing plan.

        page(plan) returns the text of the report. other_files: further files of the directory, text by
        relative path.
        """
        # Relative, so that a plan and its model may move together and equal inputs give equal plans.
        model = dataclasses.replace(
            self.plan.model, path=os.path.relpath(self.user.path.resolve(), directory.resolve())
        )
        plan = dataclasses.replace(self.plan, model=model)
        imports = {
            imported_file_copy(name): path.read_bytes()
            for name in plan.model.imports
            if (path := imported_code.find_module_file(name)) is not None
        }
        files = build_plan_files(
            plan,
            self.module,
            self.dumps,
            self.constants,
            self.user.path.read_text(encoding="utf-8"),
            page(plan),
        )
        if (code := plan_origin.sign_plan(plan_schema.plan_to_json(plan))) is not None:
            files[plan_origin.ORIGIN_FILE] = code
        write_plan_files(directory, files | imports | dict(other_files or {}))

    def write_sections(self, directory: Path) -> None:
        """Writes plan.json and sections/ only, which is all that the exactness check needs."""
        write_plan_files(
            directory,
            {"plan.json": plan_schema.plan_to_json(self.plan)}
            | build_section_files(self.plan, self.module, self.constants),
        )


@dataclass
class _CaptureCache:
    """Results that hold for every capture of a model, so that capturing its layers need not find them again:
    costs of blocks (also with fused operators), traced sites, tensor-parallel mappings of layers, and the
    rows that experts get."""

    costs: KnownCallCosts = field(default_factory=dict)
    fused_costs: KnownCallCosts = field(default_factory=dict)
    traced_sites: TracedSites = field(default_factory=TracedSites)
    mappings: MappingsByLayer = field(default_factory=MappingsByLayer)
    routing: RoutingCounts | None = None


class _StepClock:
    """Reports each compilation step to the user and sums up its seconds."""

    def __init__(self, progress: Callable[[str], None] | None) -> None:
        self.report_progress, self.seconds = progress or (lambda _: None), dict[str, float]()

    @contextlib.contextmanager
    def measure(self, name: str):
        """Context manager that reports the step `name` and times it."""
        self.report_progress(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@slow_gc()
@restore_threads()
def compile_model(
    path: str | Path, options: CompileOptions, progress: Callable[[str], None] | None = None
) -> CompiledPlan:
    """Compiles a model file.

    progress: called with the name of each step when it starts. Raises UserError if anything is wrong with the
    model file or the options.
    """
    _validate_options(options)
    clock = _StepClock(progress)
    states = GeneratorStates()
    user, meta, ref, survey, inputs, capture, unloaded = load_and_capture(path, options, clock.measure)
    _check_pinned_sections(options, meta, capture)
    drawn_from, files = states.find_source(), StartState(meta, user, with_modules=False)
    limit_threads(meta)
    with clock.measure("build the model here"):
        model = _build_model_if_small(user, meta)
        start = None if model is None else StartState(model, user)
    with clock.measure("compare widths"):
        padding = (
            widths.PaddingPolicy(options.widths, widths.WidthsReason.CHOSEN)
            if options.widths != "auto"
            else widths.choose_padding_policy(user, survey, inputs, model, capture.draws)
        )
        width = padding.widths

    cache, cluster = _CaptureCache(), parse_cluster(options.cluster)
    # Few ranks seldom get stages, and a small model is soon captured again.
    weighs_stages = cluster.device.backend != "cpu" and cluster.ranks >= PARALLEL_PRICING_RANKS
    batches = [user.collate([d.sample]) for d in survey.drawn_samples if d.sample is not None]

    def make_ir(capture: Capture) -> ModuleOp:
        samples = CollatedSamples(batches, capture.constants)
        module = _build_annotated_ir(user, meta, samples, capture, width, options, clock, cache)
        annotate_experts(module, meta)
        if model is not None:
            cache.routing = count_routing(model, batches) if cache.routing is None else cache.routing
            annotate_routing(module, cache.routing)
        if model is not None and cluster.device.backend != "cpu":  # there, nothing divides experts unasked
            annotate_listed_rows(module, model, batches)
        with clock.measure("find possible tp of blocks"):
            annotate_possible_tp(module, meta, model, user, survey, samples, cluster, cache.mappings)
        with clock.measure("find whole blocks"):
            blocks = graph_of(module).blocks
            for path in blocks.keys() & whole_blocks():
                blocks[path].attributes[WHOLE_ATTRIBUTE] = StringAttr(whole_blocks()[path].reason)
        return module

    def make_passes(**changes: tuple[str, ...]) -> tuple[ModulePass, ...]:
        return build_pipeline(dataclasses.replace(options, **changes), options.sections)

    source = CapturedModel(user, meta, model, survey, inputs, batches, capture, make_ir, make_passes)
    with process_map.run_in_background(
        partial(find_whole_blocks, user, meta, survey, inputs, capture) if weighs_stages else dict,
        forks=weighs_stages,
    ) as found:
        whole_blocks = functools.cache(found)
        planner = Planner(source, options.set, clock.measure, clock.report_progress, options.taken_back)
    try:
        planned = planner.plan_model()
    except UserError as error:
        _say_why_statements_are_blocks(error, user, capture)
        name_draws(error, drawn_from)
        raise
    versions = {"secc": __version__, "torch": torch.__version__.split("+")[0]}
    plan = subtract_whole_parameters(plan_codegen.build_plan(planned.module, ref, versions))
    if get_string(graph_of(planned.module), "coupled") and (
        conflict := find_hook_conflict(plan, meta, _parameters_of_hooks(user, meta, model))
    ):
        if options.strategy != "auto":
            raise conflict
        return compile_model(path, dataclasses.replace(options, strategy="colocate"), progress)
    small_failure = _why_small_model_fails(user, survey) if model is None else ""
    notes = _collect_notes(planned, survey, options, small_failure)
    plan = dataclasses.replace(plan, checks=plan.checks | notes | padding.as_checks(inputs))
    files.restore_values()
    return CompiledPlan(
        plan=plan,
        module=planned.module,
        dumps=planned.dumps,
        constants=planned.capture.constants,
        user=user,
        survey=survey,
        inputs=inputs,
        model=model if model is None else cast_model(model, options.dtype),
        step_seconds=clock.seconds,
        captured_model=planner.source,
        options=options,
        start=start,
        unloaded=unloaded,
    )


def _refuse_untrained_model(user: UserModel, meta: nn.Module) -> None:
    """Raises UserError if no parameter requires a gradient."""
    if not any(p.requires_grad for p in meta.parameters()):
        raise UserError(
            "no parameter of the model requires a gradient, so there is nothing to train",
            user.function_source_line("model") or str(user.path),
            "leave requires_grad as it is for the parameters that are to be trained",
        )


def _say_why_statements_are_blocks(error: UserError, user: UserModel, capture: Capture) -> None:
    """Adds to a message about a block of statements why they are one: the user has not made it."""
    chosen = len([f for f in user.function_blocks if StatementRange.parse(f) is not None])
    for note in capture.notes[:chosen]:
        if note.path in error.message:
            error.message += f"; {note.path}: {note.reason}"
            error.remedy = f"{note.remedy}; or else {error.remedy}" if note.remedy else error.remedy


def _validate_options(options: CompileOptions) -> None:
    """Raises UserError for options that are wrong whatever the model is, before the model is loaded."""
    for step in build_pipeline(options):
        if isinstance(step, Allocate):
            step.check_choices()
    check_pins(options.set)
    for text in options.sections:
        split_section_pin(text)
    compute_dtype(options.dtype)
    numbers = (
        ("--global-batch", options.global_batch),
        ("--stats-samples", options.stats_samples),
        ("--max-sections", options.max_sections),
    )
    for name, number in numbers:
        if number is not None and number < 1:
            raise UserError(f"{name}: expected at least 1, got {number}", remedy="give a larger number")
    if options.global_batch > MAX_GLOBAL_BATCH:
        raise UserError(
            f"--global-batch: expected at most {MAX_GLOBAL_BATCH:,} samples, got {options.global_batch:,}",
            remedy="give the number of samples in an optimizer step, not that of their tokens",
        )
    if options.widths not in WIDTHS:
        raise UserError(f"unknown widths {options.widths!r}", remedy=f"widths are {', '.join(WIDTHS)}")
    if options.pack not in PACK_CHOICES:
        raise UserError(f"--pack: unknown {options.pack!r}", remedy=f"give one of {', '.join(PACK_CHOICES)}")
    cluster = parse_cluster(options.cluster)
    if options.costs:
        costs.read_measured_costs(Path(options.costs)).check_hardware(cluster)
    if options.stats is not None:
        statistics.load_statistics(options.stats)


def _check_named_blocks(options: CompileOptions, graph: GraphOp) -> None:
    """Raises UserError for options that name blocks which the model lacks. Passes would find them, too, but
    only after all blocks have been measured."""
    parse_section_pins(graph, options.sections)
    check_names(graph, "--gather", options.gather)
    check_names(graph, "--whole-batch", options.whole_batch)


def _check_pinned_sections(options: CompileOptions, meta: nn.Module, capture: Capture) -> None:
    """Raises UserError for a pin on a section that no plan of the model can have. Sections are named after
    modules, with a suffix where several share one; which there are is known once blocks have been grouped."""
    paths = [*dict(meta.named_modules()), *capture.blocks]
    tails = {path[start.end() :] for path in paths for start in re.finditer(r"^|\.", path)}
    names = {to_identifier(tail) for tail in tails} | {text.partition("=")[0] for text in options.sections}
    for section, pin in named_sections(options.set).items():
        if section not in names and not any(section.startswith(f"{name}_") for name in names):
            near = "".join(f", such as {name}" for name in get_close_matches(section, names, n=1))
            raise UserError(
                f"{pin}: unknown section {section!r}",
                remedy=f"sections are named after modules{near}; `secc check MODEL.py` lists them",
            )


def load_and_capture(
    path: str | Path, options: CompileOptions, time_step: TimedStep
) -> tuple[UserModel, nn.Module, ModelRef, DatasetSurvey, ModelInputs, Capture, StartState | None]:
    """Loads the model file, builds the model on the meta device, surveys the dataset and captures forward.
    The last result is what files kept before samples were loaded, None if loading changes nothing.

    time_step: context manager that times a named step. Raises UserError for a model or dataset that cannot be
    captured.
    """
    with time_step("read the model file"), pause_gc(exempt=True):  # what it imports is never garbage
        user = load_model_file(path)
        user.check_functions()
        if options.small:
            user = user.as_small()
    with time_step("build the model on the meta device"), pause_gc(exempt=True):  # may import
        meta = build_meta_model(user)
        if options.small is None and _is_too_large(meta) and user.defines("small_model"):
            user = user.as_small()
            meta = build_meta_model(user)
        parameters = describe_parameters(meta)
        check_trainable_dtype(meta, options.dtype)
        _refuse_untrained_model(user, meta)
    if options.pack == "always":
        with time_step("compare packed samples"):
            user = _pack_samples(user, meta)
    cast_model(meta, options.dtype)
    with time_step("draw samples"):
        user.sources()
        unloaded = StartState(meta, user, with_modules=False)
        survey = survey_dataset(user, options.stats_samples, skip_bad=options.skip_bad_samples)
        survey, inputs = _describe_with_or_without_crops(user, survey)
    is_loading_seen = unloaded.has_other_values()
    files = StartState(meta, user, with_modules=False)
    with (
        time_step("capture"),
        process_map.run_in_background(
            partial(statistics.find_largest_samples, user), forks=statistics.declares_many_samples(user)
        ) as largest,
    ):
        states = GeneratorStates()
        try:
            chosen = _modules_without_weights(meta, options.whole_batch)
            survey, inputs, capture = _capture_with_or_without_crops(user, meta, survey, inputs, chosen)
        except UserError as error:
            source = states.find_source()
            failure = _find_eager_failure(error, user, meta, survey, options)
            name_draws(error, source)
            raise failure or error from None
        survey, capture = _capture_rare_paths(user, meta, survey, inputs, capture)
        inputs = statistics.apply_declared_sizes(user, survey, capture.inputs, largest)
        if options.stats is not None:
            inputs = statistics.read_statistics(options.stats, inputs, survey)
        capture = dataclasses.replace(capture, inputs=inputs)
        for tie in capture.ties:  # blocks of statements have parameters under names that the model lacks
            known = next(parameters[name] for name in tie if name in parameters)
            parameters |= dict.fromkeys(tie, known)
        files.restore_values()  # a capture may have left tensors without values
    # Now that the model has run, all code that it imports has been imported.
    ref = make_model_ref(user, meta, parameters)
    return user, meta, ref, survey, inputs, capture, unloaded if is_loading_seen else None


def _pack_samples(user: UserModel, meta: nn.Module) -> UserModel:
    """Returns the model file with samples side by side in one row, after a comparison with padded samples.
    Raises UserError if results differ or cannot be compared."""
    packed = user.pack_samples()
    model = _build_model_if_small(user, meta) or user.build_small_model()
    if model is None:
        message = "samples cannot be packed: the model is too large to be compared with padded samples here"
        raise UserError(message, str(user.path), "define small_model(), or leave --pack out")
    check_packing(user, packed, model)
    return packed


def _build_annotated_ir(
    user: UserModel,
    meta: nn.Module,
    samples: CollatedSamples,
    capture: Capture,
    width: str,
    options: CompileOptions,
    clock: _StepClock,
    cache: _CaptureCache,
) -> ModuleOp:
    """Imports a capture into IR and annotates what the passes need: which blocks are plain linear layers,
    where blocks take samples, the padding policy, costs of block calls, and modules that fused operators can
    replace."""
    module = to_ir.capture_to_ir(capture)
    _check_named_blocks(options, graph_of(module))
    annotate_linear_blocks(module, meta)
    annotate_block_layouts(module, meta)
    graph_of(module).properties["widths"] = StringAttr(width)
    if options.dtype:
        graph_of(module).attributes["dtype"] = StringAttr(options.dtype)
    for name, reason in optimizer_limits(user, meta).items():
        graph_of(module).attributes[name] = StringAttr(reason)
    with clock.measure("measure blocks"):
        if not reason_not_to_fuse(fusion_mode(options), options.cluster):
            with process_map.run_in_background(
                lambda: measure_unknown_calls(module, meta, samples, cache.costs)
            ) as measured:
                _declare_fusions(module, meta, options, samples, cache)
                store_call_costs(module, meta, measured(), cache.costs)
        annotate_calls(module, meta, samples, known=cache.costs)
        if options.costs:
            costs.read_measured_costs(Path(options.costs)).annotate_module(module, meta)
    return module


def _declare_fusions(
    module: ModuleOp, meta: nn.Module, options: CompileOptions, samples: CollatedSamples, cache: _CaptureCache
) -> None:
    """Declares what `fuse-blocks` may rewrite in the user's modules, and measures the calls with those
    rewrites."""
    graph = graph_of(module)
    declare_rewrites(graph, find_fusions(meta, graph.blocks, options.without, cache.traced_sites))
    if graph.rewrites:
        with installed_temporarily(meta, plan_rewrites(graph), render_fused_module(graph)):
            annotate_calls(module, meta, samples, FUSED_PREFIX, cache.fused_costs)


def optimizer_limits(user: UserModel, meta: nn.Module) -> dict[str, str]:
    """Returns what the user's optimizer does not allow, each with the reason.

    unshardable: replicas may not have parts of parameters (ZeRO, tp). coupled: ranks may not have some of the
    trained parameters only. unprobed: the latter is not known, since this machine cannot try the optimizer.

    Raises UserError if optimizer() returns no optimizer, takes pairs of names and parameters for parameters,
    registers hooks on gradients, or raises for a name or a type, and if scheduler() returns no scheduler or
    raises so. Where they raise otherwise, this machine may be the cause.
    """
    trained = [(name, p) for name, p in meta.named_parameters() if p.requires_grad]
    if not trained:
        return {}
    hooks = {(id(table), key) for _, table, key in iter_gradient_hooks(meta)}
    try:
        optimizer = user.build_optimizer(trained)
    except UserError as error:
        if error.__cause__ is None or _is_fault_of_code(error) or _takes_bare_parameters(user, trained):
            raise
        reason = f"optimizer() fails on this machine: {error.message}"
        return {"unshardable": reason, "unprobed": reason}
    try:  # with another optimizer, since schedulers set rates, to 0 for example
        user.build_scheduler(user.build_optimizer(trained), _PROBED_STEPS)
    except UserError as error:
        if error.__cause__ is None or _is_fault_of_code(error):
            raise
    for name, table, key in iter_gradient_hooks(meta):
        if (id(table), key) not in hooks:
            function, where = describe_hook(table[key])
            raise UserError(
                f"optimizer() registers the hook {function} on the gradient of {name}: ranks run it once for"
                " each micro-batch, and the comparison with plain PyTorch, which makes no optimizer, does not"
                " show whether that is exact",
                where or user.function_source_line("optimizer"),
                "register it in model(), on the parameter that model() makes",
            )
    build, parameters = user.build_optimizer, dict(trained)
    beyond = why_whole_model(build, parameters)
    limits = {"unshardable": beyond or why_not_elementwise(optimizer) or why_not_sliced(build, parameters)}
    try:
        limits["coupled"] = beyond or why_coupled(optimizer) or why_not_apart(build, parameters)
    except CannotProbe as error:
        limits["unprobed"] = str(error)
    return {name: reason for name, reason in limits.items() if reason}


def _is_fault_of_code(error: UserError) -> bool:
    """Whether the user's function raised an error that no other machine would spare it."""
    return isinstance(error.__cause__, AttributeError | KeyError | NameError | TypeError)


def _parameters_of_hooks(user: UserModel, meta: nn.Module, model: nn.Module | None) -> dict[str, str]:
    """Returns the parameters of the model that a step of the user's optimizer takes from it, with the lines:
    of the model that the model file has made last."""
    trained = {name: p for name, p in meta.named_parameters() if p.requires_grad}
    found = dict(find_outside_parameters(user.build_optimizer, trained))
    models = [meta] if model is None else [meta, model]
    return {n: found[p] for m in models for n, p in m.named_parameters() if p in found}


def _takes_bare_parameters(user: UserModel, trained: Sequence[tuple[str, nn.Parameter]]) -> bool:
    """Whether the user's optimizer(), which fails with (name, parameter) pairs, works with parameters."""
    try:
        user.call_function("optimizer", [p for _, p in trained])
    except UserError:
        return False
    return True


def _describe_with_or_without_crops(
    user: UserModel, survey: DatasetSurvey
) -> tuple[DatasetSurvey, ModelInputs]:
    """Describes inputs with shortened samples; if the user's `collate` refuses those (it stacks vectors of
    one length), with the dataset's own."""
    try:
        return survey, describe_inputs(user, survey)
    except UserError:
        if not survey.has_crops:
            raise
    uncropped = survey.without_crops()
    return uncropped, describe_inputs(user, uncropped)


def _modules_without_weights(meta: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of modules without parameters and buffers, which are no blocks unless chosen."""
    modules = dict(meta.named_modules())
    known = (n for n in names if n in modules)
    return tuple(n for n in known if not [*modules[n].parameters(), *modules[n].buffers()])


def _capture_with_or_without_crops(
    user: UserModel, meta: nn.Module, survey: DatasetSurvey, inputs: ModelInputs, chosen: Sequence[str]
) -> tuple[DatasetSurvey, ModelInputs, Capture]:
    """Captures with shortened samples; if the model refuses those, with the dataset's own lengths, which then
    look constant."""
    tries = PartTries()
    try:
        return survey, inputs, capture_model(user, meta, survey, inputs, blocks=chosen, tries=tries)
    except UserError as error:
        # Samples are also shortened to follow paths that few samples take, which forward may refuse.
        is_refused_by_forward = survey.may_crop and error.__cause__ is not None
        if not (survey.has_crops or is_refused_by_forward):
            raise
    uncropped = survey.without_crops()
    inputs = describe_inputs(user, uncropped)
    return uncropped, inputs, capture_model(user, meta, uncropped, inputs, blocks=chosen, tries=tries)


def _capture_rare_paths(
    user: UserModel, meta: nn.Module, survey: DatasetSurvey, inputs: ModelInputs, capture: Capture
) -> tuple[DatasetSurvey, Capture]:
    """Captures again with drawn samples that take a path which no capture took, if there are any. Raises
    UserError for a path that cannot be captured: a run would meet it."""
    rare = find_rare_samples(user, survey, capture)
    if not rare:
        return survey, capture
    survey = survey.keep_samples(rare)
    try:
        capture = capture_model(user, meta, survey, inputs, blocks=capture.chosen_blocks)
    except UserError as error:
        names = ", ".join(map(user.sample_name, rare))
        error.message += f"; met with {names}, which took a path that the samples captured first did not take"
        raise
    for index, sample in rare.items():
        pattern = next(d.pattern for d in survey.drawn_samples if d.index == index)
        if line := find_uncovered_line(user, capture, pattern, sample):
            message = f"{user.sample_name(index)} takes a path through forward that cannot be captured"
            raise UserError(message, line, "decide by tensors (torch.where, a mask) instead of Python's `if`")
    return survey, capture


def _find_eager_failure(
    error: UserError, user: UserModel, meta: nn.Module, survey: DatasetSurvey, options: CompileOptions
) -> UserError | None:
    """Runs plain PyTorch on the first samples, and on each drawn sample alone, if the user's own code raised
    `error`.

    Returns the error of plain PyTorch; None if it succeeds. In place of a model that is too large to be built
    here, small_model() is run; its error counts if it comes from the same line. Without one, `error` gets
    what forward may not expect of a batch. Under --dtype, which the model may not be written for, the error
    says so.
    """
    if not eager_failure.is_user_error(error):
        return None
    model = _build_model_if_small(user, meta)
    stands_in = model is None and user.defines("small_model")
    model = user.build_small_model() if stands_in else model
    samples = [d.sample for d in survey.drawn_samples if d.sample is not None]
    failure = None
    if model is not None:
        tries = itertools.chain([samples[:2]], ([s] for s in samples))
        failures = (eager_failure.find_eager_failure(user, model, some) for some in tries)
        found = (f for f in failures if f is not None and (not stands_in or f.where == error.where))
        failure = next(found, None)
    elif few := samples[:_FEW_SAMPLES]:
        error.remedy += eager_failure.explain_default_batch(user, user.collate_shapes(few), few)
    if failure is not None or not options.dtype:
        return failure
    if model is not None and not stands_in:
        failure = eager_failure.find_eager_failure(user, cast_model(model, options.dtype), samples[:2])
        if failure is None:
            return None
    return eager_failure.blame_compute_dtype(failure or error, options.dtype, meta)


def _why_small_model_fails(user: UserModel, survey: DatasetSurvey) -> str:
    """Returns the error of small_model() on the samples that it is run on in place of model(), with its
    place; "" if it has none, or if the file does not define it."""
    model = user.build_small_model()
    if model is None:
        return ""
    small = survey_small_samples(user, survey)
    samples = small.compose_batches(small.micro_batch_patterns()[0])[0]
    failure = eager_failure.find_eager_failure(user, model, samples)
    return "" if failure is None else f"{failure.message} ({failure.where})"


def _collect_notes(
    planned: PlannedModule, survey: DatasetSurvey, options: CompileOptions, small_failure: str
) -> dict[str, object]:
    """Returns the entries of `checks` for the report: notes, one line each with place and cause (deviations
    from the planned capture, samples left out, `small_failure` of small_model()), terms that mixed batches
    lack, and choices that were taken back."""
    lines = [
        f"{n.path + ': ' if n.path else ''}{n.reason}{f' ({n.where})' if n.where else ''}"
        for n in planned.capture.notes
    ]
    lines += survey.skipped_samples
    if small_failure:
        lines.append(f"small_model() shows nothing about model(): {small_failure}")
    if options.stats is not None:
        lines.append(f"frequency and size of samples are taken from {options.stats.name}")
    if options.pack == "always":
        lines.append("samples of a micro-batch lie side by side in one row (--pack): shown to be exact")
    lines += _expert_load_notes(graph_of(planned.module))
    lines += _optimizer_notes(graph_of(planned.module))
    notes: dict[str, object] = {"notes": list(dict.fromkeys(lines))} if lines else {}
    if left_out := list(describe_left_out_terms(graph_of(planned.module))):
        notes["left_out_terms"] = left_out
    taken_back = [dataclasses.asdict(record) for record in planned.taken_back]
    return notes | ({"taken_back": taken_back} if taken_back else {})


def _optimizer_notes(graph: GraphOp) -> Iterator[str]:
    """Yields what the user's optimizer makes of the plan, or may make of it."""
    if reason := get_string(graph, "coupled"):
        yield f"{reason}: every rank that trains has all trained parameters"
    if (reason := get_string(graph, "unprobed")) and len(graph.sections) > 1:
        yield (
            f"{reason}; ranks with some of the parameters are exact if it updates each parameter by itself, "
            "which a run tries on its devices"
        )


def _expert_load_notes(graph: GraphOp) -> Iterator[str]:
    """Yields what was counted or is assumed of the loads of experts that form parts, a line for each
    section."""
    for section in graph.sections:
        counts, ep = expert_counts(graph, section), int(get_number(section, "ep") or 1)
        if counts and ep > 1:
            name = get_string(section, "pipeline") or section.sym.data
            exponent = float_attribute(section, "expert_load", DEFAULT_EXPERT_LOAD)
            counted = dict(counted_expert_parts(graph, section)).get(ep)
            source = (
                f"assumed to follow Zipf's law with exponent {exponent:g}"
                if counted is None
                else f"counted by running the model on up to {COUNTED_SAMPLES} drawn samples"
            )
            busiest = (
                float(busiest_part(gcd(*counts), ep, exponent)) if counted is None else counted / PERMILLE
            )
            yield (
                f"{name}: loads of its {gcd(*counts)} experts are {source} (--set {name}.expert_load): the"
                f" busiest of {ep} parts takes {busiest:.2f} times its share"
            )


def make_model_ref(user: UserModel, meta: nn.Module, parameters: dict[str, str]) -> ModelRef:
    """Returns what ties a plan to its model: the model file and the files it imports, by their hashes,
    versions of packages, and the given names, shapes and dtypes of the parameters."""
    files = imported_code.find_imported_files(user.module, meta)
    return ModelRef(
        str(user.path.resolve()),
        user.sha256,
        parameters,
        {name: imported_code.digest_file(path) for name, path in files.items()},
        imported_code.find_package_versions(meta),
        user.function_blocks,
        imported_code.find_package_modules(meta),
    )


def _is_too_large(meta: nn.Module) -> bool:
    """Whether a model exceeds MAX_LOCAL_MODEL_BYTES in float32, in which it is compared, too."""
    return sum(p.numel() * 4 for p in meta.parameters()) > MAX_LOCAL_MODEL_BYTES


def _build_model_if_small(user: UserModel, meta: nn.Module) -> nn.Module | None:
    """Builds the model with random weights, in its own dtypes; None if it is too large."""
    if _is_too_large(meta):
        return None
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        return user.build_model()
