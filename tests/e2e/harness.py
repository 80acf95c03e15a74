"""Compiles a model file, checks it against the eager model and writes its plan; training and comparing is `tools.ranks`."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path

from secc.check import checked
from secc.codegen import plan as plan_codegen
from secc.compiler import Compiled, Options, compile_model, pipeline_text
from secc.planning import Planner
from secc.report.page import page
from tools.ranks import LEARNING_RATE, Trained, differences, distributed, metrics, plain, recording_model, run

__all__ = [
    "LEARNING_RATE",
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


def replanned(compiled: Compiled, options: Options) -> Compiled:
    """The model that was captured for one plan under another one."""

    def text(**changes: tuple[str, ...]) -> str:
        return pipeline_text(dataclasses.replace(options, **changes))

    source = dataclasses.replace(compiled.source, text=text)
    planned = Planner(source, options.set, lambda _: nullcontext(), lambda _: None).plan()
    made = plan_codegen.build(planned.module, compiled.plan.model, {})
    made = dataclasses.replace(made, checks=compiled.plan.checks)
    return dataclasses.replace(compiled, plan=made, module=planned.module, dumps=planned.dumps, constants=planned.captured.constants)
