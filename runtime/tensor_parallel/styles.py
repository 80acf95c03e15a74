"""Styles: how the user's modules work on parts. Their forwards are wrapped with the collectives that turn
parts into the whole.

    colwise   each rank has some outputs of a linear map: whole input, a part of the output
    rowwise   each rank has some inputs: outputs are summed over ranks, then the bias is added once
    gather    colwise with gathered outputs: a head over the vocabulary in a module that needs whole logits
    experts   each rank has a part of the inner width of experts stored as parameters of the module: whole
              input, outputs are summed; of the module's whole parameters each rank counts a share
    routed    each rank has some experts of the module, or ranks that share these have a part of their inner
              width: the module gets the tokens that are routed to them (`expert_parallel`)
    listed    each rank has some experts of a list in the module (`expert_lists`)
    vocab     each rank has some rows of an embedding: rows of other ranks count as zero, outputs are summed
    sequence  a layer that works on some positions on each rank (`sequence_parallel`); inside of it:
    join      modules that receive all positions,
    columns   colwise in such a module,
    scatter   rowwise in such a module, with reduce-scattered outputs
    shapes    the module's code sees whole sizes on parts (`shape_mode`)

Only `forward` is replaced, on the module itself, as recomputation does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from secc.runtime.plan.replica_routes import slice_bounds
from secc.runtime.plan.schema import ModuleStyle, Plan, Shard
from secc.runtime.tensor_parallel.autograd_collectives import ShardedRegion, gather_last_dim
from secc.runtime.tensor_parallel.expert_lists import ListedExperts
from secc.runtime.tensor_parallel.expert_parallel import RoutedExperts, TokenExchange
from secc.runtime.tensor_parallel.linear_modules import LinearModule, as_embedding, as_linear
from secc.runtime.tensor_parallel.replica_group import LoneRank, ReplicaGroup
from secc.runtime.tensor_parallel.rules.mark import ShardMark, set_mark
from secc.runtime.tensor_parallel.shape_mode import WholeShapeMode, in_whole_shape_mode

Forward = Callable[..., Any]
Exchange = Callable[[torch.Tensor], torch.Tensor]  # a collective of the replica
OwnShards = Mapping[str, Shard]  # the module's own parameters that are cut


def install_styles(
    plan: Plan,
    model: nn.Module,
    groups: Mapping[str, ReplicaGroup],
    exchanges: Mapping[str, TokenExchange] | None = None,
) -> None:
    """Wraps the modules of this rank's sections, after their parameters have been cut."""
    exchanges = exchanges or {}
    for section in plan.sections:
        if section.name in groups or section.name in exchanges:
            group, exchange = groups.get(section.name, LoneRank()), exchanges.get(section.name)
            apply_styles(model, section.styles, group, section.shards, exchange, section.overlap)


def apply_styles(
    root: nn.Module,
    styles: Iterable[ModuleStyle],
    group: ReplicaGroup,
    shards: Iterable[Shard],
    exchange: TokenExchange | None = None,
    overlap: str = "none",
) -> None:
    """Wraps the modules of `styles`, at paths relative to `root`, after parameters were cut as `shards`
    says. `exchange`: of tokens with other replicas, where these have different experts. `overlap`: which sums
    travel behind products (`secc.runtime.plan.schema.OVERLAPS`)."""
    styles, by_name = list(styles), {shard.name: shard for shard in shards}
    region = ShardedRegion(group, overlap, _find_siblings(root, styles) if overlap != "none" else {})
    for style in styles:
        module, prefix = root.get_submodule(style.module), f"{style.module}." if style.module else ""
        own = {
            name: by_name[f"{prefix}{name}"]
            for name, _ in module.named_parameters(recurse=False)
            if f"{prefix}{name}" in by_name
        }
        if style.kind == "routed":
            module.forward = RoutedExperts(module, region, style.arguments, own, exchange)
        elif style.kind == "listed":
            module.forward = ListedExperts(module, region, style.arguments[0], exchange)
        else:
            module.forward = _STYLE_WRAPPERS[style.kind](module, region, own)


