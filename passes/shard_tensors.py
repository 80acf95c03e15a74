"""`shard-tensors`: takes the layouts of a section's blocks for the section's tp, and notes which modules stay
whole.

`secc.frontend.tp_search` has found and verified the layouts; here they are put together. A parameter of
several sections, or that glue reads, stays whole with its module, unless all glue that reads it works on
vocabulary shards (`secc.ir.analysis.vocab_sharding`); tied parameters are split if all of them are split the
same way. A tp is refused if it does not divide the number of heads, if nothing can be split by it, or if most
parameters stay whole that allocation took to be split. A plan for comparison only (`assume`) may have a tp
that was not tested, if the search found it possible for all blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from xdsl.context import Context
from xdsl.dialects.builtin import ArrayAttr, IntegerAttr, ModuleOp
from xdsl.ir import Attribute, SSAValue
from xdsl.passes import ModulePass

from secc.errors import ImpossibleChoice, UserError
from secc.ir.analysis.dataflow import get_number, get_string, get_values
from secc.ir.analysis.tp_layouts import (
    declared_tp,
    dividing_tp,
    feasible_tp,
    make_cut_op,
    shared_sizes,
    undivided_sizes,
)
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
from secc.ir.dialect.typed_attributes import StyleAttr, UnsplitAttr
from secc.runtime.plan.schema import Shard
from secc.runtime.plan.unsplit_reason import TOKEN_MIXING_REMEDY, SharedSize, UnsplitKind, UnsplitReason

MAX_NAMED_SIZES = 4  # that a tp does not divide, in a message
# Why experts are not split among ranks.
WHOLE_EXPERTS = frozenset({"routed", "listed"})  # styles of modules with experts that ranks hold whole
EXPERT_REASONS = frozenset(
    {
        UnsplitKind.UNEVEN_EXPERTS,
        UnsplitKind.UNEVEN_EXPERT_COUNT,
        UnsplitKind.EXPERTS_BY_SEQUENCE,
        UnsplitKind.EXPERTS_INEXACT,
        UnsplitKind.EXPERTS_MIX_TOKENS,
        UnsplitKind.LISTED_EXPERTS_SHARED,
    }
)


@dataclass(frozen=True)
class ShardTensors(ModulePass):
    name = "shard-tensors"
    assume: bool = False

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        graph = graph_of(op)
        for section in graph.sections:
            tp, ep = (int(get_number(section, key) or 1) for key in ("tp", "ep"))
            if tp > 1:
                _shard_section(graph, section, tp, self.assume)
            elif ep > 1 and (_cuts_of_section(graph, section) or not self.assume):
                _shard_experts(graph, section, ep)
        for cut in graph.cuts:
            cut.detach()
            cut.erase()


def _shard_section(graph: GraphOp, section: SectionOp, tp: int, assume: bool) -> None:
    blocks, ep = strings_of(section.blocks), int(get_number(section, "ep") or 1)
    cuts = _cuts_of_section(graph, section)
    name = f"{get_string(section, 'pipeline') or section.sym.data}.tp={tp}"
    if assume and not cuts:
        if tp in feasible_tp(graph, section):
            return
        raise _untested_tp_error(name, tp, shared_sizes(graph, section), feasible_tp(graph, section))
    by_tokens = _token_shardable_matrices(graph, section, tp)
    cuts += _make_head_cuts(graph, cuts, by_tokens, tp)
    whole = name.rpartition(".")[0]
    unsplit = [reason for cut in cuts for reason in cut.whole]
    heads = [reason for reason in unsplit if reason.value.kind is UnsplitKind.UNEVEN_HEADS]
    if heads:
        raise ImpossibleChoice(
            UserError(f"{name} is impossible: {heads[0]}", remedy=_suggest_tp(graph, whole, heads)), [name]
        )
    if ep > 1:
        _require_split_experts(graph, blocks, whole, ep, cuts)
    kept, why = _select_usable_cuts(graph, section, cuts, set(by_tokens))
    split = {shard.parameter.data for cut in kept for shard in cut.shards}
    why += [
        UnsplitAttr.of(parameter, UnsplitReason(UnsplitKind.READ_BY_GLUE))
        for parameter in _matrices_read_by_glue(graph, section)
        if parameter not in split
    ]
    kinds = {style.kind.data for cut in kept for style in cut.styles}
    computes_parts = not kinds.isdisjoint({"colwise", "experts", *WHOLE_EXPERTS})
    uneven = not computes_parts and any(reason.value.is_uneven for reason in unsplit)
    if uneven or not any(cut.styles.data or cut.shards.data for cut in kept):  # a last stage may be a head
        reasons = unsplit + why
        sizes = {reason.value.shared_size: reason for reason in reversed(reasons) if reason.value.is_uneven}
        named = [reason for reason in reasons if reason in sizes.values()][:MAX_NAMED_SIZES]
        cause = "; ".join(map(str, named if uneven else reasons[:1]))
        if not cuts or not cause:
            cause = "this tp was not tested during compilation"
        error = UserError(
            f"{name} is impossible: none of its modules can be split ({cause})",
            remedy=_suggest_tp(graph, whole, reasons),
        )
        raise ImpossibleChoice(error, [name if uneven else f"{whole}.tp"])
    if not assume and (reason := _why_mostly_whole(graph, section, tp, cuts)) is not None:
        error = UserError(
            f"{name} is impossible: most of its parameters would stay whole on every rank ({reason})",
            remedy=_suggest_tp(graph, whole, [reason]),
        )
        raise ImpossibleChoice(error, [f"{whole}.tp"])
    if get_string(section, "norms") == "sequence":
        kept = _use_sequence_shards(name, kept, set(_row_modules(section)), why)
    section.attributes |= {
        "styles": ArrayAttr([style for cut in kept for style in cut.styles]),
        "shards": ArrayAttr([shard for cut in kept for shard in cut.shards]),
        "partial": strings_attr(parameter for cut in kept for parameter in strings_of(cut.partial)),
        "whole": ArrayAttr(
            [*_known_reasons(section), *(reason for cut in kept for reason in cut.whole), *why]
        ),
    }


def _why_mostly_whole(
    graph: GraphOp, section: SectionOp, tp: int, cuts: Sequence[CutOp]
) -> UnsplitAttr | None:
    """Why most of a section's parameters stay whole, although the search without values, by which allocation
    goes, found their blocks divisible; None if they do not. Layers of a block count alike."""
    computing = {"colwise", "experts", *WHOLE_EXPERTS}
    left, first = Fraction(0), list[UnsplitAttr]()
    blocks = [graph.blocks[path] for path in strings_of(section.blocks)]
    for block in blocks:
        if tp not in (declared_tp(graph, block.path.data) or ()):
            continue
        own = [cut for cut in cuts if cut.block.data == block.path.data]
        split = sum(any(style.kind.data in computing for style in cut.styles) for cut in own)
        whole = [cut for cut in own if cut.whole.data and not cut.styles.data and not cut.shards.data]
        left += Fraction(len(whole), split + len(whole)) * block.params.data if split else block.params.data
        first += [reason for cut in whole for reason in cut.whole]
    return next(iter(first), None) if 2 * left > sum(b.params.data for b in blocks) else None


def _cuts_of_section(graph: GraphOp, section: SectionOp) -> list[CutOp]:
    """The layouts of a section's blocks for its tp and ep."""
    blocks = strings_of(section.blocks)
    degrees = tuple(int(get_number(section, key) or 1) for key in ("tp", "ep"))
    own = [
        c
        for c in graph.cuts
        if (c.tp.data, 1 if c.ep is None else c.ep.data) == degrees and c.block.data in blocks
    ]
    # A block may lie in another one (an embedding that is also called by itself), and is cut once.
    return list({c.path.data: c for c in own}.values())


