"""What a plan would be under other choices: its allocation run again from the IR that the plan directory
keeps.

The model is not needed: `ir/` holds the text before `allocate`, and the header of the last dump the passes
and options from there on. So the answer takes seconds, and differs from a fresh compilation only where
choices change what is captured: sections that were captured in layers may have any number of stages, others
one. A tp is taken to be possible where blocks were found to take it, and the plan's own is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from secc import pass_pipeline
from secc.codegen import plan_builder as plan_codegen
from secc.errors import ImpossibleChoice, UserError
from secc.ir.analysis.tp_layouts import feasible_tp
from secc.ir.dialect.ops import GraphOp, graph_of, strings_of
from secc.ir.dialect.python_attributes import int_list_attr
from secc.ir.text_io import module_text
from secc.runtime.plan.schema import Plan, Shard, load_plan

ALLOCATE_PASS, SHARD_PASS = "allocate", "shard-tensors"
ONE_STAGE = ".pp=1"  # ends the pin of a section whose layers were not captured
# Options of `allocate`; everything else is a section's choice.
ALLOCATE_OPTIONS = {
    "cluster": str,
    "ranks": int,
    "global_batch": int,
    "strategy": str,
    "objective": str,
    "step_time": float,
}


def replan_with_changes(directory: Path, changes: Sequence[str]) -> tuple[Plan, Plan]:
    """The plan in `directory`, and what it would be with `changes`: `SECTION.KEY=VALUE` or
    `cluster=4x8xH100`.

    Raises UserError for a directory without the IR of a plan, and for changes that cannot be read or done.
    """
    plan = load_plan(directory)
    steps, before = load_before_allocate(directory)
    asked = dataclasses.replace(steps[0], **_parse_changes(steps[0], changes))
    module = reallocate(before, asked, steps[1:], partial(allow_plan_tp, plan))
    return plan, _assume_sharded_matrices(plan_codegen.build_plan(module, plan.model, {}))


def allow_plan_tp(plan: Plan, graph: GraphOp) -> None:
    """Note at the blocks that the plan has cut that they take its tp: for one that was asked for nobody may
    have looked before."""
    taken = {s.name: s.mesh.tp for s in plan.user_sections if s.mesh.tp > 1}
    for section in (s for s in graph.sections if s.sym.data in taken):
        possible = {*feasible_tp(graph, section), taken[section.sym.data]}
        blocks = [graph.blocks[path] for path in strings_of(section.blocks)]
        for block in [b for b in blocks if "tp" in b.attributes] or blocks:
            block.attributes["tp"] = int_list_attr(sorted(possible))


def _assume_sharded_matrices(plan: Plan) -> Plan:
    """The plan with the matrices of sections whose tp was taken to be possible cut over it, as far as sums of
    gradients are concerned."""
    matrices = {
        name
        for name, what in plan.model.parameters.items()
        if "," in what.partition("[")[2].partition("]")[0]
    }
    sections = tuple(
        dataclasses.replace(s, shards=tuple(Shard(name, 0, ()) for name in s.params if name in matrices))
        if s.mesh.tp > 1 and not s.shards
        else s
        for s in plan.sections
    )
    return dataclasses.replace(plan, sections=sections)


def reallocate(
    before: Path, allocate: Any, behind: Sequence[ModulePass], adapt: Callable[[GraphOp], None] | None = None
) -> ModuleOp:
    """The dump, changed by `adapt` and allocated again, without choices that its blocks cannot carry out
    (stages need layers that were captured)."""
    pinned = {pin.partition("=")[0] for pin in allocate.set}
    while True:
        module = module_text.parse_module(before.read_text(), str(before))
        if adapt is not None:
            adapt(graph_of(module))
        try:
            pass_pipeline.run_passes(module, [allocate, *behind])
            return module
        except ImpossibleChoice as error:
            if set(error.choices) <= set(allocate.refused) or any(
                c.partition("=")[0] in pinned for c in error.choices
            ):
                raise _needs_compilation_error(error, allocate.set) from error
            allocate = dataclasses.replace(allocate, refused=(*allocate.refused, *error.choices))


def load_before_allocate(directory: Path) -> tuple[list[ModulePass], Path]:
    """`allocate` and the passes after it, free to choose other stages and tp, and the dump before them.

    Raises UserError for a directory without the IR of a plan.
    """
    dumps = sorted((directory / "ir").glob("*.mlir"))
    at = next((i for i, path in enumerate(dumps) if path.stem.partition("-")[2] == ALLOCATE_PASS), 0)
    if not at:
        raise UserError(
            "the plan has no IR to allocate again", str(directory / "ir"), "compile the model again"
        )
    steps = list(
        pass_pipeline.parse_pipeline(",".join(pass_pipeline.parse_dump_header(dumps[-1].read_text())))
    )
    first = next(i for i, step in enumerate(steps) if step.name == ALLOCATE_PASS)
    allocate: Any = steps[first]
    freed = _replace_options(
        allocate, stages=tuple(pin for pin in allocate.stages if pin.endswith(ONE_STAGE)), known=(), proven=()
    )
    return [
        freed,
        *(
            _replace_options(step, assume=True) if step.name == SHARD_PASS else step
            for step in steps[first + 1 :]
        ),
    ], dumps[at - 1]


def _replace_options(step: Any, **options: Any) -> Any:
    """A pass with other options."""
    return dataclasses.replace(step, **options)


def _needs_compilation_error(error: ImpossibleChoice, pins: Sequence[str]) -> UserError:
    """The error for pins that the captured blocks cannot meet, which blocks captured for these pins perhaps
    can."""
    keys = {choice.partition("=")[0] for choice in error.choices}
    asked = " ".join(pin for pin in pins if pin.partition("=")[0] in keys)
    remedy = f"compile with --set {asked}, which captures the model for it, or {error.remedy}"
    return UserError(error.message, error.where, remedy) if asked else error


def _parse_changes(allocate: Any, changes: Sequence[str]) -> dict[str, Any]:
    """The fields of `allocate` that the changes replace. A section's choice takes the place of an earlier one
    of the same key."""
    found: dict[str, Any] = {}
    pins = {pin.partition("=")[0]: pin for pin in allocate.set}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals or not value:
            raise UserError(
                f"cannot read the change {change!r}", remedy="write SECTION.KEY=VALUE, or cluster=4x8xH100"
            )
        key = name.replace("-", "_")
        if key in ALLOCATE_OPTIONS:
            found[key] = _parse_value(change, value, ALLOCATE_OPTIONS[key])
        elif "." in name:
            pins[name] = change
        else:
            known = ", ".join(ALLOCATE_OPTIONS)
            raise UserError(
                f"there is no choice {name!r}",
                remedy=f"choices are {known}, and SECTION.KEY such as language_model.dp",
            )
    return found | {"set": tuple(pins.values())}


def _parse_value(change: str, value: str, kind: type) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise UserError(
            f"{change}: {value!r} is not a {'whole number' if kind is int else 'number'}",
            remedy="correct the number",
        ) from None
