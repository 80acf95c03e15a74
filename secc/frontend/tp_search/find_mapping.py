"""Finds which linear layers of a module are column parallel and which row parallel, by running its code on
the parts of one rank.

At first every linear layer with whole inputs is column parallel (split by outputs). The code after it sees
marked parts (`secc.runtime.tensor_parallel`). A linear layer that gets parts of its inputs is row parallel
(split by inputs), which makes the activation whole again. If the code refuses parts, either the outputs
are split at a further boundary (queries, keys and values of one fused layer), or the layers that the parts
came from stay whole, and the code runs again. So attention is split by heads and a feed-forward layer by
its inner width without being told, and whatever stays whole has a reason. The resulting layouts are those
of Megatron-LM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from secc.runtime.model.module_copies import copy_module
from secc.runtime.plan.schema import ModuleStyle, Shard
from secc.runtime.plan.unsplit_reason import SharedSize, UnsplitKind, UnsplitReason
from secc.runtime.tensor_parallel.linear_modules import LinearModule, as_linear
from secc.runtime.tensor_parallel.rules.mark import (
    ShardMark,
    UnshardableCode,
    collect_marks,
    mark_of,
    set_mark,
    sources_of,
)
from secc.runtime.tensor_parallel.shape_mode import WholeShapeMode
from secc.runtime.training.widened_floats import widened_floats

PartSizes = tuple[int, ...]
ModuleCall = tuple[tuple[Any, ...], dict[str, Any]]  # what a module is called with


@dataclass(frozen=True)
class ExpertCut:
    """How the parameters of experts, stacked along dim 0, are cut.

    inner: of each parameter that is cut by the inner width of experts, the dim, and how many parts lie side
    by side along it. ep: the number of parts that experts form in a replica; with more than one, every
    parameter is cut along dim 0, and the ranks that share a part cut it by `inner`. summands: biases of the
    results `[experts, width]`; ranks that share a part each add some entries of them. replicas: the number of
    replicas that have different experts. arguments: names of the forward's hidden states, indices of experts
    and weights, where experts are whole. listed: the name of the list, where experts are modules in one.
    """

    inner: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    ep: int = 1
    summands: tuple[str, ...] = ()
    replicas: int = 1
    arguments: tuple[str, ...] = ()
    listed: str = ""

    @property
    def keeps_experts_whole(self) -> bool:
        """Whether ranks have different experts."""
        return self.ep * self.replicas > 1


@dataclass(frozen=True)
class TpMapping:
    """How a module is split: sizes of the adjacent parts of column- and row-parallel layers, and why other
    linear layers stay whole.

    scopes: the smallest modules inside which everything split stays. draws_random: whether the code draws
    random numbers for parts. expert_cuts: how stacked experts are cut (`expert_cuts`). head_counts:
    numbers of heads that ranks share.
    """

    column_parallel: Mapping[str, PartSizes]
    row_parallel: Mapping[str, PartSizes]
    unsplit_reasons: Mapping[str, UnsplitReason]
    scopes: tuple[str, ...] = ()  # the smallest modules inside which everything that is in parts stays
    draws_random: bool = False  # whether its code draws random numbers for parts
    expert_cuts: Mapping[str, ExpertCut] = field(default_factory=dict[str, ExpertCut])
    head_counts: frozenset[int] = frozenset()

    @property
    def shared_sizes(self) -> list[SharedSize]:
        """Returns what ranks share evenly, as text."""
        outputs = {part for parts in self.column_parallel.values() for part in parts}
        return [SharedSize(n, "heads") for n in sorted(self.head_counts)] + [
            SharedSize(n, "outputs") for n in sorted(outputs)
        ]

    @property
    def split_modules(self) -> tuple[str, ...]:
        """Returns the paths of all split modules."""
        return (*self.column_parallel, *self.row_parallel, *self.expert_cuts)

    def layer_styles(self, shapes: bool) -> list[ModuleStyle]:
        """Returns how split modules work on their parts; with `shapes`, their code sees whole sizes."""
        around = [ModuleStyle(p, "shapes") for p in self.scopes if shapes]
        linears = [ModuleStyle(p, "colwise") for p in self.column_parallel] + [
            ModuleStyle(p, "rowwise") for p in self.row_parallel
        ]
        return around + linears + [expert_style(way, p) for p, way in self.expert_cuts.items()]

    def sequence_styles(self, shapes: bool) -> list[ModuleStyle]:
        """Returns the styles with the sequence split between the scopes (Megatron-LM's sequence
        parallelism); [] if the module itself is the scope, or experts are cut."""
        if not self.scopes or "" in self.scopes or self.expert_cuts:
            return []
        around = [
            ModuleStyle(p, kind)
            for p in self.scopes
            for kind in (("shapes", "join") if shapes else ("join",))
        ]
        inside = [ModuleStyle(p, "columns") for p in self.column_parallel] + [
            ModuleStyle(p, "scatter") for p in self.row_parallel
        ]
        return [ModuleStyle("", "sequence"), *around, *inside]


@dataclass
class _MappingSearch:
    """State of the search: layers that are column parallel for now, and why others are not."""

    column_parallel: dict[str, PartSizes]
    unsplit_reasons: dict[str, UnsplitReason] = field(default_factory=dict[str, UnsplitReason])
    row_parallel: dict[str, tuple[PartSizes, frozenset[str]]] = field(
        default_factory=dict[str, tuple[PartSizes, frozenset[str]]]
    )
    reached_linears: set[str] = field(default_factory=set[str])
    draws_random: bool = False
    head_counts: frozenset[int] = frozenset()
    hints: dict[str, UnsplitReason] = field(  # why outputs were cut at more places
        default_factory=dict[str, UnsplitReason]
    )

    def keep_whole(self, paths: Iterable[str], reason: UnsplitReason) -> None:
        for path in paths:
            if self.column_parallel.pop(path, None) is not None:
                self.unsplit_reasons[path] = reason


def find_mapping(
    module: nn.Module,
    call: ModuleCall,
    count: int,
    preferred: Iterable[str] | None = None,
    expert_cuts: Mapping[str, ExpertCut] | None = None,
) -> TpMapping:
    """Returns a mapping of `module` over `count` ranks.

    preferred: the only layers that may be column parallel, if the model's authors say so; None for all.
    expert_cuts: experts that are cut for themselves; those in lists stay as they are.
    """
    search, linears = _search_mapping(module, call, count, preferred, expert_cuts)
    _blame_heads(module, call, search, preferred, expert_cuts)
    rows = {p: parts for p, (parts, _) in search.row_parallel.items()} if search.column_parallel else {}
    whole = {
        p: search.unsplit_reasons.get(p, UnsplitReason(UnsplitKind.WHOLE_ACTIVATIONS))
        for p in linears
        if p not in search.column_parallel and p not in rows
    }
    scopes = _outermost_paths(_common_parent([path, *search.row_parallel[path][1]]) for path in rows)
    return TpMapping(
        search.column_parallel,
        rows,
        whole,
        scopes,
        search.draws_random,
        expert_cuts or {},
        search.head_counts,
    )


def _blame_heads(
    module: nn.Module,
    call: ModuleCall,
    search: _MappingSearch,
    preferred: Iterable[str] | None,
    expert_cuts: Mapping[str, ExpertCut] | None,
) -> None:
    """For layers that stay whole and that as many ranks as heads would split, records as the reason that
    `tp` does not divide the number of heads."""
    whole = {p: hint for p, hint in search.hints.items() if p in search.unsplit_reasons and hint.size > 1}
    for heads in {hint.size for hint in whole.values()}:
        taken = _search_mapping(module, call, heads, preferred, expert_cuts)[0].column_parallel
        search.unsplit_reasons |= {p: hint for p, hint in whole.items() if hint.size == heads and p in taken}


def _search_mapping(
    module: nn.Module,
    call: ModuleCall,
    count: int,
    preferred: Iterable[str] | None,
    expert_cuts: Mapping[str, ExpertCut] | None,
) -> tuple[_MappingSearch, Mapping[str, LinearModule]]:
    """Returns a search that is done, and the linear layers that it was about."""
    lists = tuple(f"{_join_path(p, way.listed)}." for p, way in (expert_cuts or {}).items() if way.listed)
    linears = {
        path: cut
        for path, m in module.named_modules()
        if (cut := as_linear(m)) is not None and not path.startswith(lists)
    }
    may_be_column_parallel = set(linears if preferred is None else preferred)
    search = _MappingSearch(
        {path: (m.out_features,) for path, m in linears.items() if path in may_be_column_parallel}
    )
    for path, (outputs,) in list(search.column_parallel.items()):
        if outputs % count:
            search.keep_whole([path], UnsplitReason(UnsplitKind.UNEVEN_OUTPUTS, size=outputs, tp=count))
    while search.column_parallel:
        search.row_parallel, search.reached_linears = {}, set()
        if _try_mapping(module, call, count, search, linears):
            break
    useful = sources_of([ShardMark(0, parts, sources) for parts, sources in search.row_parallel.values()])
    search.keep_whole(
        [p for p in search.column_parallel if p not in useful], UnsplitReason(UnsplitKind.OUTPUTS_UNUSED)
    )
    return search, linears


def _common_parent(paths: Iterable[str]) -> str:
    """Returns the path of the module that holds all of these."""
    names = zip(*(p.split(".")[:-1] for p in paths), strict=False)
    return ".".join(some[0] for some in takewhile(lambda some: len(set(some)) == 1, names))


def _outermost_paths(paths: Iterable[str]) -> tuple[str, ...]:
    """Returns the paths that lie inside no other path."""
    outermost: list[str] = []
    for path in sorted(set(paths), key=len):
        if not any(k == "" or f"{path}.".startswith(f"{k}.") for k in outermost):
            outermost.append(path)
    return tuple(outermost)


def _try_mapping(
    module: nn.Module, call: ModuleCall, count: int, search: _MappingSearch, found: Mapping[str, LinearModule]
) -> bool:
    """Runs the module's code once; returns whether it went through. If not, the search has changed."""
    trial = copy_module(module)
    for path in found:
        inner = trial.get_submodule(path)
        inner.forward = _partial_forward(path, inner, count, search)
    try:
        args, kwargs = tree_map(_fresh_argument, call)
        with torch.enable_grad(), widened_floats(trial, torch.float32), WholeShapeMode(0, count) as mode:
            out = trial(*args, **kwargs)
        search.draws_random, search.head_counts = mode.drew_random_numbers, frozenset(mode.head_counts)
        if leaked := collect_marks(out):
            raise UnshardableCode(UnsplitReason(UnsplitKind.LEAVES_IN_PARTS), sources_of(leaked))
        return True
    except UnshardableCode as refused:
        _adjust_search(search, refused, found)
    except Exception as error:  # whatever the user's code does with sizes it did not expect
        search.keep_whole(
            search.reached_linears & search.column_parallel.keys() or list(search.column_parallel),
            failure_reason(error),
        )
    return False