def _shard_experts(graph: GraphOp, section: SectionOp, ep: int) -> None:
    """Takes the layouts of experts of a section with replicas of one rank."""
    name, cuts = get_string(section, "pipeline") or section.sym.data, _cuts_of_section(graph, section)
    _require_split_experts(graph, strings_of(section.blocks), name, ep, cuts)
    kept, why = _select_usable_cuts(graph, section, cuts, set())
    section.attributes |= {
        "styles": ArrayAttr([style for cut in kept for style in cut.styles]),
        "shards": ArrayAttr([shard for cut in kept for shard in cut.shards]),
        "whole": ArrayAttr([*(reason for cut in kept for reason in cut.whole), *why]),
    }


def _require_split_experts(
    graph: GraphOp, blocks: Iterable[str], section: str, ep: int, cuts: list[CutOp]
) -> None:
    """Raises ImpossibleChoice if some experts of a section with these blocks do not form `ep` parts."""
    with_experts = [path for path in blocks if "experts" in graph.blocks[path].attributes]
    split = {c.block.data for c in cuts if any(style.kind.data in WHOLE_EXPERTS for style in c.styles)}
    unsplit = [reason for cut in cuts for reason in cut.whole]
    of_experts = [reason for reason in unsplit if reason.value.kind in EXPERT_REASONS]
    if of_experts or not split.issuperset(with_experts):
        cause = next(iter(of_experts or unsplit), "this ep was not tested during compilation")
        message, remedy = f"{section}.ep={ep} is impossible: {cause}", f"leave {section}.ep out"
        if any(reason.value.kind is UnsplitKind.EXPERTS_MIX_TOKENS for reason in of_experts):
            remedy = TOKEN_MIXING_REMEDY
        raise ImpossibleChoice(UserError(message, remedy=remedy), [f"{section}.ep={ep}"])


