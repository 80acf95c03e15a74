"""Writes the found fusions into the IR: a `sec.rewrite` for each form, and why rules did not apply
elsewhere."""

from __future__ import annotations

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Attribute

from secc.frontend.fusion.find_fusions import FoundFusions, FusedForm
from secc.ir.analysis import fusion_report
from secc.ir.dialect.ops import CaseOp, GraphOp, RewriteOp, strings_attr
from secc.runtime.plan.schema import FusionRecord

ANY_RULE = "fuse-blocks"  # in the record, where no rule could be tried


def declare_rewrites(graph: GraphOp, found: FoundFusions) -> None:
    """Inserts the forms before the graph's first case, and records the misses."""
    first = next(op for op in graph.body.block.ops if isinstance(op, CaseOp))
    graph.body.block.insert_ops_before([_rewrite_op(form) for form in found.forms], first)
    fusion_report.record_fusions(
        graph, [FusionRecord(m.rule or ANY_RULE, m.site, m.where, m.reason) for m in found.misses]
    )


def _rewrite_op(form: FusedForm) -> RewriteOp:
    properties: dict[str, Attribute] = {
        "sym": StringAttr(form.name),
        "cls": StringAttr(form.cls),
        "method": StringAttr(form.method),
        "rules": strings_attr(form.rules),
        "modules": strings_attr(form.modules),
        "code": strings_attr(f"{line} {text}" for line, text in zip(form.lines, form.code, strict=True)),
    }
    if form.function:
        properties["function"] = StringAttr(form.function)
    if form.where:
        properties["where"] = StringAttr(form.where)
    return RewriteOp.create(properties=properties)
