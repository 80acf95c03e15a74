"""Activation recomputation (gradient checkpointing, Chen et al. 2016) of parts of the user's modules, by
`torch.utils.checkpoint`.

A *unit* keeps only its inputs and runs again in the backward: a layer of a stack in a block, or the whole
block if it has no stack. `full` recomputes every unit. `selective` recomputes every second layer of a stack
(blocks of one class side by side count as a stack), never the last one: its activations are used first. Only
the `forward` attribute of the module is replaced; parameters, names and hooks stay the user's. The cost model
uses this module to find the units.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from secc.runtime.context_parallel.row_marks import mark_of, set_mark
from secc.runtime.context_parallel.row_mode import bind_active_mode
from secc.runtime.errors import UserError
from secc.runtime.sections.kept_tensors import KeptAttributes
from secc.runtime.sections.module_settings import bind_active_settings
from secc.runtime.sections.selective_layers import alternate_slice, select_alternate_blocks
from secc.runtime.tensor_parallel.expert_lists import is_expert_list

RECOMPUTE_MODES = ("none", "selective", "full")
_RECOMPUTE_MARK = "_secc_recomputes"
_CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past")


def install_recompute(
    model: nn.Module, blocks: Sequence[str], mode: str, splits_backward: bool = False
) -> None:
    """Let the units of `blocks` (module paths) that `mode` selects run again in the backward.
    splits_backward: the backward has two parts, and what runs again stays until the second one has ended.
    Raises UserError for an unknown mode."""
    if mode not in RECOMPUTE_MODES:
        raise UserError(
            f"unknown recomputation mode {mode!r}", remedy=f"choose one of {', '.join(RECOMPUTE_MODES)}"
        )
    for unit in select_recomputed_units(model, blocks, mode):
        if not getattr(unit, _RECOMPUTE_MARK, False) and not getattr(
            unit, "gradient_checkpointing", False
        ):  # the user's own
            setattr(unit, _RECOMPUTE_MARK, True)
            unit.forward = _checkpoint_forward(unit, unit.forward, splits_backward)


def is_recomputed(module: nn.Module) -> bool:
    """Whether a module runs again in the backward, by this module or by its own code (Hugging Face's)."""
    own_code = getattr(module, "gradient_checkpointing", False) and module.training
    return bool(getattr(module, _RECOMPUTE_MARK, False) or own_code)


def select_recomputed_units(model: nn.Module, blocks: Sequence[str], mode: str) -> list[nn.Module]:
    """Return the modules that `mode` recomputes."""
    if mode == "none":
        return []
    classes = {path: type(model.get_submodule(path)).__name__ for path in blocks}
    whole_blocks = set(blocks if mode == "full" else select_alternate_blocks(blocks, classes))
    selected: list[nn.Module] = []
    for path in blocks:
        block = model.get_submodule(path)
        stacks_of_layers = [list(stack.children()) for stack in find_layer_stacks(block)]
        for layers in stacks_of_layers:
            selected += layers if mode == "full" else layers[alternate_slice(len(layers))]
        if not stacks_of_layers and path in whole_blocks:
            selected += recompute_units(block)
    return selected


def recompute_units(block: nn.Module) -> list[nn.Module]:
    """Return the units of a block under `full`: the layers of its outermost stacks, else the block itself
    unless it has no submodules."""
    layers = [layer for stack in find_layer_stacks(block) for layer in stack.children()]
    return layers or ([block] if next(block.children(), None) is not None else [])


def units_of_blocks(model: nn.Module, blocks: Sequence[str]) -> list[nn.Module]:
    """Return the units of several blocks (module paths) under `full`, in their order."""
    return [unit for path in blocks for unit in recompute_units(model.get_submodule(path))]


def find_layer_stacks(module: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the outermost layer stacks in a module, itself included. Experts side by side are none."""
    if is_layer_stack(module):
        yield module
        return
    for name, child in module.named_children():
        if not is_expert_list(name, child):
            yield from find_layer_stacks(child)


def is_layer_stack(module: nn.Module) -> bool:
    """Whether a module is a list or sequence of at least two layers of one class that hold parameters and are
    not torch's own leaf modules.

    A list may mix classes of one file (layers with and without cross-attention) if each layer has submodules
    with parts and contains no stack itself.
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


def _checkpoint_forward(
    unit: nn.Module, forward: Callable[..., Any], splits_backward: bool
) -> Callable[..., Any]:
    """Wrap `forward` so that its activations are dropped until the backward, then computed again."""
    kept = KeptAttributes(unit)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call = functools.partial(forward, **without_cache(unit, kwargs))
        call = bind_active_mode(bind_active_settings(kept.bind_first_values(call)))
        if splits_backward:
            return _UnitRun(call, args).run_forward()
        return checkpoint(call, *args, use_reentrant=False)

    return run


class _EnoughRecomputed(Exception):
    """Ends the second run of a unit when all that its backward needs is there."""


class _UnitRun:
    """A run of a unit in a section with a split backward. `torch.utils.checkpoint` recomputes for each call
    of autograd, and the second part of a split backward calls it for each node. Here the unit runs again
    once, when its backward first needs something; what it saves then stays until the graph is gone."""

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._call, self._args, self._saved_count = call, args, 0
        self._values: list[torch.Tensor] = []

    def run_forward(self) -> Any:
        """Run the unit, and keep nothing that its backward needs."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return self._call(*self._args)

    def _pack(self, tensor: torch.Tensor) -> int:
        self._saved_count += 1
        return self._saved_count - 1

    def _unpack(self, index: int) -> torch.Tensor:
        if not self._values:
            self._run_again()
        return self._values[index]

    def _run_again(self) -> None:
        values: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> None:
            values.append(tensor.detach())
            if len(values) == self._saved_count:
                raise _EnoughRecomputed

        args = tuple(
            set_mark(a.detach().requires_grad_(a.requires_grad), mark_of(a))
            if isinstance(a, torch.Tensor)
            else a
            for a in self._args
        )
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, values.__getitem__)
        with suppress(_EnoughRecomputed), torch.enable_grad(), hooks:
            self._call(*args)
        if len(values) != self._saved_count:
            raise RuntimeError(
                f"expected a layer that runs again to save {self._saved_count} tensors, as in its first run, "
                f"got {len(values)}"
            )
        self._values, self._args = values, ()


def without_cache(unit: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Drop the key-value caches of Hugging Face's decoders: a second run would fill them again, and training
    does not read them."""
    if getattr(unit, "_can_checkpoint_with_cache", False):
        return kwargs
    dropped = {
        name: None
        for name, value in kwargs.items()
        if value is not None and (name in _CACHE_ARGUMENTS or _is_cache(value))
    }
    return kwargs | dropped | ({"use_cache": False} if kwargs.get("use_cache") else {})


def _is_cache(value: Any) -> bool:
    """Whether a value is one of transformers' caches; since its version 5.24, layers get it as `cache`."""
    return any(c.__module__ == "transformers.cache_utils" for c in type(value).__mro__)
