"""Finds out whether ranks that hold some of the parameters, or parts of them, update them as one process
would under the user's own function that makes the optimizer, with the hooks that it registers.

A hook may look at anything: norms of parameters, all gradients, the parameters that the function was given.
So the function is called with parameters of the same names and random values, and the steps of an optimizer
that keeps a part of them are compared with those of the whole one. Optimizers of torch that treat each entry
alone, without hooks, need no steps (`elementwise_check` tries optimizers without their hooks). What hooks
remember is put back (`hook_state`). Ranks try nothing: hooks may write to the model, such as averages of its
weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn, optim

from secc.runtime.model.source_lines import current_source_line
from secc.runtime.parameters.elementwise_check import ELEMENTWISE_OPTIMIZERS
from secc.runtime.parameters.hook_state import numbers_of_hooks, restored_hook_state
from secc.runtime.parameters.outside_weights import WatchedTensors
from secc.runtime.parameters.sharded_optimizer import ParameterSlice, shard_optimizer

NamedParams = list[tuple[str, nn.Parameter]]
BuildOptimizer = Callable[[NamedParams], optim.Optimizer]

_IN_TRIAL = ContextVar("in_trial", default=False)
_STEP_SCALES = (1.0, 1e4, 1e-3, 30.0)  # of gradients: a bound on their norm acts on some of them
_LEARNING_RATE = 1e-2  # replaces the user's, which may be zero during warm-up
_MOST_REAL_ENTRIES = 1 << 20  # of all parameters; of more, each dim has at most
_FEW = 6
_MOST_UPDATES = 1 << 16  # of parameters in the steps of one comparison
_TOLERANCE = 1e-3  # of the largest change of a parameter, which float32 rounds


def why_not_apart(build: BuildOptimizer, trained: Mapping[str, torch.Tensor]) -> str | None:
    """Returns why ranks that hold some of the trained parameters (any shapes) would not update them as one
    process does that holds all; None if they would, or if `build` cannot work on small parameters."""
    return _compare_parts(build, trained, _divide_names)


def why_not_sliced(build: BuildOptimizer, trained: Mapping[str, torch.Tensor]) -> str | None:
    """Returns why ranks that hold a part of each trained parameter (any shapes) would not update it as one
    process does; None if they would, or if `build` cannot work on small parameters."""
    return _compare_parts(build, trained, _divide_entries)


def why_whole_model(build: BuildOptimizer, trained: Mapping[str, torch.Tensor]) -> str | None:
    """Returns why ranks must hold the whole model for a step: the optimizer, or a hook, takes parameters from
    it that `build` was not given, as for a teacher that follows its student. None if it takes none, or if
    `build` cannot work on small parameters."""
    found = find_outside_parameters(build, trained)
    if not found:
        return None
    return f"the step of the optimizer uses parameters of the model that it was not given ({found[0][1]})"


def find_outside_parameters(
    build: BuildOptimizer, trained: Mapping[str, torch.Tensor]
) -> list[tuple[nn.Parameter, str]]:
    """Returns the parameters that a step of the optimizer, or a hook, takes from the model, with the lines;
    none if `build` cannot work on small parameters."""
    given, found = list[nn.Parameter](), dict[nn.Parameter, str]()

    def build_and_note(params: NamedParams) -> optim.Optimizer:
        given.extend(p for _, p in params)
        return build(params)

    def note_parameter(tensor: torch.Tensor) -> None:
        if isinstance(tensor, nn.Parameter) and all(tensor is not p for p in given):
            found.setdefault(tensor, current_source_line())

    starts = {n: torch.ones([min(e, _FEW) for e in p.shape]) for n, p in trained.items()}
    token = _IN_TRIAL.set(True)
    try:
        optimizer = build([(n, nn.Parameter(start)) for n, start in starts.items()])
        if type(optimizer) not in ELEMENTWISE_OPTIMIZERS or has_hooks(optimizer):
            with WatchedTensors(note_parameter):
                whole = {n: (0, start.numel()) for n, start in starts.items()}
                _step_on_part(build_and_note, starts, [starts] * _count_steps(optimizer, len(starts)), whole)
    except Exception:  # whatever the user's code does with parameters that are not the model's
        pass
    finally:
        _IN_TRIAL.reset(token)
    return list(found.items())


def _count_steps(optimizer: optim.Optimizer, parameters: int) -> int:
    """Returns how many steps show what the hooks of an optimizer do that may act in every Nth only: twice the
    largest number that they name, if that is not too much work for `parameters` parameters."""
    if not has_hooks(optimizer):
        return len(_STEP_SCALES)
    named = [n for n in numbers_of_hooks(_hooks_of(optimizer)) if 2 * n < _MOST_UPDATES // max(1, parameters)]
    return max(2 * len(_STEP_SCALES), 2 * max(named, default=0) + 1)


def is_trial_step() -> bool:
    """Whether the running step of an optimizer is one of a comparison, for hooks that keep what they see."""
    return _IN_TRIAL.get()


def has_hooks(optimizer: optim.Optimizer) -> bool:
    """Whether code of the user's runs before or after each step of this optimizer."""
    return bool(_hooks_of(optimizer))