def _known_reasons(section: SectionOp) -> Iterable[Attribute]:
    """Why layers stay whole for another reason than tp."""
    known = section.attributes.get("whole")
    return known if isinstance(known, ArrayAttr) else ()


def _untested_tp_error(name: str, tp: int, sizes: Sequence[SharedSize], possible: Sequence[int]) -> UserError:
    """The error for a tp that the search did not test: it does not divide a size that the ranks would share,
    or it might be possible after a new compilation."""
    whole = name.rpartition(".")[0]
    uneven = next((shared for shared in sizes if shared.size % tp), None)
    if uneven is not None:
        message = f"{name} is impossible: {tp} does not divide {uneven}, which its ranks would share"
        return UserError(message, remedy=_format_remedy(whole, possible or dividing_tp(sizes)))
    known = f"; {tp} divides what its ranks would share: {', '.join(map(str, sizes))}" if sizes else ""
    message = f"{name} was not tested for this section during compilation{known}"
    return ImpossibleChoice(
        UserError(message, remedy=_format_remedy(whole, possible)), [name if sizes else f"{whole}.tp"]
    )


def _suggest_tp(graph: GraphOp, whole: str, reasons: Iterable[UnsplitAttr]) -> str:
    """The remedy for a tp that does not divide sizes: the numbers, up to the plan's ranks, that divide all
    of them."""
    ranks = {rank for section in graph.sections for rank in get_values(section, "ranks", IntegerAttr)}
    possible = dividing_tp(undivided_sizes(reason.value for reason in reasons))
    return _format_remedy(whole, [tp for tp in possible if not ranks or tp <= len(ranks)])


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


def _row_modules(section: SectionOp) -> Iterable[str]:
    """The modules that run on rows of a sequence by themselves (`secc.frontend.cp_search`)."""
    found = section.attributes.get("row_modules")
    return strings_of(found) if isinstance(found, ArrayAttr) else ()


def _use_sequence_shards(
    name: str, kept: list[CutOp], row_modules: set[str], why: list[UnsplitAttr]
) -> list[CutOp]:
    """Switch layers to sequence parallelism between their split modules (Korthikanti et al. 2022), where the
    search showed it exact; the others are added to `why`. Raises UserError where no layer was shown exact.

    row_modules: modules that run on rows of a sequence by themselves. Inside of one, nothing shows which
    tensors have a rank's rows and which have its positions, so no product in it can be scattered."""
    layers = [cut for cut in kept if any(style.kind.data == "rowwise" for style in cut.styles)]
    against = {cut: reason for cut in layers if (reason := _why_norms_stay_whole(cut, row_modules))}
    if len(against) == len(layers):
        section = name.partition(".")[0]
        shown = next((r for r in against.values() if r.kind is UnsplitKind.NORMS_WHOLE_ON_ROWS), None)
        cause = shown or "no layer of it was shown exact on parts of the sequence"
        message = f"{section}.norms=sequence is impossible: {cause}"
        error = UserError(message, remedy=f"leave {section}.norms out")
        raise ImpossibleChoice(error, [f"{section}.norms=sequence"])
    for cut in layers:
        if cut in against:
            why.append(UnsplitAttr.of(cut.path.data, against[cut]))
        else:
            cut.properties |= {
                "styles": cut.attributes["positions"],
                "partial": cut.attributes["positions_partial"],
            }
    return kept


