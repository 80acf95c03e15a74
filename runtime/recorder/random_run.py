"""Finds the layout of a module's result if the module looks at values that are not known: which experts the
tokens are sent to, which rows a mask leaves.

The module runs twice with random values in place of weights and arguments. If both results have the same
layout, values decide what the tensors hold and not how large they are, which is all that a recording needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from secc.runtime.recorder import nested_values
from secc.runtime.recorder.block_results import (
    BlockResult,
    ResultTensor,
    find_fakes,
    is_fake,
    result_skeleton,
    tensor_versions,
)

_RANDOM_RUN_SEEDS = (0, 1)
_Filler = Callable[[torch.Tensor], torch.Tensor]  # fills a tensor with random values in place
# Standard normal values, and integers of 0, which are always a valid index. Where the code of the module
# refuses those, values from 0 to 1 (boxes); then integers above 0 (lengths), others in the second run where
# arguments are large enough for them, as they are in most captures.
_TRIES: tuple[tuple[_Filler, tuple[int, int]], ...] = (
    (torch.Tensor.normal_, (0, 0)),
    (torch.Tensor.uniform_, (0, 0)),
    (torch.Tensor.normal_, (1, 2)),
    (torch.Tensor.normal_, (1, 1)),
)
# Values of scalars such as a loss, which code may compare with a number (`if loss > 100`).
_SCALAR_VALUES = (0.0, *(sign * size for size in (1.0, 10.0, 1e3, 1e30) for sign in (1, -1)))

# Makes a call; returns its result and the ids of the tensors in it that are independent of inputs.
CallRunner = Callable[[Callable[[], Any]], tuple[Any, frozenset[int]]]


def layout_by_random_run(
    mode: FakeTensorMode, module: nn.Module, args: Any, kwargs: Any, runs: CallRunner
) -> tuple[Any, list[tuple[ResultTensor, torch.Tensor]]] | None:
    """Return the result of `module(*args, **kwargs)` without values, and the new tensors in it. None if
    values decide its layout too.

    `runs` makes the calls. Exceptions of the module are passed on.
    """
    for fill, integers in _TRIES[:-1]:
        with suppress(Exception):
            return _layout_with_values(mode, module, args, kwargs, runs, fill, integers)
    return _layout_with_values(mode, module, args, kwargs, runs, *_TRIES[-1])


def _layout_with_values(
    mode: FakeTensorMode,
    module: nn.Module,
    args: Any,
    kwargs: Any,
    runs: CallRunner,
    fill: _Filler,
    integers: tuple[int, int],
) -> tuple[Any, list[tuple[ResultTensor, torch.Tensor]]] | None:
    """`layout_by_random_run` with arguments that `fill` fills, and `integers` in the two runs."""

    known = [t for _, t in nested_values.iter_tensors((args, kwargs))]
    unknown = find_fakes(known)
    scalars = frozenset(
        i for i, t in enumerate(known) if is_fake(t) and t.dim() == 0 and t.is_floating_point()
    )

    def run_once(seed: int, integer: int, scalar: float | None = None) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            state = {
                name: _random_state_tensor(t)
                for name, t in (*module.named_parameters(), *module.named_buffers())
            }
            random_arguments = nested_values.map_leaves(
                (args, kwargs), lambda _, value: _random_value(value, fill, integer)
            )
            tensors = [t for _, t in nested_values.iter_tensors(random_arguments)]
            if scalar is not None:
                with torch.no_grad():
                    for i in scalars:
                        tensors[i].fill_(scalar)
            versions = tensor_versions(tensors)
            out, input_independent = runs(partial(functional_call, module, state, *random_arguments))
        return result_skeleton(out, tensors, versions, input_independent, unknown)

    if returned := _returned_arguments(run_once(_RANDOM_RUN_SEEDS[0], integers[0])) & scalars:
        for value in _SCALAR_VALUES:  # another one may give another result: `if loss > 100: loss = loss / 2`
            with suppress(Exception):
                unknown |= returned - _returned_arguments(run_once(_RANDOM_RUN_SEEDS[0], integers[0], value))
    skeletons = list(map(run_once, _RANDOM_RUN_SEEDS, integers))
    if skeletons[0] is None or len({_describe_layout(s) for s in skeletons}) > 1:
        return None
    skeleton = skeletons[-1]
    if _lacks_gradient(skeleton, [*known, *module.parameters()]):
        with suppress(Exception):
            _add_gradients(skeleton, run_once(_RANDOM_RUN_SEEDS[0], integer=1))
        run_once(_RANDOM_RUN_SEEDS[-1], integers[-1])  # what `runs` notes of the last run counts
    return BlockResult(skeleton, False, (), ()).build_fakes(mode, known)


def _describe_layout(skeleton: Any) -> str:
    """Return a text that is equal for results of one layout."""
    return repr(nested_values.map_leaves(skeleton, _leaf_layout))


def _result_tensors(skeleton: Any) -> list[ResultTensor]:
    found = list[ResultTensor]()
    nested_values.map_leaves(
        skeleton, lambda _, leaf: found.append(leaf) if isinstance(leaf, ResultTensor) else None
    )
    return found


def _returned_arguments(skeleton: Any) -> frozenset[int]:
    """Return the numbers of the tensor arguments that a result holds as they are."""
    return frozenset(
        leaf.argument_index for leaf in _result_tensors(skeleton) if leaf.argument_index is not None
    )


def _lacks_gradient(skeleton: Any, given: Iterable[torch.Tensor]) -> bool:
    """Whether a result has a tensor of floats without a gradient although the module is given some with one:
    where lengths are 0, code may leave out all that depends on these."""
    found = _result_tensors(skeleton)
    without = any(leaf.dtype.is_floating_point and not leaf.requires_grad for leaf in found)
    return without and torch.is_grad_enabled() and any(t.requires_grad for t in given)


def _add_gradients(skeleton: Any, other: Any) -> None:
    """Let the tensors of a result have a gradient where those of another run have one, if both results have
    the same shapes."""
    pairs = list(zip(_result_tensors(skeleton), _result_tensors(other), strict=True))
    if all((a.path, a.shape, a.dtype) == (b.path, b.shape, b.dtype) for a, b in pairs):
        for a, b in pairs:
            a.requires_grad |= b.requires_grad


def _random_state_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter or buffer with values. The rows of a large one repeat one value each, which takes
    hardly any memory."""
    if not is_fake(tensor):
        return tensor.detach().clone()
    if not tensor.is_floating_point() or tensor.ndim < 2:
        return _random_value(tensor)
    rows = torch.randn(tensor.shape[0], *(1 for _ in tensor.shape[1:])).to(tensor.dtype)
    return rows.requires_grad_(tensor.requires_grad).expand(tensor.shape)


def _random_value(value: Any, fill: _Filler = torch.Tensor.normal_, integer: int = 0) -> Any:
    """Return a tensor with random values in place of a fake one, not a leaf of autograd; all integers are
    `integer`."""
    if not is_fake(value):
        return value
    if not value.is_floating_point() and not value.is_complex():
        values = (
            torch.rand(value.shape) < 0.5 if value.dtype is torch.bool else torch.full(value.shape, integer)
        )
        return values.to(value.dtype)
    values = fill(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype))
    return values.requires_grad_().clone() if value.requires_grad and torch.is_grad_enabled() else values


def _leaf_layout(_: str, leaf: Any) -> Any:
    return (
        (leaf.shape, leaf.dtype, leaf.requires_grad, leaf.argument_index, leaf.is_input_independent)
        if isinstance(leaf, ResultTensor)
        else leaf
    )
