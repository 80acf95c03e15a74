"""Writes what was found into the IR: a `sec.rewrite` for each form, and why rules did not apply elsewhere."""

from __future__ import annotations

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Attribute

from secc.frontend.fusion.find_fusions import Form, Fusions
from secc.ir.analysis import fusion_report
from secc.ir.dialect.ops import CaseOp, GraphOp, RewriteOp, texts
from secc.runtime.plan.schema import Fusion

ANY = "fuse-blocks"  # in the record, where no rule could be tried


def declare(graph: GraphOp, found: Fusions) -> None:
    """Put the forms before the graph's first case."""
    first = next(op for op in graph.body.block.ops if isinstance(op, CaseOp))
    graph.body.block.insert_ops_before([_rewrite(form) for form in found.forms], first)
    fusion_report.note(graph, [Fusion(m.rule or ANY, m.site, m.where, m.reason) for m in found.misses])


def _rewrite(form: Form) -> RewriteOp:
    properties: dict[str, Attribute] = {
        "sym": StringAttr(form.name),
        "cls": StringAttr(form.cls),
        "method": StringAttr(form.method),
        "rules": texts(form.rules),
        "modules": texts(form.modules),
        "code": texts(f"{line} {text}" for line, text in zip(form.lines, form.code, strict=True)),
    }
    if form.function:
        properties["function"] = StringAttr(form.function)
    if form.where:
        properties["where"] = StringAttr(form.where)
    return RewriteOp.create(properties=properties)
