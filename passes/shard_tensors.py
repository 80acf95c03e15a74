"""`shard-tensors`: takes the cuts of a section's blocks for the section's tp, and says what stays whole.

`secc.frontend.tp_search` has found and shown them; here they are put together. A parameter that several
sections have or that glue reads stays whole, and with it the module that it is in, unless all glue that reads
it can do with some of its tokens each (`secc.ir.analysis.vocab_sharding`); one under several names is cut if
it is cut alike under each of them. A tp that does not divide heads, or under which nothing could be cut, is
refused. A plan that is only compared (`assume`) may have a tp under which nobody has cut the blocks yet, if
they were found to take it; of another one it is told whether it divides what ranks would share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import IntegerAttr, ModuleOp
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass

from secc.errors import ImpossibleChoice, UserError
from secc.ir.analysis.dataflow import get_string, get_strings
from secc.ir.analysis.tp_layouts import dividing_tp, feasible_tp, make_cut_op, shared_sizes, undivided_sizes
from secc.ir.analysis.vocab_sharding import VocabPart, VocabSpread, is_wide
from secc.ir.dialect.ops import (
    CaseOp,
    CutOp,
    GraphOp,
    ParamOp,
    SectionOp,
    TieOp,
    graph_of,
    section_of,
    strings_attr,
    strings_of,
)
from secc.ir.dialect.tensor_type import tensor_type
from secc.runtime.plan.schema import Shard

HEADS = "heads"  # ends the reason of a tp that does not divide them
UNEVEN = "does not divide"  # is in the reason of any size that tp does not divide


@dataclass(frozen=True)
class ShardTensors(ModulePass):
    name = "shard-tensors"
    assume: bool = False

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph = graph_of(op)
        for section in graph.sections:
            tp = section.attributes.get("tp")
            if isinstance(tp, IntegerAttr) and tp.value.data > 1:
                _shard_section(graph, section, tp.value.data, self.assume)
        for cut in graph.cuts:
            cut.detach()
            cut.erase()


def _shard_section(graph: GraphOp, section: SectionOp, tp: int, assume: bool) -> None:
    blocks = strings_of(section.blocks)
    # A block may lie in another one (an embedding that is also called by itself), and is cut once.
    cuts = list({c.path.data: c for c in graph.cuts if c.tp.data == tp and c.block.data in blocks}.values())
    name = f"{get_string(section, 'pipeline') or section.sym.data}.tp={tp}"
    if assume and not cuts:
        if tp in feasible_tp(graph, section):
            return
        raise _untested_tp_error(name, tp, shared_sizes(graph, section), feasible_tp(graph, section))
    by_tokens = _token_shardable_matrices(graph, section, tp)
    cuts += _make_head_cuts(graph, cuts, by_tokens, tp)
    whole = name.rpartition(".")[0]
    heads = [w for c in cuts for w in strings_of(c.whole) if w.endswith(HEADS)]
    if heads:
        raise ImpossibleChoice(
            UserError(f"{name} is impossible: {heads[0]}", remedy=_suggest_tp(whole, heads)), [name]
        )
    kept, why = _select_usable_cuts(graph, section, cuts, set(by_tokens))
    cut = {name for c in kept for name, _ in map(_split_shard, strings_of(c.shards))}
    why += [
        f"{name}: it is read outside of its module"
        for name in _matrices_read_by_glue(graph, section)
        if name not in cut
    ]
    uneven = not any(s.endswith(("colwise", "experts")) for c in kept for s in strings_of(c.styles)) and any(
        UNEVEN in w for c in cuts for w in strings_of(c.whole)
    )
    if uneven or not any(strings_of(c.styles) for c in kept):
        reasons = [w for c in cuts for w in strings_of(c.whole)] + why
        cause = reasons[0] if cuts and reasons else "nobody looked how its blocks could be cut"
        error = UserError(
            f"{name} is impossible: none of its modules can be cut ({cause})",
            remedy=_suggest_tp(whole, reasons),
        )
        raise ImpossibleChoice(error, [name if uneven else f"{whole}.tp"])
    if get_string(section, "norms") == "sequence":
        kept = _use_sequence_shards(name, kept, why)
    section.attributes |= {
        "styles": strings_attr(s for c in kept for s in strings_of(c.styles)),
        "shards": strings_attr(s for c in kept for s in strings_of(c.shards)),
        "partial": strings_attr(p for c in kept for p in strings_of(c.partial)),
        "whole": strings_attr([w for c in kept for w in strings_of(c.whole)] + why),
    }


def _untested_tp_error(name: str, tp: int, sizes: Sequence[str], possible: Sequence[int]) -> UserError:
    """Why a tp is refused that nobody looked at: it does not divide what ranks would share, or that is all
    that is known."""
    whole = name.rpartition(".")[0]
    uneven = next((size for size in sizes if int(size.split()[0]) % tp), None)
    if uneven is not None:
        message = f"{name} is impossible: {tp} does not divide {uneven}, which its ranks would share"
        return UserError(message, remedy=_format_remedy(whole, possible or dividing_tp(sizes)))
    known = f"; {tp} divides what its ranks would share: {', '.join(sizes)}" if sizes else ""
    message = f"{name} is not known to be possible: nobody looked how its blocks could be cut{known}"
    return ImpossibleChoice(
        UserError(message, remedy=_format_remedy(whole, possible)), [name if sizes else f"{whole}.tp"]
    )


def _suggest_tp(whole: str, reasons: Iterable[str]) -> str:
    """What to set in place of a tp that does not divide sizes in the reasons."""
    return _format_remedy(whole, dividing_tp(undivided_sizes(reasons)))


def _format_remedy(whole: str, possible: Sequence[int]) -> str:
    return f"set {whole}.tp to {' or '.join(map(str, possible))}" if possible else f"leave {whole}.tp out"


def _matrices_read_by_glue(graph: GraphOp, section: SectionOp) -> list[str]:
    """The matrices that the section's glue reads."""
    ops = [
        o.owner
        for case in graph.cases
        for op in case.ops
        if section_of(op) == section.sym.data
        for o in op.operands
    ]
    return list(
        dict.fromkeys(
            o.path.data for o in ops if isinstance(o, ParamOp) and len(tensor_type(o.result).dims) > 1
        )
    )


