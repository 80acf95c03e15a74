"""Drives the passes from a capture to the lowered IR, and captures layers in between where pipeline stages
need them.

`allocate` chooses before any pass has tried to partition the model. If it chose stages for a section, the
blocks of that section are captured again layer by layer. If that capture or a later pass finds a choice
impossible, all passes run again without it, unless the user has pinned it (`secc.driver.taken_back`). So do
they where stages need more memory than their devices have; that plan is kept if no other one fits.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from secc import pass_pipeline, process_map
from secc.codegen.fused_module import plan_rewrites, render_fused_module
from secc.cost.counting.example_arguments import CollatedSamples
from secc.driver import layer_capture
from secc.driver.compile_options import TakenBack
from secc.driver.section_variants import KnownVariants, choose_sections, passes_before
from secc.driver.taken_back import TakenBackChoices
from secc.errors import ImpossibleChoice, UserError
from secc.frontend.capture.capture import Capture, capture_model
from secc.frontend.cp_search.annotate_rows import annotate_rows
from secc.frontend.dataset.input_symbols import ModelInputs
from secc.frontend.dataset.survey import DatasetSurvey
from secc.frontend.tp_search.annotate_layouts import (
    NO_LAYOUTS,
    FusedOperators,
    LayoutSearch,
    SearchSubject,
    annotate_layouts,
    search_layouts,
)
from secc.ir.analysis.dataflow import get_number, get_string
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io.module_text import parse_module, print_module
from secc.passes.sink_boundaries import SinkBoundaries
from secc.runtime.model.user_file import UserModel

FIRST_PLACEMENT_PASS = "place"  # the first pass after `allocate`
FIRST_PARTITIONING_PASS = "split-stages"  # the first pass that carries out the choices of `allocate`


@dataclass(frozen=True)
class CapturedModel:
    """A captured model and the means to plan it.

    model: the model with weights, None if it is too large to build here. sample_batches: samples collated one
    by one. make_ir: annotated IR of a capture. make_passes: the pipeline with some compile options replaced.
    """

    user: UserModel
    meta: nn.Module
    model: nn.Module | None
    survey: DatasetSurvey
    inputs: ModelInputs
    sample_batches: Sequence[Mapping[str, Any]]
    capture: Capture
    make_ir: Callable[[Capture], ModuleOp]
    make_passes: Callable[..., tuple[ModulePass, ...]]


@dataclass(frozen=True)
class PlannedModule:
    """The lowered IR, the capture that it was made from, (pass name, IR text) after each pass, and choices
    that were taken back."""

    module: ModuleOp
    capture: Capture
    dumps: list[tuple[str, str]]
    taken_back: tuple[TakenBack, ...]


@dataclass(frozen=True)
class _AllocatedModule:
    """A module after `allocate`: its text before the passes, its capture, the whole pipeline, and the dumps
    so far."""

    module: ModuleOp
    text_before: str
    capture: Capture
    passes: tuple[ModulePass, ...]
    dumps: list[tuple[str, str]]


class Planner:
    """Runs the passes on a captured model.

    pins: choices of the user. time_step: context manager that times a named step. known: choices that an
    earlier plan took back. `source` loses the fallback cases of its capture if the model cannot be planned
    with them.
    """

    def __init__(
        self,
        source: CapturedModel,
        pins: tuple[str, ...],
        time_step: Callable[[str], contextlib.AbstractContextManager[None]],
        report_progress: Callable[[str], None],
        known: Sequence[TakenBack] = (),
    ) -> None:
        self.source, self.time_step, self.report_progress = source, time_step, report_progress
        self._pins, self._taken_back = pins, TakenBackChoices(pins, known)
        self._captured_fallbacks, self._keep_fallbacks = source.capture.has_fallbacks, True
        self.captured_text = print_module(source.make_ir(source.capture))
        self._has_divided_layers = False  # the present plan
        self._cuts: SinkBoundaries | None = None  # of the first of the plans that are made in turn
        self._variants: KnownVariants = {}  # of sections, for plans of the same graph with other choices

    def plan_model(self) -> PlannedModule:
        """Plans the model, again without each choice that proves impossible, and without stages that need
        more memory than their devices have, if there is a plan without them that fits.

        Raises UserError for a model that cannot be planned, ImpossibleChoice if the user has pinned the
        impossible choice.
        """
        first = planned = self._plan_possible()
        planner = self
        while excess := planner._stages_beyond_memory(planned.module):
            known = (*planned.taken_back, *excess)
            planner = Planner(self.source, self._pins, self.time_step, self.report_progress, known)
            try:
                planned = planner._plan_possible()
            except UserError:
                return first  # nothing else fits; its step is shown with a warning
        self.source = planner.source
        return planned

    def _plan_possible(self) -> PlannedModule:
        """Plans the model, again without each choice that proves impossible."""
        while True:
            try:
                return self._plan_once()
            except UserError as error:
                if self._has_divided_layers:
                    self._taken_back.take_back_divided_layers(error)
                    continue
                if isinstance(error, ImpossibleChoice) and self._taken_back.take_back(error):
                    continue
                if not self._drop_fallbacks(error):
                    raise

    def _stages_beyond_memory(self, module: ModuleOp) -> list[TakenBack]:
        """The numbers of stages with which some stage leaves no memory for a micro-batch, and why. Pinned
        ones are not among them; of a plan that is made for too little memory there are none."""
        graph, found = graph_of(module), dict[str, TakenBack]()
        if "missing_gib" in json.loads(get_string(graph, "prediction") or "{}"):
            return []
        for stage in graph.sections:
            missing, name = get_number(stage, "missing_gib"), get_string(stage, "pipeline") or ""
            if missing and not self._taken_back.is_pinned(f"{name}.pp"):
                stages = [s for s in graph.sections if get_string(s, "pipeline") == name]
                count = len(stages) // int(get_number(stage, "chunks") or 1)
                reason = (
                    f"a rank of {stage.sym.data}, one of its {count} stages, would need {missing:.3g} GiB"
                    " more than its tensors may take"
                )
                found.setdefault(name, TakenBack(f"{name}.pp={count}", reason, ""))
        return [*found.values()]

    def _drop_fallbacks(self, error: UserError) -> bool:
        """Goes on without fallback cases: their boundaries may be what no pass can carry out. Returns False
        if there are none."""
        if not self._captured_fallbacks or not self._taken_back.take_back_fallback_cases(error):
            return False
        self._keep_fallbacks = False
        self.source = replace(self.source, capture=self.source.capture.without_fallbacks())
        self.captured_text = print_module(self.source.make_ir(self.source.capture))
        return True

    def _plan_once(self) -> PlannedModule:
        """Plans the model without the choices that were taken back."""
        options = {"refused": self._taken_back.choices}
        self._cuts, self._has_divided_layers = None, False
        first = parse_module(self.captured_text)
        try:
            chosen = whole = self._run_allocation_passes(
                first, self.captured_text, self.source.capture, self.source.make_passes(**options)
            )
        except UserError as error:
            raise self._taken_back.explain(error) from error
        sought = NO_LAYOUTS
        if (
            staged := layer_capture.plan_layer_capture(
                first, self.source.meta, dict(whole.dumps), self._taken_back.divides_layers
            )
        ).opened_blocks:
            # Layers of a tower are the same once it is opened. What is sought is wanted last, behind the
            # captured layers' own choices.
            self._has_divided_layers = bool(staged.divided_layers)
            with (
                self._blame_partitioning(first),
                process_map.run_in_background(
                    lambda: search_layouts(first, *self._search_subject(whole)), low_priority=True
                ) as seeking,
            ):
                chosen = self._allocate_captured_layers(staged, options)
                sought = seeking()
        with self._blame_partitioning(chosen.module):
            dumps = self._partition(chosen, staged, sought)
        return PlannedModule(chosen.module, chosen.capture, dumps, self._taken_back.records)

    def _partition(
        self, chosen: _AllocatedModule, staged: layer_capture.LayerCapturePlan, sought: LayoutSearch
    ) -> list[tuple[str, str]]:
        """Runs the passes after the allocation; returns all dumps."""
        module, passes = chosen.module, chosen.passes
        partitioned = passes_before(FIRST_PARTITIONING_PASS, passes)
        dumps = [("capture", chosen.text_before), *chosen.dumps]
        dumps += self._run_passes(module, partitioned, len(passes_before(FIRST_PLACEMENT_PASS, passes))).dumps
        with self.time_step("cut blocks over ranks"):
            told = layer_capture.copy_section_notes(staged, module)
            subject = self._search_subject(chosen)
            if any((annotate_layouts(module, *subject, sought), annotate_rows(module, *subject), told)):
                done = [pass_pipeline.format_pass(step) for step in partitioned]
                dumps[-1] = (dumps[-1][0], pass_pipeline.format_dump_header(done) + print_module(module))
        return dumps + self._run_passes(module, passes, len(partitioned)).dumps

    @contextlib.contextmanager
    def _blame_partitioning(self, module: ModuleOp) -> Iterator[None]:
        """Context manager that turns a UserError into an ImpossibleChoice against what the passes carry out:
        stages, or tensor cuts where no stages are free to go. Pinned choices are not blamed."""
        suspects: list[str] = []
        for key in ("pp", "tp"):
            cut = [s.sym.data for s in graph_of(module).sections if (get_number(s, key) or 1) > 1]
            suspects = suspects or [
                f"{name}.{key}" for name in cut if not self._taken_back.is_pinned(f"{name}.{key}")
            ]
        try:
            yield
        except UserError as error:
            if isinstance(error, ImpossibleChoice) or not suspects:
                raise
            raise ImpossibleChoice(error, suspects) from error

    def _run_allocation_passes(
        self, module: ModuleOp, text_before: str, capture: Capture, passes: tuple[ModulePass, ...]
    ) -> _AllocatedModule:
        """Applies the passes up to `allocate` to `module`, with the better sections for small towers."""
        grouped = passes_before("coarsen", passes)
        first = self._run_passes(module, grouped)
        with self.time_step("passes"):
            passes = choose_sections(module, self._with_known_cuts(passes), self._variants)
        self._cuts = next(step for step in passes if isinstance(step, SinkBoundaries))
        rest = self._run_passes(module, passes_before(FIRST_PLACEMENT_PASS, passes), len(grouped))
        return _AllocatedModule(module, text_before, capture, passes, [*first.dumps, *rest.dumps])

    def _with_known_cuts(self, passes: tuple[ModulePass, ...]) -> tuple[ModulePass, ...]:
        """Returns the passes with what the first plan has decided about boundaries, if a second one is made
        with captured layers."""
        return tuple(
            replace(step, fixed=self._cuts.fixed, outcomes=self._cuts.outcomes)
            if isinstance(step, SinkBoundaries) and self._cuts is not None
            else step
            for step in passes
        )

    def _run_passes(
        self, module: ModuleOp, passes: tuple[ModulePass, ...], done: int = 0
    ) -> pass_pipeline.PipelineRun:
        """Runs the passes after the first `done`; these are only named in the headers of the dumps."""
        with self.time_step("passes"):
            applied = [pass_pipeline.format_pass(step) for step in passes[:done]]
            return pass_pipeline.run_passes(
                module, passes[done:], dump=True, report_progress=self.report_progress, done=applied
            )

    def _allocate_captured_layers(
        self, staged: layer_capture.LayerCapturePlan, options: Mapping[str, tuple[str, ...]]
    ) -> _AllocatedModule:
        """Captures the opened blocks layer by layer and runs the passes up to the allocation on the new
        capture."""
        try:
            with self.time_step("capture layers"):
                captured = self._capture_layers(staged)
                self._captured_fallbacks |= captured.has_fallbacks
                captured = captured if self._keep_fallbacks else captured.without_fallbacks()
            module = self.source.make_ir(captured)
            start = print_module(module)
            stages = tuple(pin for pin in staged.stage_pins if not self._taken_back.is_pinned(pin))
            passes = self.source.make_passes(
                **options,
                sections=staged.sections_of_blocks(captured.blocks),
                stages=stages,
                known=staged.all_choices,
                proven=staged.solver_status,
            )
            return self._run_allocation_passes(module, start, captured, passes)
        except UserError as error:
            raise staged.impossible_choice(error) from error

    def _search_subject(self, chosen: _AllocatedModule) -> tuple[SearchSubject, FusedOperators]:
        """Returns the model to search tensor-parallel layouts for, and the fused operators to verify them
        with."""
        source, graph = self.source, graph_of(chosen.module)
        samples = CollatedSamples(source.sample_batches, chosen.capture.constants)
        return SearchSubject(source.meta, source.model, source.user, source.survey, samples), (
            plan_rewrites(graph),
            render_fused_module(graph),
        )

    def _capture_layers(self, staged: layer_capture.LayerCapturePlan) -> Capture:
        """Captures the model with blocks opened down to their layers, and some of these down to their parts.

        Raises UserError if a block cannot be opened.
        """
        source = self.source
        captured = capture_model(
            source.user,
            source.meta,
            source.survey,
            source.inputs,
            (*staged.opened_blocks, *staged.divided_layers),
            before=source.capture,
        )
        layer_capture.check_opened_blocks(staged, captured)
        return captured
