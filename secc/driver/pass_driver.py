"""Drives the passes from a capture to the lowered IR, and captures layers in between where pipeline stages
need them.

`allocate` chooses before any pass has tried to partition the model. If a later pass finds a choice impossible
(`ImpossibleChoice`), all passes run again without it, unless the user has pinned it, and the plan says so. If
it chose stages for a section, the blocks of that section are captured again layer by layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from secc import pass_pipeline, process_map
from secc.codegen.fused_module import plan_rewrites, render_fused_module
from secc.cost.counting.example_arguments import CollatedSamples
from secc.driver import layer_capture
from secc.driver.section_variants import choose_sections, passes_before
from secc.errors import ImpossibleChoice, UserError
from secc.frontend.capture.capture import Capture, capture_model
from secc.frontend.dataset.input_symbols import ModelInputs
from secc.frontend.dataset.survey import DatasetSurvey
from secc.frontend.tp_search.annotate_layouts import (
    NO_LAYOUTS,
    FusedOperators,
    SearchSubject,
    annotate_layouts,
    search_layouts,
)
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io.module_text import parse_module, print_module
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
    """The lowered IR, the capture that it was made from, (pass name, IR text) after each pass, and refused
    choices with the reason."""

    module: ModuleOp
    capture: Capture
    dumps: list[tuple[str, str]]
    refused_choices: dict[str, str]


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
    """Runs the passes on a captured model."""

    def __init__(
        self,
        source: CapturedModel,
        pins: tuple[str, ...],
        time_step: Callable[[str], contextlib.AbstractContextManager[None]],
        report_progress: Callable[[str], None],
    ) -> None:
        self.source, self.time_step, self.report_progress = source, time_step, report_progress
        self.pinned_keys = {pin.partition("=")[0] for pin in pins}
        self.captured_text = print_module(source.make_ir(source.capture))

    def plan_model(self) -> PlannedModule:
        """Plans the model, again without each choice that a later pass finds impossible.

        Raises UserError for a model that cannot be planned, ImpossibleChoice if the user has pinned the
        impossible choice.
        """
        refused: dict[str, str] = {}
        while True:
            try:
                return self._plan_without(refused)
            except ImpossibleChoice as error:
                new = set(error.choices) - refused.keys()
                if not new or any(choice.partition("=")[0] in self.pinned_keys for choice in new):
                    raise
                refused |= dict.fromkeys(sorted(new), error.message)

    def _plan_without(self, refused: dict[str, str]) -> PlannedModule:
        """Plans the model without the choices in `refused`."""
        options = {"refused": tuple(refused)}
        first = parse_module(self.captured_text)
        chosen = whole = self._run_allocation_passes(
            first, self.captured_text, self.source.capture, self.source.make_passes(**options)
        )
        sought = NO_LAYOUTS
        if (
            staged := layer_capture.plan_layer_capture(first, self.source.meta, dict(whole.dumps))
        ).opened_blocks:
            # Layers of a tower are the same once it is opened. What is sought is wanted last, behind the
            # captured layers' own choices.
            with process_map.run_in_background(
                lambda: search_layouts(first, *self._search_subject(whole)), low_priority=True
            ) as seeking:
                chosen = self._allocate_captured_layers(staged, options)
                sought = seeking()
        module, passes, dumps = (
            chosen.module,
            chosen.passes,
            [("capture", chosen.text_before), *chosen.dumps],
        )
        dumps += self._run_passes(
            module,
            passes_before(FIRST_PARTITIONING_PASS, passes),
            len(passes_before(FIRST_PLACEMENT_PASS, passes)),
        ).dumps
        with self.time_step("cut blocks over ranks"):
            told = layer_capture.copy_section_notes(staged, module)
            if annotate_layouts(module, *self._search_subject(chosen), sought) or told:
                done = [
                    pass_pipeline.format_pass(step) for step in passes_before(FIRST_PARTITIONING_PASS, passes)
                ]
                dumps[-1] = (dumps[-1][0], pass_pipeline.format_dump_header(done) + print_module(module))
        dumps += self._run_passes(module, passes, len(passes_before(FIRST_PARTITIONING_PASS, passes))).dumps
        return PlannedModule(module, chosen.capture, dumps, refused)

    def _run_allocation_passes(
        self, module: ModuleOp, text_before: str, capture: Capture, passes: tuple[ModulePass, ...]
    ) -> _AllocatedModule:
        """Applies the passes up to `allocate` to `module`, with the better sections for small towers."""
        grouped = passes_before("coarsen", passes)
        first = self._run_passes(module, grouped)
        with self.time_step("passes"):
            passes = choose_sections(module, passes)
        rest = self._run_passes(module, passes_before(FIRST_PLACEMENT_PASS, passes), len(grouped))
        return _AllocatedModule(module, text_before, capture, passes, [*first.dumps, *rest.dumps])

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
        with self.time_step("capture layers"):
            captured = self._capture_layers(staged)
        module = self.source.make_ir(captured)
        start = print_module(module)
        stages = tuple(pin for pin in staged.stage_pins if pin.partition("=")[0] not in self.pinned_keys)
        passes = self.source.make_passes(
            **options,
            sections=staged.sections,
            stages=stages,
            known=staged.all_choices,
            proven=staged.solver_status,
        )
        try:
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
        """Captures the model with blocks opened down to their layers.

        Raises ImpossibleChoice if a block cannot be opened.
        """
        source = self.source
        try:
            captured = capture_model(
                source.user,
                source.meta,
                source.survey,
                source.inputs,
                staged.opened_blocks,
                before=source.capture,
            )
            layer_capture.check_opened_blocks(staged, captured)
        except UserError as error:
            raise staged.impossible_choice(error) from error
        return captured
