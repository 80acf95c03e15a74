"""Plans again for fewer ranks, for a run that has lost some: from the IR in the plan directory, in seconds,
without the model.

Allocation runs again with the plan's own options, and the new plan is written next to the plan. Pins that
fewer ranks cannot meet are dropped. Tensor parallelism needs layouts that are proven on the model's modules,
so sections of the new plan have tp=1. It trains the same steps: what a step computes does not depend on the
plan, and checkpoints are under the user's names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from secc import __version__, pass_pipeline
from secc.codegen import plan_builder
from secc.codegen.plan_files import build_plan_files
from secc.codegen.plan_writer import write_plan_files
from secc.driver import edge_fills, what_if
from secc.errors import UserError
from secc.ir.text_io.module_text import parse_module, read_text
from secc.report.html_page import report_page
from secc.runtime.parameters.rank_weights import MODEL_FILE_COPY, imported_file_copy
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import Plan

_REPLICA_PINS = (".tp", ".ep", ".cp", ".attention", ".cp_per")
_LAYOUT_PINS = (*_REPLICA_PINS, ".dp", ".pp", ".with", ".placement", ".chunks")
_CONSTANTS_FILE = "sections/constants.pt"


def replan_for_ranks(directory: Path, ranks: int) -> Path:
    """Writes a plan for `ranks` ranks to the directory NAME-on-RANKS-ranks next to the plan's, and returns
    its path. Raises UserError if the model does not fit on these ranks."""
    plan = load_plan(directory)
    output = directory.with_name(f"{directory.name}-on-{ranks}-ranks")
    passes, ir_file = what_if.load_before_allocate(directory)
    before = sorted((directory / "ir").glob("*.mlir"))
    before = before[: before.index(ir_file) + 1]
    later = [_without_assumptions(step) for step in passes[1:]]
    allocate = _allocate_on(passes[0], plan, ranks, ir_file, later)
    text = read_text(ir_file)
    module, done = parse_module(text, str(ir_file)), pass_pipeline.parse_dump_header(text)
    run = pass_pipeline.run_passes(module, [allocate, *later], dump=True, done=done)
    versions = {"secc": __version__, "torch": torch.__version__.split("+")[0]}
    new = plan_builder.build_plan(module, plan.model, versions)
    new = dataclasses.replace(new, checks=plan.checks | new.checks)
    new, module, done_dumps = edge_fills.set_fills(new, module, run.dumps, edge_fills.carry_fills(plan, new))
    constants = _read_constants(directory)
    dumps = [(path.stem.partition("-")[2], read_text(path)) for path in before] + done_dumps
    source = (directory / MODEL_FILE_COPY).read_text(encoding="utf-8")
    try:
        files = build_plan_files(new, module, dumps, constants, source, report_page(new))
    except KeyError as error:
        message = f"the plan lacks the constant {error.args[0]!r} that a plan for {ranks} ranks reads"
        raise UserError(message, str(directory / _CONSTANTS_FILE), "compile again for fewer ranks") from None
    for name in plan.model.imports:
        files[imported_file_copy(name)] = (directory / imported_file_copy(name)).read_text(encoding="utf-8")
    write_plan_files(output, files)
    return output


def _allocate_on(allocate: Any, plan: Plan, ranks: int, ir_file: Path, later: Sequence[Any]) -> Any:
    """Returns the options of `allocate` that make a plan for `ranks` ranks: those of the plan, or the first
    that fit."""
    refusal: UserError | None = None
    for candidate in _candidates(allocate, plan, ranks):
        try:
            return what_if.reallocate_possibly(ir_file, candidate, later)[1]
        except UserError as error:
            refusal = error
    assert refusal is not None
    raise refusal


def _candidates(allocate: Any, plan: Plan, ranks: int) -> Iterator[Any]:
    """Yields options of `allocate`, from those that change the least."""
    keys = [pin.partition("=")[0] for pin in allocate.set]
    whole = tuple(f"{s.name}.tp=1" for s in plan.user_sections)
    kept = tuple(p for p, key in zip(allocate.set, keys, strict=True) if not key.endswith(_REPLICA_PINS))
    free = tuple(p for p, key in zip(allocate.set, keys, strict=True) if not key.endswith(_LAYOUT_PINS))
    for pins, strategy in ((kept, allocate.strategy), (free, allocate.strategy), (free, "auto")):
        yield dataclasses.replace(
            allocate, ranks=ranks, global_batch=plan.global_batch, set=(*pins, *whole), strategy=strategy
        )


def _without_assumptions(step: Any) -> Any:
    """Returns a pass that refuses what was not shown to be exact."""
    return dataclasses.replace(step, assume=False) if step.name == what_if.SHARD_PASS else step


def _read_constants(directory: Path) -> dict[str, torch.Tensor]:
    path = directory / _CONSTANTS_FILE
    return torch.load(path, weights_only=True) if path.exists() else {}
