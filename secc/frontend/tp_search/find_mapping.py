"""Which linear maps of a module are cut by outputs and which by inputs: found by running its code once on the
parts of one rank.

At first every linear map that gets whole activations is cut by outputs (colwise). What follows sees marked
parts (`secc.runtime.tensor_parallel.rules.mark`); a linear map that gets parts of its inputs is cut by inputs
(rowwise), which makes the activation whole again. Where the code refuses parts, either an edge between parts
of the outputs helps (queries, keys and values of one fused map), or the maps that the parts came from stay
whole, and the code runs again. So attention is cut by heads and a feed-forward layer by its inner width
without a word about either, and what stays whole has a reason.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from secc.runtime.plan.schema import Shard, Style
from secc.runtime.tensor_parallel.linear_modules import Linear, linear
from secc.runtime.tensor_parallel.rules.mark import Mark, Refused, mark, marks_in, set_mark, sources_of
from secc.runtime.tensor_parallel.shape_mode import Shapes

Parts = tuple[int, ...]
Way = Mapping[
    str, tuple[int, int]
]  # of each parameter of experts that is cut: the dim, and how many parts lie side by side along it
Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a module is called with


@dataclass(frozen=True)
class Found:
    """How a module is cut: the parts of what is cut by outputs and by inputs, and why other linear maps stay
    whole.

    `experts` has for modules of several experts how those are cut (`secc.frontend.tp_search.expert_cuts`),
    `heads` the numbers of heads that ranks share.
    """

    columns: Mapping[str, Parts]
    rows: Mapping[str, Parts]
    whole: Mapping[str, str]
    scopes: tuple[str, ...] = ()  # the smallest modules inside which everything that is in parts stays
    draws: bool = False  # whether its code draws random numbers for parts
    experts: Mapping[str, Way] = field(default_factory=dict[str, Way])
    heads: frozenset[int] = frozenset()

    @property
    def shared(self) -> list[str]:
        """What ranks share evenly, as text."""
        outputs = {part for parts in self.columns.values() for part in parts}
        return [f"{n} heads" for n in sorted(self.heads)] + [f"{n} outputs" for n in sorted(outputs)]

    @property
    def cut(self) -> tuple[str, ...]:
        """The modules that are cut."""
        return (*self.columns, *self.rows, *self.experts)

    def styles(self, shapes: bool) -> list[Style]:
        """How the cut modules work on their parts; with `shapes`, their code sees whole sizes."""
        around = [Style(p, "shapes") for p in self.scopes if shapes]
        linears = [Style(p, "colwise") for p in self.columns] + [Style(p, "rowwise") for p in self.rows]
        return around + linears + [Style(p, "experts") for p in self.experts]

    def on_positions(self, shapes: bool) -> list[Style]:
        """The same with the sequence in parts between the scopes; [] where the module itself is the scope, or
        experts are cut."""
        if not self.scopes or "" in self.scopes or self.experts:
            return []
        around = [
            Style(p, kind) for p in self.scopes for kind in (("shapes", "join") if shapes else ("join",))
        ]
        inside = [Style(p, "columns") for p in self.columns] + [Style(p, "scatter") for p in self.rows]
        return [Style("", "sequence"), *around, *inside]


@dataclass
class _Search:
    """The state of the search: `columns` are cut by outputs now, `reasons` say why others are not."""

    columns: dict[str, Parts]
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    rows: dict[str, tuple[Parts, frozenset[str]]] = field(
        default_factory=dict[str, tuple[Parts, frozenset[str]]]
    )
    reached: set[str] = field(default_factory=set[str])
    draws: bool = False
    heads: frozenset[int] = frozenset()
    hints: dict[str, str] = field(default_factory=dict[str, str])  # why outputs were cut at more places

    def drop(self, paths: Iterable[str], reason: str) -> None:
        for path in paths:
            if self.columns.pop(path, None) is not None:
                self.reasons[path] = self.hints.get(path, reason)


def find(module: nn.Module, call: Call, count: int, preferred: Iterable[str] | None = None) -> Found:
    """A mapping of `module` over `count` ranks. `preferred` are the only maps that may be cut by outputs,
    where that is known."""
    found = {path: cut for path, m in module.named_modules() if (cut := linear(m)) is not None}
    allowed = set(found if preferred is None else preferred)
    search = _Search({path: (m.outputs,) for path, m in found.items() if path in allowed})
    for path, (outputs,) in list(search.columns.items()):
        if outputs % count:
            search.drop([path], f"tp={count} does not divide its {outputs} outputs")
    while search.columns:
        search.rows, search.reached = {}, set()
        if _try(module, call, count, search, found):
            break
    useful = sources_of([Mark(0, parts, sources) for parts, sources in search.rows.values()])
    search.drop([p for p in search.columns if p not in useful], "nothing takes parts of its outputs")
    rows = {p: parts for p, (parts, _) in search.rows.items()} if search.columns else {}
    whole = {
        p: search.reasons.get(p, "it gets whole activations")
        for p in found
        if p not in search.columns and p not in rows
    }
    scopes = _outermost(_common([path, *search.rows[path][1]]) for path in rows)
    return Found(search.columns, rows, whole, scopes, search.draws, heads=search.heads)


def _common(paths: Iterable[str]) -> str:
    """The module that holds all of these."""
    names = zip(*(p.split(".")[:-1] for p in paths), strict=False)
    return ".".join(some[0] for some in takewhile(lambda some: len(set(some)) == 1, names))


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Paths without those that lie inside others."""
    kept: list[str] = []
    for path in sorted(set(paths), key=len):
        if not any(k == "" or f"{path}.".startswith(f"{k}.") for k in kept):
            kept.append(path)
    return tuple(kept)


