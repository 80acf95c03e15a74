"""Cuts the experts of a mixture that lie stacked in 3-D parameters: each expert by its inner width, or with
`ep` into parts of whole experts.

A module with such parameters (`[experts, out, in]` or `[experts, in, out]`, for two products or three)
multiplies in its own code, with grouped kernels or one expert after another, so no linear layer of it can
be wrapped. Sizes alone do not tell which dim is the inner width, and whether gate and up are concatenated
or interleaved along it. So each cut that the sizes allow is tried on all ranks, as threads, against the
unsplit module, until one is exact in its results and every gradient. What stays whole (the bias of the
last product) is added on each rank with its share; ranks that share whole experts each add some entries.

Experts may also be modules in a list that the module's code goes through (`expert_lists`). The linear layers
inside of these are cut by their inner width like any others; `ep` gives whole experts to ranks.

Parts of whole experts are shown twice: as the module was called, and with all tokens routed to one expert, so
that other ranks get none (of a list: with all tokens equal). Where several ranks share a part, they cut its
experts by their inner width.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from xdsl.dialects.builtin import ModuleOp

from secc.frontend.tp_search.find_mapping import ExpertCut, ModuleCall, expert_shards, expert_style
from secc.frontend.tp_search.verify_mapping import UnsplitModule
from secc.ir.dialect.ops import graph_of
from secc.ir.dialect.python_attributes import int_attr, int_list_attr
from secc.runtime.tensor_parallel.expert_lists import find_expert_list
from secc.runtime.training.widened_floats import widened_floats

ExpertSizes = Mapping[str, Sequence[int]]
EXCHANGING_REPLICAS = 2
ALIGNED_ENTRIES = 8  # numbers of 16 bits: grouped kernels want rows of 16 bytes


def expert_sizes(module: nn.Module) -> ExpertSizes:
    """Returns the sizes of a module's own parameters if they hold several matrices of several experts,
    else {}."""
    sizes = {n: tuple(p.shape) for n, p in module.named_parameters(recurse=False)}
    matrices = [s for s in sizes.values() if len(s) == 3]
    return sizes if len(matrices) > 1 and len({s[0] for s in matrices}) == 1 else {}


def listed_sizes(module: nn.Module) -> ExpertSizes:
    """Returns the sizes of all experts' parameters together if a child of the module is a list of experts,
    else {}."""
    name = find_expert_list(module)
    experts = list(module.get_submodule(name).children()) if name else []
    sizes = [{n: tuple(p.shape) for n, p in e.named_parameters()} for e in experts]
    equal = all(each == sizes[0] for each in sizes)
    return {f"{name}.{n}": (len(experts), *shape) for n, shape in sizes[0].items()} if sizes and equal else {}


def mixture_sizes(module: nn.Module) -> ExpertSizes:
    """Returns the sizes of experts' parameters, `[experts, ...]`, stacked or of all members of a list; {} for
    a module without experts of its own."""
    return expert_sizes(module) or listed_sizes(module)


def annotate_experts(module: ModuleOp, meta: nn.Module) -> None:
    """Writes on each block with mixtures the numbers of their experts (`experts`), and for the cost model the
    entries of parameters in them, of one expert (`expert_size`) and of its rows (`expert_width`)."""
    for path, block in graph_of(module).blocks.items():
        mixtures = [m for m in meta.get_submodule(path).modules() if mixture_sizes(m)]
        if not mixtures:
            continue
        sizes = mixture_sizes(mixtures[0])
        params = [p for m in mixtures for p in _expert_parameters(m)]
        trainable = [p for p in params if p.requires_grad]
        matrices = [shape[1:] for shape in sizes.values() if len(shape) == 3]
        shared = set(matrices[0]).intersection(*matrices[1:])
        block.attributes |= {
            "experts": int_list_attr(sorted({count_of_experts(mixture_sizes(m)) for m in mixtures})),
            "expert_layers": int_attr(len(mixtures)),
            "expert_params": int_attr(sum(p.numel() for p in params)),
            "expert_trainable": int_attr(sum(p.numel() for p in trainable)),
            "expert_size": int_attr(sum(prod(shape) for shape in matrices)),
            "expert_width": int_attr(max(shared or {max(matrices[0])})),
        }


def _expert_parameters(mixture: nn.Module) -> Iterator[nn.Parameter]:
    if expert_sizes(mixture):
        return mixture.parameters(recurse=False)
    return mixture.get_submodule(find_expert_list(mixture)).parameters()


def find_expert_cuts(
    layer: nn.Module, call: ModuleCall, count: int, ep: int = 1, replicas: int = 1
) -> dict[str, ExpertCut]:
    """Returns cuts over `count` ranks of the experts inside `layer`, by the path of their module.

    Experts form `ep` parts in a replica, and further ones on consecutive `replicas`. `layer` and `call` must
    have values.
    """
    sizes_of = mixture_sizes if ep * replicas > 1 else expert_sizes
    modules = {path: m for path, m in layer.named_modules() if sizes_of(m)}
    return {
        path: way
        for path, inner in record_first_calls(layer, call, modules).items()
        if (way := _find_exact_cut(modules[path], inner, count, ep, replicas)) is not None
    }


def divides_experts(module: nn.Module, way: ExpertCut, count: int) -> bool:
    """Whether `count` ranks have equal shares of the experts, in sizes that grouped kernels accept."""
    sharing = count // way.ep
    return all(
        part % (ALIGNED_ENTRIES * sharing) == 0
        for shard in expert_shards(module, way)
        if shard.name in way.inner
        for part in shard.parts
    )


def record_first_calls(
    layer: nn.Module, call: ModuleCall, modules: Mapping[str, nn.Module]
) -> dict[str, ModuleCall]:
    """Returns the arguments of each module's first call."""
    first_calls: dict[str, ModuleCall] = {}

    def watch(path: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        return module.register_forward_pre_hook(
            lambda _, *given: first_calls.setdefault(path, given) and None, with_kwargs=True
        )

    hooks = [watch(path, module) for path, module in modules.items()]
    try:
        if hooks:
            args, kwargs = call
            with widened_floats(layer, torch.float32):  # as the arguments were collected
                layer(*args, **kwargs)
    except Exception:  # whatever the user's code does on values that were made up: the experts stay whole
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    return first_calls


def _find_exact_cut(
    module: nn.Module, call: ModuleCall, count: int, ep: int, replicas: int
) -> ExpertCut | None:
    """Returns the first cut that is exact, None if none is."""
    if not expert_sizes(module):
        return _find_list_cut(module, call, count, ep, replicas)
    sizes, calls, arguments = expert_sizes(module), [call], tuple[str, ...]()
    if ep * replicas > 1:
        arguments = routing_arguments(module, call)
        experts = count_of_experts(sizes)
        uneven = experts % (ep * replicas) or any(shape[0] != experts for shape in sizes.values())
        if uneven or not arguments:
            return None
        calls.append(_route_to_first(call))
    references = [UnsplitModule(module, each) for each in calls]

    def is_exact(way: ExpertCut) -> bool:
        inside = replace(way, replicas=1)
        styles, shards = [expert_style(inside)], expert_shards(module, inside)
        return count == 1 or all(
            whole.compare_mapping(count, styles, shards).reason is None for whole in references
        )

    even = (way for way in _candidate_cuts(sizes, count, ep) if divides_experts(module, way, count))
    found = next((way for each in even if is_exact(way := replace(each, arguments=arguments))), None)
    if found is None or replicas == 1:
        return found
    # Two replicas show what more of them do; which ranks of a replica meet is not the module's concern.
    shown = replace(found, ep=1, replicas=EXCHANGING_REPLICAS)
    exact = (
        whole.compare_exchange(EXCHANGING_REPLICAS, expert_style(shown), expert_shards(module, shown)).reason
        is None
        for whole in references
    )
    return replace(found, replicas=replicas) if all(exact) else None


def _find_list_cut(
    mixture: nn.Module, call: ModuleCall, count: int, ep: int, replicas: int
) -> ExpertCut | None:
    """Returns the cut of a list of experts into whole ones if it is exact, else None."""
    name = find_expert_list(mixture)
    if ep < count or count_of_experts(listed_sizes(mixture)) % (ep * replicas):
        return None
    call = _with_several_samples(call) if replicas > 1 else call
    references = [UnsplitModule(mixture, each) for each in (call, _with_equal_rows(call))]
    inside = ExpertCut(ep=count, listed=name)
    across = ExpertCut(replicas=EXCHANGING_REPLICAS, listed=name)
    shards = expert_shards(mixture, inside)
    verdicts = (w.compare_mapping(count, [expert_style(inside)], shards) for w in references if count > 1)
    if any(verdict.reason is not None for verdict in verdicts):
        return None
    shards, style = expert_shards(mixture, across), expert_style(across)
    verdicts = (w.compare_exchange(EXCHANGING_REPLICAS, style, shards) for w in references if replicas > 1)
    if any(verdict.reason is not None for verdict in verdicts):
        return None
    return ExpertCut(ep=ep, replicas=replicas, listed=name)


def routing_arguments(module: nn.Module, call: ModuleCall) -> tuple[str, ...]:
    """Returns the names of the hidden states, indices of experts and weights that a module of experts is
    called with; () if its only tensors are not integers `[..., k]`, floats `[..., k]` after them, and floats
    `[..., width]`."""
    args, kwargs = call
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    floats = {name: t for name, t in tensors.items() if t.is_floating_point()}
    indices = {n: t for n, t in tensors.items() if n not in floats and t.dtype != torch.bool and t.dim() > 1}
    if len(floats) != 2 or len(indices) != 1 or len(tensors) != 3:
        return ()
    ((index, chosen),) = indices.items()
    order = [*given]
    weights = [
        n for n, t in floats.items() if t.shape == chosen.shape and order.index(n) > order.index(index)
    ]
    hidden = [n for n, t in floats.items() if t.shape[:-1] == chosen.shape[:-1] and n not in weights]
    return (hidden[0], index, weights[0]) if len(hidden) == len(weights) == 1 else ()


def count_of_experts(sizes: ExpertSizes) -> int:
    """Returns the number of experts that parameters of these sizes hold."""
    return next(shape[0] for shape in sizes.values() if len(shape) == 3)


def _with_several_samples(call: ModuleCall) -> ModuleCall:
    """Returns the call with more entries along dim 0, so that replicas can share them."""

    def repeat(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        changed = (value, value.flip(-1), -value) if value.is_floating_point() else (value,) * 3
        return torch.cat([v.detach() for v in changed]).requires_grad_(value.requires_grad)

    return tree_map(repeat, call)


def _with_equal_rows(call: ModuleCall) -> ModuleCall:
    """Returns the call with every token like the first, so that all of them reach the same experts."""

    def change(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() < 2:
            return value
        first = value.detach().reshape(-1, value.shape[-1])[:1]
        return (
            first.expand(value.shape[:-1].numel(), -1)
            .reshape(value.shape)
            .requires_grad_(value.requires_grad)
        )

    return tree_map(change, call)


def _route_to_first(call: ModuleCall) -> ModuleCall:
    """Returns the call with all tokens routed to the first expert."""

    def change(value: Any) -> Any:
        integers = isinstance(value, torch.Tensor) and not value.is_floating_point()
        return torch.zeros_like(value) if integers else value

    return tree_map(change, call)


def _candidate_cuts(sizes: ExpertSizes, count: int, ep: int) -> Iterator[ExpertCut]:
    """Yields the cuts that sizes allow: whole experts where `ep` ranks share them, else an inner width, which
    each expert's matrix has once or twice, and its bias perhaps."""
    if ep == count:
        yield ExpertCut(ep=ep)
        return
    for inner in sorted({n for shape in sizes.values() if len(shape) == 3 for n in shape[1:]}, reverse=True):
        cuts = {
            name: [*_inner_dims(shape, inner), *([] if len(shape) == 3 else [None])]
            for name, shape in sizes.items()
        }
        for chosen in product(*cuts.values()):
            by_name = {name: cut for name, cut in zip(cuts, chosen, strict=True) if cut is not None}
            whole = tuple(name for name in sizes if ep > 1 and name not in by_name)
            yield ExpertCut(by_name, ep, whole)


def _inner_dims(shape: Sequence[int], inner: int) -> Iterator[tuple[int, int]]:
    for dim, size in enumerate(shape[1:], 1):
        yield from ((dim, parts) for parts in {inner: (1,), 2 * inner: (2, 1)}.get(size, ()))
