"""`shard-tensors`: takes the cuts of a section's blocks for the section's tp, and says what stays whole.

`secc.frontend.cuts` has found and shown them; here they are put together. A parameter that glue reads or that several sections have
stays whole, and with it the module that it is in; one under several names is cut if it is cut alike under each of them. A tp that does not
divide heads, or under which nothing could be cut, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import IntegerAttr, ModuleOp
from xdsl.passes import ModulePass

from secc.errors import Impossible, UserError
from secc.ir.dialect import CutOp, GraphOp, ParamOp, SectionOp, TieOp, graph_of, section_of, strings, texts
from secc.ir.types import tensor

HEADS = "heads"  # ends the reason of a tp that does not divide them
UNEVEN = "does not divide"  # is in the reason of any size that tp does not divide


@dataclass(frozen=True)
class ShardTensors(ModulePass):
    name = "shard-tensors"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph = graph_of(op)
        for section in graph.sections:
            tp = section.attributes.get("tp")
            if isinstance(tp, IntegerAttr) and tp.value.data > 1:
                _shard(graph, section, tp.value.data)
        for cut in graph.cuts:
            cut.detach()
            cut.erase()


def _shard(graph: GraphOp, section: SectionOp, tp: int) -> None:
    blocks = strings(section.blocks)
    # A block may lie in another one (an embedding that is also called by itself), and is cut once.
    cuts = list({c.path.data: c for c in graph.cuts if c.tp.data == tp and c.block.data in blocks}.values())
    name = f"{section.sym.data}.tp={tp}"
    heads = next((w for c in cuts for w in strings(c.whole) if w.endswith(HEADS)), None)
    if heads is not None:
        error = UserError(f"{name} is impossible: {heads}", remedy=f"set {section.sym.data}.tp to a number that divides its heads")
        raise Impossible(error, [name])
    kept, why = _usable(graph, section, cuts)
    why += [f"{name}: it is read outside of its module" for name in _read(graph, section)]
    uneven = not any(s.endswith("colwise") for c in kept for s in strings(c.styles)) and any(
        UNEVEN in w for c in cuts for w in strings(c.whole)
    )
    if uneven or not any(strings(c.styles) for c in kept):
        reasons = [w for c in cuts for w in strings(c.whole)] + why
        cause = reasons[0] if cuts and reasons else "nobody looked how its blocks could be cut"
        error = UserError(f"{name} is impossible: none of its modules can be cut ({cause})", remedy=f"leave {section.sym.data}.tp out")
        raise Impossible(error, [name if uneven else f"{section.sym.data}.tp"])
    section.attributes |= {
        "styles": texts(s for c in kept for s in strings(c.styles)),
        "shards": texts(s for c in kept for s in strings(c.shards)),
        "partial": texts(p for c in kept for p in strings(c.partial)),
        "whole": texts([w for c in kept for w in strings(c.whole)] + why),
    }


def _read(graph: GraphOp, section: SectionOp) -> list[str]:
    """The matrices that the section's glue reads."""
    ops = [o.owner for case in graph.cases for op in case.ops if section_of(op) == section.sym.data for o in op.operands]
    return list(dict.fromkeys(o.path.data for o in ops if isinstance(o, ParamOp) and len(tensor(o.result).dims) > 1))


def _usable(graph: GraphOp, section: SectionOp, cuts: list[CutOp]) -> tuple[list[CutOp], list[str]]:
    """The cuts whose parameters this section has for itself, and why others are left out."""
    read = {op.path.data for case in graph.cases for op in case.ops if isinstance(op, ParamOp)}
    elsewhere = [b for s in graph.sections if s is not section for b in strings(s.blocks)]
    ties = [strings(op.names) for op in graph.body.block.ops if isinstance(op, TieOp)]
    kept, why = cuts, list[str]()
    while True:
        how = {name: rest for c in kept for name, rest in map(_parts, strings(c.shards))}
        wrong = [(c, reason) for c in kept if (reason := _conflict(c, how, read, elsewhere, ties))]
        if not wrong:
            return kept, why
        out = [c for c, _ in wrong]
        why += [f"{c.path.data}: {reason}" for c, reason in wrong]
        kept = [c for c in kept if not any(c is o for o in out)]


def _conflict(cut: CutOp, how: dict[str, str], read: set[str], elsewhere: list[str], ties: list[tuple[str, ...]]) -> str:
    """Why the parameters that a cut changes must stay as they are, "" if they need not."""
    for name in [n for n, _ in map(_parts, strings(cut.shards))] + list(strings(cut.partial)):
        names = next((t for t in ties if name in t), (name,))
        if any(n in read for n in names):
            return "a parameter of it is read outside"
        if any(n.startswith(f"{b}.") for n in names for b in elsewhere):
            return "a parameter of it belongs to several sections"
        if len({how.get(n) for n in names}) > 1:
            return "a parameter of it is tied to one that is not cut alike"
    return ""


def _parts(text: str) -> tuple[str, str]:
    """A shard's name, and how it is cut."""
    name, rest = text.split(" ", 1)
    return name, rest
