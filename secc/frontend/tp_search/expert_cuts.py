"""Cuts the experts of a mixture that lie stacked in 3-D parameters: each expert by its inner width.

A module with such parameters (`[experts, out, in]` or `[experts, in, out]`, for two products or three)
multiplies in its own code, with grouped kernels or one expert after another, so no linear layer of it can
be wrapped. Sizes alone do not tell which dim is the inner width, and whether gate and up are concatenated
or interleaved along it. So each cut that the sizes allow is tried on all ranks, as threads, against the
unsplit module, until one is exact in its results and every gradient. What stays whole (the bias of the
last product) is added on each rank with its share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import nn

from secc.frontend.tp_search.find_mapping import ExpertCut, ModuleCall, expert_shards
from secc.frontend.tp_search.verify_mapping import UnsplitModule
from secc.runtime.plan.schema import ModuleStyle

ExpertSizes = Mapping[str, Sequence[int]]
EXPERTS_STYLE = ModuleStyle("", "experts")
ALIGNED_ENTRIES = 8  # numbers of 16 bits: grouped kernels want rows of 16 bytes


def expert_sizes(module: nn.Module) -> ExpertSizes:
    """Returns the sizes of a module's own parameters if they hold several matrices of several experts,
    else {}."""
    sizes = {n: tuple(p.shape) for n, p in module.named_parameters(recurse=False)}
    matrices = [s for s in sizes.values() if len(s) == 3]
    return sizes if len(matrices) > 1 and len({s[0] for s in matrices}) == 1 else {}


def find_expert_cuts(layer: nn.Module, call: ModuleCall, count: int) -> dict[str, ExpertCut]:
    """Returns cuts of the experts inside `layer`, by the path of their module. `layer` and `call` must
    have values."""
    modules = {path: m for path, m in layer.named_modules() if expert_sizes(m)}
    return {
        path: way
        for path, inner in _record_first_calls(layer, call, modules).items()
        if (way := _find_exact_cut(modules[path], inner, count))
    }


def divides_experts(module: nn.Module, way: ExpertCut, count: int) -> bool:
    """Whether `count` ranks have equal shares of the experts, in sizes that grouped kernels accept."""
    return all(
        part % (ALIGNED_ENTRIES * count) == 0 for shard in expert_shards(module, way) for part in shard.parts
    )


def _record_first_calls(
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
            layer(*args, **kwargs)
    except Exception:  # whatever the user's code does on values that were made up: the experts stay whole
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    return first_calls


def _find_exact_cut(module: nn.Module, call: ModuleCall, count: int) -> ExpertCut:
    """Returns the first cut that is exact, {} if none is."""
    whole = UnsplitModule(module, call)
    even = (way for way in _candidate_cuts(expert_sizes(module)) if divides_experts(module, way, count))
    return next(
        (
            way
            for way in even
            if whole.compare_mapping(count, [EXPERTS_STYLE], expert_shards(module, way)).reason is None
        ),
        {},
    )


def _candidate_cuts(sizes: ExpertSizes) -> Iterator[ExpertCut]:
    """Yields the cuts that sizes allow: an inner width, which each expert's matrix has once or twice, and
    its bias perhaps."""
    for inner in sorted({n for shape in sizes.values() if len(shape) == 3 for n in shape[1:]}, reverse=True):
        cuts = {
            name: [*_inner_dims(shape, inner), *([] if len(shape) == 3 else [None])]
            for name, shape in sizes.items()
        }
        for chosen in product(*cuts.values()):
            yield {name: cut for name, cut in zip(cuts, chosen, strict=True) if cut is not None}


def _inner_dims(shape: Sequence[int], inner: int) -> Iterator[tuple[int, int]]:
    for dim, size in enumerate(shape[1:], 1):
        yield from ((dim, parts) for parts in {inner: (1,), 2 * inner: (2, 1)}.get(size, ()))