def failure_reason(error: Exception) -> UnsplitReason:
    """The reason against splitting code that raised `error` on split tensors: the first line of its
    message."""
    lines = str(error).splitlines()
    return UnsplitReason(UnsplitKind.FAILS_ON_PARTS, lines[0] if lines else type(error).__name__)


def _fresh_argument(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _partial_forward(path: str, module: nn.Module, count: int, search: _MappingSearch) -> Callable[..., Any]:
    """Returns the forward of a linear layer during the search."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(x: torch.Tensor) -> torch.Tensor:
        known = as_linear(module)
        assert known is not None
        found, mode = mark_of(x), WholeShapeMode(0, count)
        search.reached_linears.add(path)
        if found is not None and found.dim == torch.Tensor.dim(x) - 1:
            search.row_parallel[path] = found.parts, found.sources
            return _partial_product(x, known, mode, 1 - known.out_dim, found.parts)
        if found is not None or path not in search.column_parallel:
            return inner(x)
        parts = search.column_parallel[path]
        out = _partial_product(x, known, mode, known.out_dim, parts)
        return set_mark(out, ShardMark(out.ndim - 1, parts, frozenset({path})))

    return forward


def _partial_product(
    x: torch.Tensor, known: LinearModule, mode: WholeShapeMode, dim: int, parts: PartSizes
) -> torch.Tensor:
    weight = mode.take_shard(known.weight, dim, parts)
    return torch.nn.functional.linear(x, weight if known.out_dim == 0 else weight.t())


def _adjust_search(
    search: _MappingSearch, refused: UnshardableCode, found: Mapping[str, LinearModule]
) -> None:
    """Splits the outputs of the one layer that the parts came from at further boundaries, or keeps the
    layers whole that they came from."""
    sources = refused.sources & search.column_parallel.keys()
    if refused.split_points and len(sources) == 1:
        path = next(iter(sources))
        parts = search.column_parallel[path]
        edges = {sum(parts[:i]) for i in range(len(parts) + 1)}
        wanted = {place * found[path].out_features // size for place, size in refused.split_points}
        if not wanted <= edges:
            search.column_parallel[path] = tuple(b - a for a, b in pairwise(sorted(edges | wanted)))
            search.hints[path] = refused.reason
            return
    search.keep_whole(sources or list(search.column_parallel), refused.reason)


def mapping_shards(module: nn.Module, mapping: TpMapping, prefix: str = "") -> list[Shard]:
    """Returns the parameters that a mapping splits, with names that start with `prefix`."""
    shards: list[Shard] = []
    for path, parts in mapping.column_parallel.items():
        known = as_linear(module.get_submodule(path))
        assert known is not None
        shards.append(Shard(_join_path(prefix, path, "weight"), known.out_dim, parts))
        if known.bias is not None:
            shards.append(Shard(_join_path(prefix, path, "bias"), 0, parts))
    for path, parts in mapping.row_parallel.items():
        known = as_linear(module.get_submodule(path))
        assert known is not None
        shards.append(Shard(_join_path(prefix, path, "weight"), 1 - known.out_dim, parts))
    for path, way in mapping.expert_cuts.items():
        shards += expert_shards(module.get_submodule(path), way, _join_path(prefix, path))
    return shards


def expert_shards(module: nn.Module, way: ExpertCut, prefix: str = "") -> list[Shard]:
    """Returns the parameters of a module of experts that a cut splits."""
    if way.listed:
        experts, parts = list(module.get_submodule(way.listed).children()), way.ep * way.replicas
        return [
            Shard(
                _join_path(prefix, way.listed, str(number), name),
                0,
                (p.shape[0],),
                replicas=way.replicas,
                holder=number * parts // len(experts),
            )
            for number, expert in enumerate(experts)
            for name, p in expert.named_parameters()
        ]
    shapes = {name: p.shape for name, p in module.named_parameters(recurse=False)}
    inner = [
        Shard(_join_path(prefix, name), dim, (shapes[name][dim] // parts,) * parts, way.ep)
        for name, (dim, parts) in way.inner.items()
    ]
    inner += [Shard(_join_path(prefix, name), 1, (shapes[name][1],), way.ep) for name in way.summands]
    rows = [n for n in shapes if way.keeps_experts_whole and n not in way.inner and n not in way.summands]
    return inner + [
        Shard(_join_path(prefix, name), 0, (shapes[name][0],), replicas=way.replicas) for name in rows
    ]


def expert_style(way: ExpertCut, path: str = "") -> ModuleStyle:
    """Returns how a module of experts works on its parts."""
    if way.listed:
        return ModuleStyle(path, "listed", (way.listed,))
    return (
        ModuleStyle(path, "routed", (*way.arguments, *way.summands))
        if way.keeps_experts_whole
        else ModuleStyle(path, "experts")
    )


def _join_path(*names: str) -> str:
    return ".".join(n for n in names if n)
