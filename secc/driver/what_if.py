"""Plans again under other choices, from the IR that the plan directory keeps.

The model is not needed: `ir/` holds the text before `allocate`, and the header of the last dump names the
passes and options from there on. So the answer takes seconds. It differs from a fresh compilation only where
choices change what is captured: a section that was captured in layers may have any number of stages, others
have one. A tp is possible where compilation tested it on the blocks, and the plan's own tp always is.
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
from secc.driver.taken_back import TakenBackChoices
from secc.errors import ImpossibleChoice, UserError
from secc.ir.analysis.tp_layouts import assume_expert_shards, feasible_tp
from secc.ir.dialect.ops import GraphOp, SectionOp, graph_of, strings_of
from secc.ir.dialect.python_attributes import int_list_attr
from secc.ir.text_io import module_text
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import Plan, Section, Shard

ALLOCATE_PASS, SHARD_PASS = "allocate", "shard-tensors"
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
    """Returns the plan in `directory`, and the plan under `changes` (`SECTION.KEY=VALUE` or
    `cluster=4x8xH100`).

    Raises UserError for a directory without IR, and for changes that cannot be read or carried out.
    """
    plan = load_plan(directory)
    passes, ir_file = load_before_allocate(directory)
    changed_allocate = dataclasses.replace(passes[0], **_parse_changes(passes[0], changes))
    module = reallocate(ir_file, changed_allocate, passes[1:], partial(allow_plan_tp, plan))
    return plan, _assume_shards(plan_codegen.build_plan(module, plan.model, {}), graph_of(module))


def allow_plan_tp(plan: Plan, graph: GraphOp) -> None:
    """Marks the plan's own tp as possible on its blocks: a tp forced with --set may not have been tested
    before."""
    tp_of_section = {s.name: s.mesh.tp for s in plan.user_sections if s.mesh.tp > 1}
    for section in (s for s in graph.sections if s.sym.data in tp_of_section):
        possible = {*feasible_tp(graph, section), tp_of_section[section.sym.data]}
        blocks = [graph.blocks[path] for path in strings_of(section.blocks)]
        for block in [b for b in blocks if "tp" in b.attributes] or blocks:
            block.attributes["tp"] = int_list_attr(sorted(possible))


def _assume_shards(plan: Plan, graph: GraphOp) -> Plan:
    """Gives sections with an untested tp shards of all their matrices, and those with an untested ep over
    replicas shards of their experts, for the size of their gradient sums."""
    section_ops = {s.sym.data: s for s in graph.sections}
    sections = tuple(
        s if s.shards else dataclasses.replace(s, shards=_assumed_shards(plan, graph, section_ops[s.name], s))
        for s in plan.sections
    )
    return dataclasses.replace(plan, sections=sections)


def _assumed_shards(plan: Plan, graph: GraphOp, op: SectionOp, section: Section) -> tuple[Shard, ...]:
    mesh, parameters = section.mesh, {n: plan.model.parameters.get(n, "") for n in section.params}
    experts = (
        {s.name: s for s in assume_expert_shards(graph, op, parameters, mesh.tp, mesh.expert_replicas)}
        if mesh.expert_replicas > 1
        else {}
    )
    matrices = [n for n, what in parameters.items() if "," in what.partition("[")[2].partition("]")[0]]
    others = [Shard(name, 0, ()) for name in matrices if name not in experts] if mesh.tp > 1 else []
    return (*experts.values(), *others)


def reallocate(
    ir_file: Path,
    allocate: Any,
    later_passes: Sequence[ModulePass],
    adapt: Callable[[GraphOp], None] | None = None,
) -> ModuleOp:
    """Runs `allocate` and the passes after it on the IR before `allocate`, as `reallocate_possibly` does."""
    return reallocate_possibly(ir_file, allocate, later_passes, adapt)[0]


def reallocate_possibly(
    ir_file: Path,
    allocate: Any,
    later_passes: Sequence[ModulePass],
    adapt: Callable[[GraphOp], None] | None = None,
) -> tuple[ModuleOp, Any]:
    """Runs `allocate` and the passes after it on the IR before `allocate`. Returns the module, and `allocate`
    with the choices that it had to refuse.

    ir_file: dump before `allocate`. adapt: changes the graph first. Choices that a later pass cannot carry
    out (stages without captured layers) are taken back and the passes run again; raises UserError if such a
    choice was pinned.
    """
    taken_back = TakenBackChoices(allocate.set)
    refused = allocate.refused
    while True:
        module = module_text.read_module(ir_file)
        if adapt is not None:
            adapt(graph_of(module))
        try:
            pass_pipeline.run_passes(module, [allocate, *later_passes])
            return module, allocate
        except ImpossibleChoice as error:
            if not taken_back.take_back(error):
                raise _needs_compilation_error(error, allocate.set) from error
            allocate = dataclasses.replace(allocate, refused=(*refused, *taken_back.choices))


def load_before_allocate(directory: Path) -> tuple[list[ModulePass], Path]:
    """Returns `allocate` and the passes after it, and the path of the dump before `allocate`.

    The passes are free to choose other stages and tp than the plan has. Raises UserError if `directory` has
    no IR.
    """
    dumps = sorted((directory / "ir").glob("*.mlir"))
    at = next((i for i, path in enumerate(dumps) if path.stem.partition("-")[2] == ALLOCATE_PASS), 0)
    if not at:
        raise UserError(
            "the plan directory has no IR from before `allocate`",
            str(directory / "ir"),
            "compile the model again",
        )
    header = pass_pipeline.parse_dump_header(module_text.read_text(dumps[-1]))
    steps = list(pass_pipeline.parse_pipeline(",".join(header)))
    first = next((i for i, step in enumerate(steps) if step.name == ALLOCATE_PASS), None)
    if first is None:
        message = "the IR does not begin with the pipeline that made it"
        raise UserError(message, str(dumps[-1]), "compile the model again")
    allocate: Any = steps[first]
    return [
        allocate.without_known_plan(),
        *(
            _replace_options(step, assume=True) if step.name == SHARD_PASS else step
            for step in steps[first + 1 :]
        ),
    ], dumps[at - 1]


def _replace_options(step: Any, **options: Any) -> Any:
    """Returns a pass with other options."""
    return dataclasses.replace(step, **options)


def _needs_compilation_error(error: ImpossibleChoice, pins: Sequence[str]) -> UserError:
    """The error for pins that the captured blocks cannot meet; blocks captured for these pins may meet
    them."""
    keys = {choice.partition("=")[0] for choice in error.choices}
    asked = " ".join(pin for pin in pins if pin.partition("=")[0] in keys)
    remedy = f"compile with --set {asked}, which captures the model for it, or {error.remedy}"
    return UserError(error.message, error.where, remedy) if asked else error


def _parse_changes(allocate: Any, changes: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of `allocate` that `changes` replace. A pin replaces an earlier pin of the same
    key."""
    replaced: dict[str, Any] = {}
    pins = {pin.partition("=")[0]: pin for pin in allocate.set}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals or not value:
            raise UserError(
                f"expected a change SECTION.KEY=VALUE, got {change!r}",
                remedy="write SECTION.KEY=VALUE, or cluster=4x8xH100",
            )
        key = name.replace("-", "_")
        if key in ALLOCATE_OPTIONS:
            replaced[key] = _parse_value(change, value, ALLOCATE_OPTIONS[key])
        elif "." in name:
            pins[name] = change
        else:
            known = ", ".join(ALLOCATE_OPTIONS)
            raise UserError(
                f"unknown choice {name!r}",
                remedy=f"choices are {known}, and SECTION.KEY such as language_model.dp",
            )
    return replaced | {"set": tuple(pins.values())}


def _parse_value(change: str, value: str, kind: type) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise UserError(
            f"{change}: {value!r} is not a {'whole number' if kind is int else 'number'}",
            remedy="correct the number",
        ) from None