def _try(module: nn.Module, call: Call, count: int, search: _Search, found: Mapping[str, Linear]) -> bool:
    """One run of the module's code; whether it went through. Else the search has changed."""
    trial = copy.deepcopy(module)
    for path in found:
        inner = trial.get_submodule(path)
        inner.forward = _on_parts(path, inner, count, search)
    try:
        args, kwargs = tree_map(_fresh, call)
        with torch.enable_grad(), Shapes(0, count) as mode:
            out = trial(*args, **kwargs)
        search.draws, search.heads = mode.drew, frozenset(mode.heads)
        if leaked := marks_in(out):
            raise Refused("its outputs leave the module in parts", sources_of(leaked))
        return True
    except Refused as refused:
        _learn(search, refused, found)
    except Exception as error:  # whatever the user's code does with sizes it did not expect
        search.drop(
            search.reached & search.columns.keys() or list(search.columns),
            f"its code fails on parts: {str(error).splitlines()[0]}",
        )
    return False


def _fresh(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _on_parts(path: str, module: nn.Module, count: int, search: _Search) -> Callable[..., Any]:
    """The forward of a linear map while a mapping is sought."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(x: torch.Tensor) -> torch.Tensor:
        known = linear(module)
        assert known is not None
        found, mode = mark(x), Shapes(0, count)
        search.reached.add(path)
        if found is not None and found.dim == torch.Tensor.dim(x) - 1:
            search.rows[path] = found.parts, found.sources
            return _product(x, known, mode, 1 - known.out_dim, found.parts)
        if found is not None or path not in search.columns:
            return inner(x)
        parts = search.columns[path]
        out = _product(x, known, mode, known.out_dim, parts)
        return set_mark(out, Mark(out.ndim - 1, parts, frozenset({path})))

    return forward


def _product(x: torch.Tensor, known: Linear, mode: Shapes, dim: int, parts: Parts) -> torch.Tensor:
    weight = mode.part_of(known.weight, dim, parts)
    return torch.nn.functional.linear(x, weight if known.out_dim == 0 else weight.t())


def _learn(search: _Search, refused: Refused, found: Mapping[str, Linear]) -> None:
    """Cut the outputs of the one map that parts came from at more places, or leave whole those that they came
    from."""
    sources = refused.sources & search.columns.keys()
    if refused.edges and len(sources) == 1:
        path = next(iter(sources))
        parts = search.columns[path]
        edges = {sum(parts[:i]) for i in range(len(parts) + 1)}
        wanted = {place * found[path].outputs // size for place, size in refused.edges}
        if not wanted <= edges:
            search.columns[path] = tuple(b - a for a, b in pairwise(sorted(edges | wanted)))
            search.hints[path] = refused.reason
            return
    search.drop(sources or list(search.columns), refused.reason)


def shards(module: nn.Module, mapping: Found, prefix: str = "") -> list[Shard]:
    """The parameters that a mapping cuts, under names that start with `prefix`."""
    found: list[Shard] = []
    for path, parts in mapping.columns.items():
        known = linear(module.get_submodule(path))
        assert known is not None
        found.append(Shard(_joined(prefix, path, "weight"), known.out_dim, parts))
        if known.bias is not None:
            found.append(Shard(_joined(prefix, path, "bias"), 0, parts))
    for path, parts in mapping.rows.items():
        known = linear(module.get_submodule(path))
        assert known is not None
        found.append(Shard(_joined(prefix, path, "weight"), 1 - known.out_dim, parts))
    for path, way in mapping.experts.items():
        found += expert_shards(module.get_submodule(path), way, _joined(prefix, path))
    return found


def expert_shards(module: nn.Module, way: Way, prefix: str = "") -> list[Shard]:
    """The parameters of a module of experts that a way cuts."""
    sizes = {name: module.get_parameter(name).shape[dim] for name, (dim, _) in way.items()}
    return [
        Shard(_joined(prefix, name), dim, (sizes[name] // parts,) * parts)
        for name, (dim, parts) in way.items()
    ]


def _joined(*names: str) -> str:
    return ".".join(n for n in names if n)
