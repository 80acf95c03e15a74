"""Rewrites the modules of a model as a plan would, without a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from secc.codegen.fused_module import plan_rewrites, render_fused_module
from secc.frontend.fusion.declare_rewrites import declare_rewrites
from secc.frontend.fusion.find_fusions import FoundFusions, find_fusions
from secc.ir.dialect.ops import CaseOp, GraphOp, graph_of
from secc.ir.text_io.module_text import parse_module
from secc.runtime.fusion.install import installed_temporarily

GRAPH = 'builtin.module {\n  sec.graph "g" {\n    sec.case "all" when [] {\n      sec.return\n    }\n  }\n}\n'


def declare_fusions(found: FoundFusions) -> GraphOp:
    """Returns a graph that declares the fusions found."""
    graph = graph_of(parse_module(GRAPH))
    assert any(isinstance(op, CaseOp) for op in graph.body.block.ops)
    declare_rewrites(graph, found)
    return graph


def block_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_children()]


@contextmanager
def fuse_model(model: nn.Module) -> Iterator[FoundFusions]:
    """Context manager: `model` computes with fused operators inside."""
    found = find_fusions(model, block_names(model))
    graph = declare_fusions(found)
    with installed_temporarily(model, plan_rewrites(graph), render_fused_module(graph)):
        yield found


def rules_by_class(found: FoundFusions) -> dict[str, set[str]]:
    """Returns the rules applied in each class."""
    rules: dict[str, set[str]] = {}
    for form in found.forms:
        rules.setdefault(form.cls, set()).update(form.rules)
    return rules


def describe_misses(found: FoundFusions) -> str:
    """Returns why rules did not apply, one line each."""
    return "\n".join(f"{m.site} {m.rule}: {m.reason} ({m.where})" for m in found.misses)
