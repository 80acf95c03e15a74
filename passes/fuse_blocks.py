"""`fuse-blocks`: norms, gated activations and rotary embeddings inside the user's modules become fused
operators.

`secc.frontend.fusion`, which has the user's modules, finds what may be rewritten and shows it equal: each
`sec.rewrite` is a candidate with the rules that it applies. This pass decides which of them a plan takes:
those with rules that are on and, unless told otherwise, only where the devices run Triton, since on a CPU the
operators are the ops that they replace. Calls with all modules rewritten get the costs that were measured so.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from secc.cost.counting.fused_costs import blocks_broken_by_fusion, choose_call_costs, is_in_block
from secc.ir.analysis import fusion_report
from secc.ir.dialect.ops import GraphOp, RewriteOp, graph_of, strings_of
from secc.passes.fusion.fuse_when import reason_not_to_fuse
from secc.runtime.plan.schema import FusionRecord


@dataclass(frozen=True)
class FuseBlocks(ModulePass):
    """Options. without: rules that are off. when: auto (where `cluster`, as `secc.cluster.parse_cluster`
    reads it, runs Triton), always or never."""

    name = "fuse-blocks"
    without: tuple[str, ...] = ()
    when: str = "auto"
    cluster: str = "local"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        fusion_report.check_rule_names(self.without)
        graph = graph_of(op)
        why = reason_not_to_fuse(self.when, self.cluster)
        if why:
            fusion_report.record_fusions(graph, [FusionRecord("fuse-blocks", "all modules", "", why)])
        kept, dropped = set[str](), set[str]()
        faulty = blocks_broken_by_fusion(graph)
        for rewrite in graph.rewrites:
            off = [r for r in strings_of(rewrite.rules) if r in self.without]
            reason = why or (
                f"the rule {off[0]} is off"
                if off
                else _failing_block_reason(strings_of(rewrite.modules), faulty)
            )
            (dropped if reason else kept).update(strings_of(rewrite.modules))
            _record_rewrite(graph, rewrite, reason)
            if reason:
                rewrite.detach()
                rewrite.erase()
        choose_call_costs(graph, kept, dropped)


def _failing_block_reason(modules: tuple[str, ...], faulty: set[str]) -> str:
    block = next((b for b in sorted(faulty) if any(is_in_block(m, b) for m in modules)), None)
    return f"{block} cannot be run with it" if block is not None else ""


def _record_rewrite(graph: GraphOp, rewrite: RewriteOp, reason: str) -> None:
    paths = strings_of(rewrite.modules)
    what = f"{rewrite.function.data} in " if rewrite.function else ""
    what += f"{rewrite.cls.data}: {paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    place = rewrite.where.data if rewrite.where else ""
    fusion_report.record_fusions(
        graph, [FusionRecord(rule, what, place, reason) for rule in dict.fromkeys(strings_of(rewrite.rules))]
    )
