"""Compiles a model file, checks it against the eager model and writes its plan; `tools.compare_training`
trains and compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from secc.codegen import plan_builder as plan_codegen
from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.default_pipeline import build_pipeline
from secc.driver.exactness_check import check_exactness
from secc.driver.layer_capture import LayerCapturePlan
from secc.driver.pass_driver import CapturedModel, Planner
from secc.frontend.capture.capture import Capture
from secc.ir.text_io.module_text import parse_module, print_module
from secc.report.html_page import report_page
from secc.runtime.model.user_file import load_model_file
from secc.runtime.parameters.checkpoint import load_full_state_dict
from tools.compare_training import (
    LEARNING_RATE,
    TrainingResult,
    find_differences,
    read_metrics,
    run_plan_ranks,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)
from tools.train_plain import train_model

__all__ = [
    "LEARNING_RATE",
    "LayerCaptureCache",
    "TrainingResult",
    "assert_same_training",
    "compile_and_write",
    "find_differences",
    "read_metrics",
    "replan",
    "run_plan_ranks",
    "train_distributed",
    "train_in_one_process",
    "write_recording_model",
]


def compile_and_write(path: Path, output: Path, check: bool = True, **options: object) -> CompiledPlan:
    """Compiles a model, checks it against the eager model, and writes the plan."""
    compiled = compile_model(path, CompileOptions(**options))  # pyright: ignore[reportArgumentType]
    if check:
        compiled = check_exactness(compiled)
    compiled.write_plan(output, report_page)
    return compiled


class LayerCaptureCache:
    """Captures in layers, and the IR of each capture, which hold for every plan of a model."""

    def __init__(self) -> None:
        self.capture_by_blocks: dict[tuple[str, ...], Capture] = {}
        self.ir_texts: list[tuple[Capture, str]] = []

    def ir_of(self, make: Callable[[Capture], ModuleOp], captured: Capture) -> ModuleOp:
        """Returns the IR of a capture, computed once."""
        known = next((text for own, text in self.ir_texts if own is captured), None)
        if known is None:
            known = print_module(make(captured))
            self.ir_texts.append((captured, known))
        return parse_module(known)


class _CachingPlanner(Planner):
    """A planner that captures a model in the same layers only once."""

    def __init__(self, source: CapturedModel, pinned: tuple[str, ...], layered: LayerCaptureCache) -> None:
        super().__init__(source, pinned, lambda _: nullcontext(), lambda _: None)
        self._cache = layered

    def _capture_layers(self, staged: LayerCapturePlan) -> Capture:
        known, opened = self._cache.capture_by_blocks, (*staged.opened_blocks, *staged.divided_layers)
        if opened not in known:
            known[opened] = super()._capture_layers(staged)
        return known[opened]


def replan(
    compiled: CompiledPlan, options: CompileOptions, layered: LayerCaptureCache | None = None
) -> CompiledPlan:
    """Plans a captured model again under other options."""

    def make_passes(**changes: tuple[str, ...]) -> tuple[ModulePass, ...]:
        return build_pipeline(dataclasses.replace(options, **changes), options.sections)

    layered = LayerCaptureCache() if layered is None else layered
    source = dataclasses.replace(
        compiled.captured_model,
        make_passes=make_passes,
        make_ir=partial(layered.ir_of, compiled.captured_model.make_ir),
    )
    planned = _CachingPlanner(source, options.set, layered).plan_model()
    made = plan_codegen.build_plan(planned.module, compiled.plan.model, {})
    made = dataclasses.replace(made, checks=compiled.plan.checks)
    return dataclasses.replace(
        compiled, plan=made, module=planned.module, dumps=planned.dumps, constants=planned.capture.constants
    )


def assert_same_training(model: Path, folder: Path, world_size: int, global_batch: int) -> None:
    """Runs the plan `folder`/plan for three steps with the model file's own optimizer. Raises AssertionError
    where losses or weights are not those of plain PyTorch."""
    saved = folder / "saved"
    arguments = ["--steps", "3", "--log-dir", str(folder), "--save", str(saved)]
    run_plan_ranks(folder / "plan", world_size, arguments)
    trained, losses = train_model(load_model_file(model), 3, global_batch)
    assert [m["loss"] for m in read_metrics(folder)] == pytest.approx(losses, rel=1e-6)
    found = load_full_state_dict(saved)
    for name, expected in trained.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)
