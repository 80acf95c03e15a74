"""Pipeline stages need layers that are blocks: which of the model's blocks are opened down to their layers, because stages are wanted.

The frontier is chosen coarse first, and sections have their names from that. A section of which stages are wanted (`--set NAME.pp=2`) is
found by name in the coarse capture; its blocks with stacks are then captured again layer by layer, and the section is held together by
the module paths that it had.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from secc import pipeline
from secc.errors import UserError
from secc.frontend.capture import Capture
from secc.frontend.frontier import layers
from secc.ir.dialect import graph_of, strings
from secc.passes.coarsen import Coarsen


@dataclass(frozen=True)
class Staging:
    """The blocks to open, and the sections to keep, as `coarsen` takes them: "name=path+path"."""

    cut: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()


def wanted(choices: Collection[str]) -> list[str]:
    """The sections that `--set NAME.pp=P` wants in several stages; what cannot be read is left to `allocate` to refuse."""
    pins = [(text.partition("=")[0].rpartition("."), text.partition("=")[2]) for text in choices]
    return [name for (name, _, key), value in pins if key == "pp" and value.isdecimal() and int(value) > 1]


def find(module: ModuleOp, meta: nn.Module, passes: Sequence[ModulePass], names: Collection[str]) -> Staging:
    """What to open for stages of the sections `names`. `module` is a coarse capture, on a clone of which `passes` run up to `coarsen`."""
    last = next(i for i, step in enumerate(passes) if isinstance(step, Coarsen))
    coarse = module.clone()
    pipeline.run(coarse, passes[: last + 1])
    blocks = {s.sym.data: strings(s.blocks) for s in graph_of(coarse).sections if s.sym.data in names}
    cut = tuple(path for paths in blocks.values() for path in paths if layers(meta, path))
    return Staging(cut, tuple(f"{name}={'+'.join(paths)}" for name, paths in blocks.items() if paths))


def check(staging: Staging, captured: Capture) -> None:
    """Raise UserError if a block that was to be opened had to stay whole."""
    for path in staging.cut:
        if path in captured.blocks:
            note = next((n for n in captured.notes if n.path == path), None)
            reason = f": {note.reason}" if note else ""
            raise UserError(f"{path} cannot be cut into stages{reason}", note.where if note else "", "leave out pp for its section")
