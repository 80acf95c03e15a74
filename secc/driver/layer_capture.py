"""Pipeline stages need layers that are blocks: which of the model's blocks are opened down to their layers,
because stages are wanted.

The frontier is chosen coarse first, and sections have their names from that. Where a section is to run in
several stages (`allocate` has given it a `pp` above 1), its blocks with stacks are captured again layer by
layer, and every section is held together by the module paths that it had.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn
from xdsl.dialects.builtin import ModuleOp

from secc.alloc.explain import plan_choices as known
from secc.errors import Impossible, UserError
from secc.frontend.capture.block_selection import Tree
from secc.frontend.capture.capture import Capture
from secc.ir.analysis.dataflow import number_of, texts_of
from secc.ir.dialect.ops import CallOp, graph_of, section_of, strings
from secc.ir.text_io.module_text import parse
from secc.passes.sections.merge_sections import note


@dataclass(frozen=True)
class Staging:
    """The blocks to open, the sections to keep, as `coarsen` takes them ("name=path+path"), and each
    section's stages ("name.pp=2").

    `choices` has for each block the choice that opening it is for ("name.pp"), `known` are all that were
    made, with what was `proven` of them; `notes` says how each section was formed.
    """

    cut: tuple[str, ...]
    sections: tuple[str, ...]
    stages: tuple[str, ...]
    choices: Mapping[str, str]
    known: tuple[str, ...]
    proven: tuple[str, ...]
    notes: Mapping[str, tuple[str, ...]]

    def impossible(self, error: UserError, paths: Collection[str] = ()) -> Impossible:
        """What went wrong with the blocks open, as a reason against the stages that `paths`, or else all of
        them, were opened for."""
        if isinstance(error, Impossible):
            return error
        cut = [path for path in self.cut if path in paths or not paths]
        choices = sorted({self.choices[path] for path in cut})
        message = f"{' and '.join(choices)} cannot be had: with {' and '.join(cut)} cut into layers, {error.message}"
        return Impossible(UserError(message, error.where, "leave pp out for that section"), choices)


def find(module: ModuleOp, meta: nn.Module, dumps: Mapping[str, str]) -> Staging:
    """What to open for the stages of an allocated module. Sections are kept as they are in the dump of
    `coarsen`, before blocks moved."""
    graph = graph_of(module)
    staged = {s.sym.data for s in graph.sections if (number_of(s, "pp") or 1) > 1}
    calls = {
        (section_of(op), op.target.data) for case in graph.cases for op in case.ops if isinstance(op, CallOp)
    }
    tree = Tree(meta)
    cut = tuple(sorted({path for section, path in calls if section in staged and tree.depth(path)}))
    coarse = graph_of(parse(dumps["coarsen"])).sections if cut else ()
    sections = tuple(f"{s.sym.data}={'+'.join(strings(s.blocks))}" for s in coarse if strings(s.blocks))
    stages = tuple(f"{s.sym.data}.pp={number_of(s, 'pp') or 1}" for s in graph.sections)
    notes = {s.sym.data: texts_of(s, "notes") for s in coarse}
    choices = {path: f"{section}.pp" for section, path in calls if path in cut}
    return Staging(cut, sections, stages, choices, known.choices(graph), known.proven(graph), notes)


def tell(staging: Staging, module: ModuleOp) -> bool:
    """Note at the sections of the second capture how they were formed after the first one; whether there was
    anything to note."""
    for section in graph_of(module).sections:
        note(
            section,
            *(n for n in staging.notes.get(section.sym.data, ()) if n not in texts_of(section, "notes")),
        )
    return any(staging.notes.values())


def check(staging: Staging, captured: Capture) -> None:
    """Raise Impossible if blocks that were to be opened had to stay whole, against the stages that they were
    opened for alone."""
    around = {
        path: b for path in staging.cut for b in captured.blocks if path == b or path.startswith(f"{b}.")
    }
    for path, block in around.items():
        note = next((n for n in captured.notes if n.path == block), None)
        reason = f": {block} is {note.reason}" if note else ""
        error = UserError(f"{path} cannot be cut into stages{reason}", note.where if note else "")
        raise staging.impossible(error, around)
