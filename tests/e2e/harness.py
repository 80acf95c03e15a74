"""Compiles a model file, checks it against the eager model and writes its plan; training and comparing is `tools.ranks`."""

from __future__ import annotations

from pathlib import Path

from secc.check import checked
from secc.compiler import Compiled, Options, compile_model
from secc.report.page import page
from tools.ranks import LEARNING_RATE, Trained, differences, distributed, metrics, plain, recording_model, run

__all__ = ["LEARNING_RATE", "Trained", "compile_to", "differences", "distributed", "metrics", "plain", "recording_model", "run"]


def compile_to(path: Path, output: Path, check: bool = True, **options: object) -> Compiled:
    """Compile, check against the eager model, and write the plan."""
    compiled = compile_model(path, Options(**options))  # pyright: ignore[reportArgumentType]
    if check:
        compiled = checked(compiled)
    compiled.write(output, page)
    return compiled