def _use_sequence_shards(name: str, kept: list[CutOp], why: list[str]) -> list[CutOp]:
    """The cuts with the sequence in parts between what is cut, where that was shown exact. Raises UserError
    where it nowhere was."""
    layers = [c for c in kept if any(s.endswith("rowwise") for s in strings_of(c.styles))]
    if not any("positions" in c.attributes for c in layers):
        section = name.partition(".")[0]
        message = (
            f"{section}.norms=sequence is impossible: no layer of it was shown exact on parts of the sequence"
        )
        raise UserError(message, remedy=f"leave {section}.norms out")
    for cut in layers:
        if "positions" in cut.attributes:
            cut.properties |= {
                "styles": strings_attr(get_strings(cut, "positions")),
                "partial": strings_attr(get_strings(cut, "positions_partial")),
            }
        else:
            why.append(
                f"{cut.path.data}: its norms have the whole sequence, its code does not work on positions"
            )
    return kept


def _token_shardable_matrices(graph: GraphOp, section: SectionOp, tp: int) -> dict[str, tuple[int, int]]:
    """The matrices that glue of this section alone reads and that may be cut by tokens for all of it, with
    their sizes."""
    name, found = section.sym.data, dict[str, tuple[int, int]]()
    for case in graph.cases:
        params = {
            op.result: op
            for op in case.ops
            if isinstance(op, ParamOp) and len(tensor_type(op.result).dims) == 2
        }
        found |= {
            op.path.data: (int(tensor_type(v).shape[0]), int(tensor_type(v).shape[1]))
            for v, op in params.items()
        }
    found = {path: sizes for path, sizes in found.items() if sizes[0] >= tp}
    while True:
        bad = {path for case in graph.cases for path in _needed_whole(case, name, found)}
        if not bad:
            return found
        found = {path: sizes for path, sizes in found.items() if path not in bad}


