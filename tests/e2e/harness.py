"""Compiles a model file, checks it against the eager model and writes its plan; training and comparing is
`tools.compare_training`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from xdsl.dialects.builtin import ModuleOp

from secc.codegen import plan_builder as plan_codegen
from secc.driver.compile import Compiled, Options, compile_model, pipeline_text
from secc.driver.exactness_check import checked
from secc.driver.layer_capture import Staging
from secc.driver.pass_driver import Planner, Source
from secc.frontend.capture.capture import Capture
from secc.ir.text_io.module_text import parse, print_module
from secc.report.html_page import page
from tools.compare_training import (
    LEARNING_RATE,
    Trained,
    differences,
    distributed,
    metrics,
    plain,
    recording_model,
    run,
)

__all__ = [
    "LEARNING_RATE",
    "Layered",
    "Trained",
    "compile_to",
    "differences",
    "distributed",
    "metrics",
    "plain",
    "recording_model",
    "replanned",
    "run",
]


def compile_to(path: Path, output: Path, check: bool = True, **options: object) -> Compiled:
    """Compile, check against the eager model, and write the plan."""
    compiled = compile_model(path, Options(**options))  # pyright: ignore[reportArgumentType]
    if check:
        compiled = checked(compiled)
    compiled.write(output, page)
    return compiled


class Layered:
    """What is learnt for one plan and holds for others of the model: its captures in layers, and the IR of
    each capture."""

    def __init__(self) -> None:
        self.captures: dict[tuple[str, ...], Capture] = {}
        self.texts: list[tuple[Capture, str]] = []

    def made(self, make: Callable[[Capture], ModuleOp], captured: Capture) -> ModuleOp:
        """The IR of a capture, made when it is first asked for."""
        known = next((text for own, text in self.texts if own is captured), None)
        if known is None:
            known = print_module(make(captured))
            self.texts.append((captured, known))
        return parse(known)


class _Planner(Planner):
    """A planner that captures a model in the same layers once."""

    def __init__(self, source: Source, pinned: tuple[str, ...], layered: Layered) -> None:
        super().__init__(source, pinned, lambda _: nullcontext(), lambda _: None)
        self._layered = layered

    def _layers(self, staged: Staging) -> Capture:
        known = self._layered.captures
        if staged.cut not in known:
            known[staged.cut] = super()._layers(staged)
        return known[staged.cut]


def replanned(compiled: Compiled, options: Options, layered: Layered | None = None) -> Compiled:
    """The model that was captured for one plan under another one."""

    def text(**changes: tuple[str, ...]) -> str:
        return pipeline_text(dataclasses.replace(options, **changes))

    layered = Layered() if layered is None else layered
    source = dataclasses.replace(compiled.source, text=text, make=partial(layered.made, compiled.source.make))
    planned = _Planner(source, options.set, layered).plan()
    made = plan_codegen.build(planned.module, compiled.plan.model, {})
    made = dataclasses.replace(made, checks=compiled.plan.checks)
    return dataclasses.replace(
        compiled, plan=made, module=planned.module, dumps=planned.dumps, constants=planned.captured.constants
    )