def _find_siblings(
    root: nn.Module, styles: Iterable[ModuleStyle]
) -> dict[nn.Module, tuple[LinearModule, ...]]:
    """Returns for each column-parallel linear map those that may read the same tensor: of one module around
    them, with as many inputs. Returns for each module that gathers positions those inside of it."""
    found: dict[tuple[str, int], dict[nn.Module, LinearModule]] = {}
    for style in styles:
        if style.kind in ("colwise", "gather"):
            module = root.get_submodule(style.module)
            linear = _require_linear(module)
            key = style.module.rpartition(".")[0], linear.in_features
            found.setdefault(key, {})[module] = linear
    siblings = {module: tuple(group.values()) for group in found.values() for module in group}
    columns = [style.module for style in styles if style.kind == "columns"]
    for path in (style.module for style in styles if style.kind == "join"):
        inside = [
            root.get_submodule(name) for name in columns if f"{name}.".startswith(f"{path}." if path else "")
        ]
        siblings[root.get_submodule(path)] = tuple(
            _require_linear(module) for module in inside if "forward" not in vars(module)
        )
    return siblings


def _wrap_colwise(module: nn.Module, region: ShardedRegion, own: OwnShards) -> Forward:
    return _wrap_cut_outputs(module, own["weight"].parts, _multiply_whole_input(module, region))


def _wrap_rowwise(module: nn.Module, region: ShardedRegion, own: OwnShards) -> Forward:
    linear = _require_linear(module)
    return _wrap_cut_inputs(module, lambda x: region.sum_product(x, linear))


def _multiply_whole_input(module: nn.Module, region: ShardedRegion) -> Exchange:
    """Returns the product of a linear map with cut outputs and a whole input."""
    linear, inner = _require_linear(module), module.forward
    siblings = region.siblings.get(module, ()) if "forward" not in vars(module) else ()

    def multiply(x: torch.Tensor) -> torch.Tensor:
        out = region.multiply(x, linear, siblings) if siblings else None
        return inner(region(x)) if out is None else out

    return multiply


def _wrap_cut_outputs(module: nn.Module, parts: tuple[int, ...], multiply: Exchange) -> Forward:
    """Wraps a linear map with cut outputs."""
    linear = _require_linear(module)
    linear.set_sizes(linear.out_features, linear.in_features)

    @functools.wraps(module.forward)
    def forward(x: torch.Tensor) -> torch.Tensor:
        out = multiply(x)
        return set_mark(out, ShardMark(out.ndim - 1, parts)) if in_whole_shape_mode() else out

    return forward


def _wrap_cut_inputs(module: nn.Module, multiply: Exchange) -> Forward:
    """Wraps a linear map with cut inputs: `multiply` gives the product that is summed over the ranks; the
    bias counts once."""
    linear = _require_linear(module)
    linear.set_sizes(linear.out_features, linear.in_features)

    @functools.wraps(module.forward)
    def forward(x: torch.Tensor) -> torch.Tensor:
        out = multiply(x)
        return out if linear.bias is None else out + linear.bias.to(out.dtype)

    return forward


def _wrap_gather(module: nn.Module, region: ShardedRegion, own: OwnShards) -> Forward:
    linear, group = _require_linear(module), region.group
    linear.set_sizes(linear.out_features, linear.in_features)
    multiply, sizes = _multiply_whole_input(module, region), _rank_sizes(sum(own["weight"].parts), group)

    @functools.wraps(module.forward)
    def forward(x: torch.Tensor) -> torch.Tensor:
        return gather_last_dim(multiply(x), group, sizes)

    return forward


def _wrap_experts(module: nn.Module, region: ShardedRegion, own: OwnShards) -> Forward:
    inner, whole = (
        module.forward,
        [name for name, _ in module.named_parameters(recurse=False) if name not in own],
    )

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(partial(_exchange_floats, region), (args, kwargs))
        with _share_parameters(module, whole, region.group.size):
            out = inner(*args, **kwargs)
        return tree_map(partial(_exchange_floats, region.reduce_output), out)

    return forward


