"""Rewrites the modules of a model as a plan would, without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from secc.codegen.fused_module import fused_module, rewrites
from secc.frontend.fusion.declare_rewrites import declare
from secc.frontend.fusion.find_fusions import Fusions, find
from secc.ir.dialect.ops import CaseOp, GraphOp, graph_of
from secc.ir.text_io.module_text import parse
from secc.runtime.fusion.install import installed

GRAPH = 'builtin.module {\n  sec.graph "g" {\n    sec.case "all" when [] {\n      sec.return\n    }\n  }\n}\n'


def declared(found: Fusions) -> GraphOp:
    """A graph that declares what was found."""
    graph = graph_of(parse(GRAPH))
    assert any(isinstance(op, CaseOp) for op in graph.body.block.ops)
    declare(graph, found)
    return graph


def blocks(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_children()]


@contextmanager
def fused(model: nn.Module) -> Iterator[Fusions]:
    """`model` with fused operators inside."""
    found = find(model, blocks(model))
    graph = declared(found)
    with installed(model, rewrites(graph), fused_module(graph)):
        yield found


def matched(found: Fusions) -> dict[str, set[str]]:
    """The rules applied in each class."""
    rules: dict[str, set[str]] = {}
    for form in found.forms:
        rules.setdefault(form.cls, set()).update(form.rules)
    return rules


def reasons(found: Fusions) -> str:
    """Why rules did not apply, one line each."""
    return "\n".join(f"{m.site} {m.rule}: {m.reason} ({m.where})" for m in found.misses)
