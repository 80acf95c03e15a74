"""Recomputation: parts of the user's modules keep their inputs alone and run again in the backward, by
`torch.utils.checkpoint`.

What runs again is a *unit*: each layer of a stack in a block, or the whole block where it has no stack.
`full` makes every unit run again; `selective` every second layer of a stack (blocks of one class side by side
are a stack, too), such that the last one, whose activations are used first, is kept. Only `forward` is
replaced, on the module itself: parameters, names and hooks stay the user's. The cost model asks here, too,
what the units are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from secc.runtime.errors import UserError
from secc.runtime.sections.module_settings import bind_active_settings
from secc.runtime.sections.selective_layers import alternate_slice, select_alternate_blocks

RECOMPUTE_MODES = ("none", "selective", "full")
_RECOMPUTE_MARK = "_secc_recomputes"
_CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past")


def install_recompute(model: nn.Module, blocks: Sequence[str], mode: str) -> None:
    """Let the units of `blocks` (paths in `model`) that `mode` chooses run again in the backward. Raises
    UserError for another mode."""
    if mode not in RECOMPUTE_MODES:
        raise UserError(
            f"there is no recomputation {mode!r}", remedy=f"choose one of {', '.join(RECOMPUTE_MODES)}"
        )
    for unit in select_recomputed_units(model, blocks, mode):
        if not getattr(unit, _RECOMPUTE_MARK, False) and not getattr(
            unit, "gradient_checkpointing", False
        ):  # the user's own
            setattr(unit, _RECOMPUTE_MARK, True)
            unit.forward = _checkpoint_forward(unit, unit.forward)


def select_recomputed_units(model: nn.Module, blocks: Sequence[str], mode: str) -> list[nn.Module]:
    """The units that run again under `mode`."""
    if mode == "none":
        return []
    classes = {path: type(model.get_submodule(path)).__name__ for path in blocks}
    picked = set(blocks if mode == "full" else select_alternate_blocks(blocks, classes))
    found: list[nn.Module] = []
    for path in blocks:
        block = model.get_submodule(path)
        inner = [list(stack.children()) for stack in find_layer_stacks(block)]
        for layers in inner:
            found += layers if mode == "full" else layers[alternate_slice(len(layers))]
        if not inner and path in picked:
            found += recompute_units(block)
    return found


def recompute_units(block: nn.Module) -> list[nn.Module]:
    """What of a block would run again under `full`: the layers of its outermost stacks, else the block unless
    nothing is inside it."""
    layers = [layer for stack in find_layer_stacks(block) for layer in stack.children()]
    return layers or ([block] if next(block.children(), None) is not None else [])


def find_layer_stacks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost stacks of layers in a module, itself included."""
    if is_layer_stack(module):
        yield module
        return
    for child in module.children():
        yield from find_layer_stacks(child)


def is_layer_stack(module: nn.Module) -> bool:
    """A list or sequence of several layers of one class that are more than one of torch's own leaf modules.

    A list may mix classes of one file (layers with and without cross-attention) that hold modules with parts,
    and no stacks of their own.
    """
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return False
    layers = list(module.children())
    if (
        len(layers) < 2
        or any(_is_torch_leaf_module(layer) for layer in layers)
        or next(module.parameters(), None) is None
    ):
        return False
    if len({type(layer) for layer in layers}) == 1:
        return True
    deep = all(
        any(next(child.children(), None) is not None for child in layer.children()) for layer in layers
    )
    one_file = isinstance(module, nn.ModuleList) and len({type(layer).__module__ for layer in layers}) == 1
    return (
        deep and one_file and not any(is_layer_stack(inner) for layer in layers for inner in layer.modules())
    )


def _is_torch_leaf_module(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn") and next(module.children(), None) is None


def _checkpoint_forward(unit: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with its activations forgotten until the backward."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call = bind_active_settings(functools.partial(forward, **_without_cache(unit, kwargs)))
        return checkpoint(call, *args, use_reentrant=False)

    return run


def _without_cache(unit: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments without the caches of Hugging Face's decoders, which a second run would fill again; training
    does not read them."""
    if getattr(unit, "_can_checkpoint_with_cache", False):
        return kwargs
    dropped = {name: None for name in _CACHE_ARGUMENTS if kwargs.get(name) is not None}
    return kwargs | dropped | ({"use_cache": False} if kwargs.get("use_cache") else {})