def _why_norms_stay_whole(cut: CutOp, row_modules: set[str]) -> UnsplitReason | None:
    """Why a layer with this layout cannot work on parts of the sequence, None if it can."""
    positions = cut.attributes.get("positions")
    if not isinstance(positions, ArrayAttr):
        return UnsplitReason(UnsplitKind.NORMS_WHOLE)
    styles = [style.value for style in positions if isinstance(style, StyleAttr)]
    joins, scatters = ([f"{s.module}." for s in styles if s.kind == kind] for kind in ("join", "scatter"))
    inside = (path for path in row_modules if f"{path}.".startswith(tuple(joins)))
    own = next((path for path in inside if any(s.startswith(f"{path}.") for s in scatters)), None)
    return None if own is None else UnsplitReason(UnsplitKind.NORMS_WHOLE_ON_ROWS, own)


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
    """Those of the matrices in `found` that some op needs whole if they are split by tokens."""
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
    """Layouts of heads and embeddings that glue reads by their weight and that no block's layout contains."""
    known = {shard.parameter.data for cut in cuts for shard in cut.shards}
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
) -> tuple[list[CutOp], list[UnsplitAttr]]:
    """The cuts of parameters that this section has for itself, and the reasons against the others."""
    read = {op.path.data for case in graph.cases for op in case.ops if isinstance(op, ParamOp)}
    read -= {name for name in by_tokens if any(_cuts_tokens(c, name) for c in cuts)}
    elsewhere = [b for s in graph.sections if s is not section for b in strings_of(s.blocks)]
    ties = [strings_of(op.names) for op in graph.body.block.ops if isinstance(op, TieOp)]
    kept, why = cuts, list[UnsplitAttr]()
    # A cut that is left out may be the one that another's tied parameter needs, so look again until none is.
    while True:
        layouts = {
            shard.parameter.data: (shard.dim.data, shard.value.parts) for cut in kept for shard in cut.shards
        }
        wrong = [
            (cut, kind)
            for cut in kept
            if (kind := _find_conflict(cut, layouts, read, elsewhere, ties)) is not None
        ]
        if not wrong:
            return kept, why
        why += [UnsplitAttr.of(cut.path.data, UnsplitReason(kind)) for cut, kind in wrong]
        kept = [cut for cut in kept if not any(cut is other for other, _ in wrong)]


def _find_conflict(
    cut: CutOp,
    layouts: Mapping[str, tuple[int, tuple[int, ...]]],
    read: set[str],
    elsewhere: list[str],
    ties: list[tuple[str, ...]],
) -> UnsplitKind | None:
    """Why the parameters that a cut changes must stay whole, None if they need not.

    `layouts` has the dim and parts of each split parameter, `read` the parameters that glue reads,
    `elsewhere` the blocks of other sections.
    """
    for name in [*(shard.parameter.data for shard in cut.shards), *strings_of(cut.partial)]:
        names = next((tie for tie in ties if name in tie), (name,))
        if any(other in read for other in names):
            return UnsplitKind.PARAMETER_READ_OUTSIDE
        if any(other.startswith(f"{block}.") for other in names for block in elsewhere):
            return UnsplitKind.PARAMETER_SHARED
        if len({layouts.get(other) for other in names}) > 1:
            return UnsplitKind.TIED_TO_OTHER_LAYOUT
    return None


def _cuts_tokens(cut: CutOp, name: str) -> bool:
    """Whether a cut gives each rank a block of rows of a parameter."""
    return any(s.parameter.data == name and s.dim.data == 0 and len(s.parts.data) == 1 for s in cut.shards)
