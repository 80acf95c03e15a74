"""`sec.cut` ops, which say how a module inside a block can be split over the ranks of a replica, and the
numbers of ranks (tp) that a section's blocks allow."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from math import gcd

from xdsl.dialects.builtin import ArrayAttr, IntAttr, IntegerAttr, StringAttr

from secc.ir.dialect.ops import CutOp, GraphOp, SectionOp, strings_attr, strings_of
from secc.ir.dialect.typed_attributes import ShardAttr, StyleAttr, UnsplitAttr
from secc.runtime.plan.schema import ModuleStyle, Shard
from secc.runtime.plan.unsplit_reason import SharedSize, UnsplitReason

STACKED_EXPERT_DIMS = 3  # [experts, ..., ...]
LARGEST_TP = 64  # the largest tp that a remedy names


def make_cut_op(
    path: str,
    block: str,
    tp: int,
    shards: Iterable[Shard],
    styles: Iterable[ModuleStyle] = (),
    partial: Iterable[str] = (),
    unsplit: Mapping[str, UnsplitReason] | None = None,
    ep: int = 1,
) -> CutOp:
    """A `sec.cut` of the module at `path` over `tp` ranks, with experts in `ep` parts.

    `block` is "" where glue alone reads the module's parameters. `partial` names whole parameters with
    gradients that are summed over ranks, because each rank computes an addend; `unsplit` has the modules
    inside that stay whole, by path.
    """
    return CutOp.create(
        properties={
            "path": StringAttr(path),
            "block": StringAttr(block),
            "tp": IntAttr(tp),
            "styles": ArrayAttr([StyleAttr.of(style) for style in styles]),
            "shards": ArrayAttr([ShardAttr.of(shard) for shard in shards]),
            "partial": strings_attr(partial),
            "whole": ArrayAttr(
                [UnsplitAttr.of(module, reason) for module, reason in (unsplit or {}).items()]
            ),
        }
        | ({"ep": IntAttr(ep)} if ep > 1 else {})
    )


def declared_tp(graph: GraphOp, block: str) -> frozenset[int] | None:
    """The tp above 1 that the search found possible for a block; None if it has nothing to split."""
    values = graph.blocks[block].attributes.get("tp")
    if not isinstance(values, ArrayAttr):
        return None
    return frozenset(int(tp.value.data) for tp in values if isinstance(tp, IntegerAttr))


def feasible_tp(graph: GraphOp, section: SectionOp) -> list[int]:
    """The tp above 1 that the search found possible for all blocks of a section; blocks with nothing to split
    do not count."""
    declared = (declared_tp(graph, block) for block in strings_of(section.blocks))
    by_block = [degrees for degrees in declared if degrees is not None]
    return sorted(frozenset.intersection(*by_block)) if by_block else []


def expert_counts(graph: GraphOp, section: SectionOp) -> list[int]:
    """The numbers of experts of a section's mixtures; [] for a section without experts."""
    noted = [graph.blocks[path].attributes.get("experts") for path in strings_of(section.blocks)]
    counts = (n for values in noted if isinstance(values, ArrayAttr) for n in values)
    return sorted({int(n.value.data) for n in counts if isinstance(n, IntegerAttr)})


def assume_expert_shards(
    graph: GraphOp, section: SectionOp, parameters: Mapping[str, str], tp: int, replicas: int
) -> list[Shard]:
    """The parameters of a section's experts as `replicas` replicas of `tp` ranks would divide them, for a
    plan that is only compared: no search has shown this division exact.

    parameters: name -> what it is, such as `float32[8, 64, 64] train`. Experts are stacked in the parameters
    of a module, some of three dims, or are modules in a list, which lie whole on one rank each.
    """
    counts, blocks = set(expert_counts(graph, section)), strings_of(section.blocks)
    names = {n: block for block in blocks for n in parameters if n.startswith(f"{block}.")} if counts else {}
    sizes = {name: _sizes_of_parameter(parameters[name]) for name in names}
    of_experts = {name: dims for name, dims in sizes.items() if dims and dims[0] in counts}
    stacks = {n.rpartition(".")[0] for n, dims in of_experts.items() if len(dims) == STACKED_EXPERT_DIMS}
    if stacks:
        stacked = (name for name in of_experts if name.rpartition(".")[0] in stacks)
        return [Shard(name, 0, sizes[name][:1], replicas=replicas) for name in stacked]
    lists = _find_whole_lists(names, counts)
    holders = {name: k * tp * replicas // len(members) for members in lists for k, name in enumerate(members)}
    return [Shard(n, 0, sizes[n][:1], replicas=replicas, holder=rank) for n, rank in holders.items()]


def _find_whole_lists(names: Mapping[str, str], counts: Container[int]) -> list[list[str]]:
    """The parameters of each list of experts in a block, by their place among the members; `names`: parameter
    -> its block. Of lists of the same length, those with "expert" in their name count."""
    members_of: dict[tuple[str, str], dict[int, str]] = {}  # by name before and after the member's number
    for name, block in names.items():
        for found in re.finditer(r"(?<=\.)\d+(?=\.)", name[len(block) :]):
            start, end = (len(block) + at for at in found.span())
            members_of.setdefault((name[:start], name[end:]), {})[int(found[0])] = name
    whole = {
        key: [members[k] for k in sorted(members)]
        for key, members in members_of.items()
        if len(members) in counts and sorted(members) == list(range(len(members)))
    }
    named = [members for (before, _), members in whole.items() if "expert" in before.split(".")[-2].lower()]
    return named or list(whole.values())


def _sizes_of_parameter(what: str) -> tuple[int, ...]:
    found = re.fullmatch(r"\w+\[([\d, ]*)\].*", what)
    return tuple(int(n) for n in found[1].split(",") if n.strip()) if found else ()


def shared_sizes(graph: GraphOp, section: SectionOp) -> list[SharedSize]:
    """The sizes that the ranks of a replica would share evenly, as far as they are known."""
    noted = [graph.blocks[path].attributes.get("shared") for path in strings_of(section.blocks)]
    sizes = (size.value for values in noted if isinstance(values, ArrayAttr) for size in values)
    return list(dict.fromkeys(sizes))


def undivided_sizes(reasons: Iterable[UnsplitReason]) -> list[SharedSize]:
    """The sizes that a tp does not divide, by the reasons why modules stay whole."""
    sizes = (reason.shared_size for reason in reasons)
    return list(dict.fromkeys(size for size in sizes if size is not None))


def dividing_tp(sizes: Iterable[SharedSize]) -> list[int]:
    """The tp above 1, up to `LARGEST_TP`, that divide all of these sizes; [] where no size is known."""
    common = gcd(*(shared.size for shared in sizes))
    return [tp for tp in range(2, LARGEST_TP + 1) if common and common % tp == 0]