def _needed_whole(case: CaseOp, section: str, found: Mapping[str, tuple[int, int]]) -> set[str]:
    """Those of some matrices that an op needs whole, cut by tokens as they are."""
    # What is a matrix still: parameters, then views and casts of them.
    made: dict[SSAValue, str] = {
        op.result: op.path.data for op in case.ops if isinstance(op, ParamOp) and op.path.data in found
    }
    spread = VocabSpread(
        [op for op in case.ops if section_of(op) == section],
        {v: VocabPart(0, found[path][0]) for v, path in made.items()},
    )
    for op in spread.steps:
        if all(o in made for o in op.operands):
            made |= {r: made[op.operands[0]] for r in op.results}
    return {made[v] for v in made if any(use.operation not in spread.steps for use in v.uses)}


def _make_head_cuts(
    graph: GraphOp, cuts: list[CutOp], by_tokens: Mapping[str, tuple[int, int]], tp: int
) -> list[CutOp]:
    """Cuts for heads and embeddings of which glue reads the weight and that no block's cut has."""
    known = {name for c in cuts for name, _ in map(_split_shard, strings_of(c.shards))}
    tied = {n for op in graph.body.block.ops if isinstance(op, TieOp) for n in strings_of(op.names)}
    found = {
        path: sizes
        for path, sizes in by_tokens.items()
        if path not in known and (path in tied or is_wide(*sizes))
    }
    return [
        make_cut_op(path.rpartition(".")[0], "", tp, [Shard(path, 0, (tokens,))])
        for path, (tokens, _) in found.items()
    ]


def _select_usable_cuts(
    graph: GraphOp, section: SectionOp, cuts: list[CutOp], by_tokens: set[str]
) -> tuple[list[CutOp], list[str]]:
    """The cuts whose parameters this section has for itself, and why others are left out."""
    read = {op.path.data for case in graph.cases for op in case.ops if isinstance(op, ParamOp)}
    read -= {name for name in by_tokens if any(_cuts_tokens(c, name) for c in cuts)}
    elsewhere = [b for s in graph.sections if s is not section for b in strings_of(s.blocks)]
    ties = [strings_of(op.names) for op in graph.body.block.ops if isinstance(op, TieOp)]
    kept, why = cuts, list[str]()
    while True:
        how = {name: rest for c in kept for name, rest in map(_split_shard, strings_of(c.shards))}
        wrong = [(c, reason) for c in kept if (reason := _find_conflict(c, how, read, elsewhere, ties))]
        if not wrong:
            return kept, why
        out = [c for c, _ in wrong]
        why += [f"{c.path.data}: {reason}" for c, reason in wrong]
        kept = [c for c in kept if not any(c is o for o in out)]


def _find_conflict(
    cut: CutOp, how: dict[str, str], read: set[str], elsewhere: list[str], ties: list[tuple[str, ...]]
) -> str:
    """Why the parameters that a cut changes must stay as they are, "" if they need not."""
    for name in [n for n, _ in map(_split_shard, strings_of(cut.shards))] + list(strings_of(cut.partial)):
        names = next((t for t in ties if name in t), (name,))
        if any(n in read for n in names):
            return "a parameter of it is read outside"
        if any(n.startswith(f"{b}.") for n in names for b in elsewhere):
            return "a parameter of it belongs to several sections"
        if len({how.get(n) for n in names}) > 1:
            return "a parameter of it is tied to one that is not cut alike"
    return ""


def _cuts_tokens(cut: CutOp, name: str) -> bool:
    """Whether a cut leaves each rank some rows of a parameter."""
    return any(
        n == name and how.startswith("0 ") and "," not in how
        for n, how in map(_split_shard, strings_of(cut.shards))
    )


def _split_shard(text: str) -> tuple[str, str]:
    """A shard's name, and how it is cut."""
    name, rest = text.split(" ", 1)
    return name, rest