def _exchange_floats(exchange: Exchange, value: Any) -> Any:
    return exchange(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@contextmanager
def _share_parameters(module: nn.Module, names: Sequence[str], count: int) -> Iterator[None]:
    """Lets the module's code see a `count`-th of some of its own parameters, so that their sum over ranks is
    the whole: instance attributes hide parameters."""
    vars(module).update({name: module.get_parameter(name) / count for name in names})
    try:
        yield
    finally:
        for name in names:
            del vars(module)[name]


def _wrap_vocab(module: nn.Module, region: ShardedRegion, own: OwnShards) -> Forward:
    table, group = as_embedding(module), region.group
    assert table is not None
    start, stop = slice_bounds(sum(own["weight"].parts), group.index, group.size)
    table.num_embeddings = stop - start
    if table.padding_idx is not None:
        table.padding_idx = table.padding_idx - start if start <= table.padding_idx < stop else None
    inner = module.forward

    @functools.wraps(inner)
    def forward(ids: torch.Tensor) -> torch.Tensor:
        elsewhere = (ids < start) | (ids >= stop)
        rows = inner((ids - start).masked_fill(elsewhere, 0))
        return region.reduce_output(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0))

    return forward


def _wrap_sequence(module: nn.Module, region: ShardedRegion, own: OwnShards) -> Forward:
    inner, positions = module.forward, region.positions

    @functools.wraps(inner)
    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = inner(positions.split_positions(x), *args, **kwargs)
        first, *others = out if isinstance(out, tuple) else (out,)
        whole = positions.gather_positions(first, parts=False)
        return (whole, *others) if isinstance(out, tuple) else whole

    return forward


def _wrap_join(module: nn.Module, region: ShardedRegion, own: OwnShards) -> Forward:
    inner, products = module.forward, region.siblings.get(module, ())

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if args:
            return inner(region.gather_for_products(args[0], products), *args[1:], **kwargs)
        name = next(iter(kwargs))
        return inner(**{**kwargs, name: region.gather_for_products(kwargs[name], products)})

    return forward


def _wrap_columns(module: nn.Module, region: ShardedRegion, own: OwnShards) -> Forward:
    linear, inner = _require_linear(module), module.forward

    def multiply(x: torch.Tensor) -> torch.Tensor:
        out = region.multiply_gathered(x, linear)
        return inner(x) if out is None else out

    return _wrap_cut_outputs(module, own["weight"].parts, multiply)


def _wrap_scatter(module: nn.Module, region: ShardedRegion, own: OwnShards) -> Forward:
    linear = _require_linear(module)
    return _wrap_cut_inputs(module, lambda x: region.scatter_product(x, linear))


def _wrap_shapes(module: nn.Module, region: ShardedRegion, own: OwnShards) -> Forward:
    inner, group = module.forward, region.group

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with WholeShapeMode(group.index, group.size, region):
            return inner(*args, **kwargs)

    return forward


_STYLE_WRAPPERS: dict[str, Callable[[nn.Module, ShardedRegion, OwnShards], Forward]] = {
    "colwise": _wrap_colwise,
    "rowwise": _wrap_rowwise,
    "gather": _wrap_gather,
    "experts": _wrap_experts,
    "vocab": _wrap_vocab,
    "sequence": _wrap_sequence,
    "join": _wrap_join,
    "columns": _wrap_columns,
    "scatter": _wrap_scatter,
    "shapes": _wrap_shapes,
}


def _require_linear(module: nn.Module) -> LinearModule:
    linear = as_linear(module)
    assert linear is not None
    return linear


def _rank_sizes(total: int, group: ReplicaGroup) -> list[int]:
    """Returns how many of `total` entries each rank has."""
    return [stop - start for start, stop in (slice_bounds(total, i, group.size) for i in range(group.size))]
