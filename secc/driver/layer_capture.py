"""Decides which blocks are captured again layer by layer, because a section is to run in pipeline stages.

Blocks are chosen coarse first, and sections are named after them. Where `allocate` gave a section more than
one stage (pp > 1), its blocks with layer stacks are opened, and every section keeps the module paths that it
had.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from xdsl.dialects.builtin import IntegerAttr, ModuleOp

from secc.alloc.explain import plan_choices as known
from secc.errors import ImpossibleChoice, UserError
from secc.frontend.capture.block_selection import ModuleTree
from secc.frontend.capture.capture import Capture
from secc.frontend.capture.whole_blocks import blocks_left_whole, holds_layers
from secc.ir.analysis.dataflow import get_number, get_strings, get_values
from secc.ir.dialect.ops import CallOp, SectionOp, graph_of, section_of, strings_of
from secc.ir.text_io.module_text import parse_module
from secc.passes.sections.merge_sections import add_section_notes


@dataclass(frozen=True)
class LayerCapturePlan:
    """What a second capture has to open and to keep.

    opened_blocks: module paths to open down to their layers. sections: all sections as `coarsen` takes them
    ("NAME=PATH+PATH"). stage_pins: stages of each section ("NAME.pp=2"). choice_by_block: the choice
    ("NAME.pp") that each opened block serves. all_choices, solver_status: all choices of the first plan and
    what the solver proved about it. section_notes: how each section was formed. divided_layers: layers to
    open down to their parts, because stages of equal times would begin inside them.
    """

    opened_blocks: tuple[str, ...]
    sections: tuple[str, ...]
    stage_pins: tuple[str, ...]
    choice_by_block: Mapping[str, str]
    all_choices: tuple[str, ...]
    solver_status: tuple[str, ...]
    section_notes: Mapping[str, tuple[str, ...]]
    divided_layers: tuple[str, ...] = ()

    def sections_of_blocks(self, blocks: Collection[str]) -> tuple[str, ...]:
        """Returns the sections without module paths that have no block at or below them. A module that was a
        block of the first capture (a table of rotations that forward calls once more) may be glue of the
        second."""
        kept: list[str] = []
        for section in self.sections:
            name, _, paths = section.partition("=")
            found = [p for p in paths.split("+") if any(f"{b}.".startswith(f"{p}.") for b in blocks)]
            kept += [f"{name}={'+'.join(found)}"] if found else []
        return tuple(kept)

    def impossible_choice(self, error: UserError, paths: Collection[str] = ()) -> ImpossibleChoice:
        """Turns an error met with opened blocks into a reason against the stages that they were opened for.

        paths: the blocks at fault; empty if all may be.
        """
        if isinstance(error, ImpossibleChoice):
            return error
        opened = [path for path in self.opened_blocks if path in paths or not paths]
        choices = sorted({self.choice_by_block[path] for path in opened})
        message = (
            f"{' and '.join(choices)} is impossible: with {' and '.join(opened)} opened down to layers, "
            f"{error.message}"
        )
        return ImpossibleChoice(UserError(message, error.where, "leave pp out for that section"), choices)


def plan_layer_capture(
    module: ModuleOp, meta: nn.Module, dumps: Mapping[str, str], divides_layers: bool
) -> LayerCapturePlan:
    """Returns which blocks to open for the stages of an allocated module.

    dumps: IR text by pass name. Sections are taken from the dump of `coarsen`, before `sink-boundaries` moved
    blocks between them. divides_layers: whether layers may be opened, too.
    """
    graph = graph_of(module)
    staged = {s.sym.data for s in graph.sections if (get_number(s, "pp") or 1) > 1}
    calls = {
        (section_of(op), op.target.data) for case in graph.cases for op in case.ops if isinstance(op, CallOp)
    }
    tree = ModuleTree(meta)
    cut = tuple(sorted(path for section, path in calls if section in staged and holds_layers(tree, path)))
    coarse = graph_of(parse_module(dumps["coarsen"])).sections if cut else ()
    sections = tuple(f"{s.sym.data}={'+'.join(strings_of(s.blocks))}" for s in coarse if strings_of(s.blocks))
    stages = tuple(f"{s.sym.data}.pp={get_number(s, 'pp') or 1}" for s in graph.sections)
    notes = {s.sym.data: get_strings(s, "notes") for s in coarse}
    choices = {path: f"{section}.pp" for section, path in calls if path in cut}
    divided = (
        path
        for section in graph.sections
        if divides_layers
        for path in _layers_at_cuts(
            section, tree, [p for s, p in calls if s == section.sym.data and p in cut]
        )
    )
    return LayerCapturePlan(
        cut,
        sections,
        stages,
        choices,
        known.list_plan_choices(graph),
        known.format_solver_status(graph),
        notes,
        tuple(divided),
    )


def _layers_at_cuts(section: SectionOp, tree: ModuleTree, towers: Sequence[str]) -> list[str]:
    """The layers of a section inside which stages of equal times would begin; none where it does not have one
    stack."""
    stacks = [stack for tower in towers for stack in tree.outermost_stacks(tower)]
    if len(stacks) != 1:
        return []
    layers = [path for path, _ in tree.child_modules(stacks[0])]
    places = [int(i.value.data) for i in get_values(section, "layers_at_cuts", IntegerAttr)]
    return [layers[i] for i in places if i < len(layers)]


def copy_section_notes(staging: LayerCapturePlan, module: ModuleOp) -> bool:
    """Copies the notes about how sections were formed from the first capture to the module of the second.

    Returns whether there were any notes.
    """
    for section in graph_of(module).sections:
        add_section_notes(
            section,
            *(
                n
                for n in staging.section_notes.get(section.sym.data, ())
                if n not in get_strings(section, "notes")
            ),
        )
    return any(staging.section_notes.values())


def check_opened_blocks(staging: LayerCapturePlan, captured: Capture) -> None:
    """Raises ImpossibleChoice if blocks that were to be opened stayed whole in the second capture; it names
    only the stages that these blocks were opened for."""
    whole = dict(blocks_left_whole(staging.opened_blocks, captured))
    for path, note in whole.items():
        reason = f": {note.path} is {note.reason}" if note else ""
        error = UserError(f"{path} cannot be cut into stages{reason}", note.where if note else "")
        raise staging.impossible_choice(error, whole)