def _hooks_of(optimizer: optim.Optimizer) -> list[Callable[..., Any]]:
    tables = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return [hook for table in tables for hook in table.values()]


Part = dict[str, tuple[int, int]]  # the entries of each parameter that a rank holds: from, to


def _divide_names(sizes: Mapping[str, int]) -> list[Part]:
    names = list(sizes)
    return [{n: (0, sizes[n] * (i % 2 == k)) for i, n in enumerate(names)} for k in (0, 1)]


def _divide_entries(sizes: Mapping[str, int]) -> list[Part]:
    cuts = {n: (size + 1) // 2 for n, size in sizes.items()}
    return [{n: (0, cuts[n]) for n in sizes}, {n: (cuts[n], sizes[n]) for n in sizes}]


def _compare_parts(
    build: BuildOptimizer,
    trained: Mapping[str, torch.Tensor],
    divide: Callable[[Mapping[str, int]], list[Part]],
) -> str | None:
    large = sum(p.numel() for p in trained.values()) > _MOST_REAL_ENTRIES
    shapes = {n: [min(e, _FEW) if large else e for e in p.shape] for n, p in trained.items()}
    token = _IN_TRIAL.set(True)
    try:
        return _compare_steps(build, shapes, divide)
    finally:
        _IN_TRIAL.reset(token)


def _compare_steps(
    build: BuildOptimizer,
    shapes: Mapping[str, list[int]],
    divide: Callable[[Mapping[str, int]], list[Part]],
) -> str | None:
    generator = torch.Generator().manual_seed(0)
    starts = {n: torch.ones(shape) for n, shape in shapes.items()}
    try:
        optimizer = build([(n, nn.Parameter(start)) for n, start in starts.items()])
        if type(optimizer) in ELEMENTWISE_OPTIMIZERS and not has_hooks(optimizer):
            return None
        starts = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
        gradients = [
            {n: scale * torch.randn(shape, generator=generator) for n, shape in shapes.items()}
            for scale in itertools.islice(itertools.cycle(_STEP_SCALES), _count_steps(optimizer, len(starts)))
        ]
        sizes = {n: start.numel() for n, start in starts.items()}
        everything = {n: (0, size) for n, size in sizes.items()}
        whole, again = (_step_on_part(build, starts, gradients, everything) for _ in range(2))
    except Exception:  # whatever the user's code does with parameters that are not the model's
        return None
    if any(not torch.equal(whole[n], again[n]) for n in whole):
        return None  # it draws random numbers
    name = type(optimizer).__name__
    for part in divide(sizes):
        try:
            changed = _step_on_part(build, starts, gradients, part)
        except Exception as error:  # as above
            return f"{name} does not step on a part of the parameters: {error}"
        for n, (start, stop) in part.items():
            moved = (whole[n] - starts[n].flatten()).abs()
            difference = (changed[n] - whole[n])[start:stop].abs()
            if difference.numel() and difference.max() > _TOLERANCE * moved.max():
                others = "others" if stop - start == sizes[n] else "others, or its other entries,"
                return f"{name} updates {n} differently where {others} are not updated with it"
    return None


def _step_on_part(
    build: BuildOptimizer,
    starts: Mapping[str, torch.Tensor],
    gradients: Sequence[Mapping[str, torch.Tensor]],
    part: Part,
) -> dict[str, torch.Tensor]:
    """Returns all parameters, flat, after steps of an optimizer that is left with a part of them."""
    params = {n: nn.Parameter(start.clone()) for n, start in starts.items()}
    optimizer = build(list(params.items()))
    slices: dict[nn.Parameter, Any] = {}
    held = dict(params)
    for name, (start, stop) in part.items():
        param, size = params[name], params[name].numel()
        if stop - start < size:
            piece = nn.Parameter(param.detach().flatten()[start:stop].clone())
            made = (piece, ParameterSlice(name, param.shape, start, stop)) if stop > start else None
            slices[param] = made
            held[name] = piece
    shard_optimizer(optimizer, slices)
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), float):
            group["lr"] = _LEARNING_RATE
    with restored_hook_state(_hooks_of(optimizer)):
        for step in gradients:
            for name, (start, stop) in part.items():
                if stop > start:
                    held[name].grad = step[name].flatten()[start:stop].view_as(held[name]).clone()
            optimizer.step()
    found: dict[str, torch.Tensor] = {}
    for name, (start, stop) in part.items():
        found[name] = starts[name].flatten().clone()
        found[name][start:stop] = held[name].detach().flatten()[: stop - start]
    return found
