"""Decides what of a model different ranks may update: whole parameters, parts of them, or neither.

torch's own elementwise optimizers are known by type. Any other optimizer steps on a random matrix, and from
the same values two optimizers step on its two parts, as replicas with sharded states do. An optimizer that
uses a tensor's norm, rows or shape gives different results, or fails, and must not be sharded. In the same
way an optimizer is tried that has only some of the parameters, as ranks with different sections or stages
do, and one that steps on some parameters after others.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import nn, optim

ELEMENTWISE_OPTIMIZERS = frozenset({
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adadelta, optim.Adagrad,
    optim.ASGD, optim.RMSprop, optim.Rprop,
})  # fmt: skip
_PROBE_STEPS = 3
_PROBE_SHAPE, _PROBE_SPLIT = (4, 6), 9  # the two parts differ in length, rows and norm
_PROBE_LEARNING_RATE = 1e-2  # replaces the user's, which may be zero during warm-up
# Of the gradients of two matrices in turn: limits of norms apply to large ones, and learning rates that adapt
# to all parameters (Prodigy, D-Adaptation) grow while gradients point the same way.
_PROBE_SCALES = ((0.01, 1.0), (1.0, 0.1), (1000.0, 10.0), (1.0, 100.0), (0.1, 1.0), (1.0, 1.0))


def _groups_with_parameters(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    return [group for group in optimizer.param_groups if group["params"]]


def why_not_elementwise(optimizer: optim.Optimizer) -> str | None:
    """Returns the reason why the optimizer cannot be sharded, or None if it can."""
    if type(optimizer) in ELEMENTWISE_OPTIMIZERS:
        return None
    name = type(optimizer).__name__
    for group in _groups_with_parameters(optimizer):
        try:
            before, whole, pieces = _step_whole_and_split(optimizer, group, group["params"][0])
        except (
            Exception
        ) as error:  # whatever the user's optimizer does with parameters that are not the model's
            return f"{name} does not step on a part of a parameter: {error}"
        if torch.equal(before, whole):
            return f"{name} does not step on the parameters in its param_groups"
        if not torch.allclose(whole, pieces, rtol=1e-4, atol=1e-6):
            return f"{name} is not elementwise: a step on a matrix differs from a step on its parts"
    return why_coupled(optimizer)  # it steps on other parameters, as it has just done


def why_coupled(optimizer: optim.Optimizer) -> str | None:
    """Returns the reason why an optimizer of some parameters does not update them as one of all parameters
    does (it uses a norm over all, or adapts one learning rate to all); None if it does.

    Raises CannotProbe if it does not step on parameters that are not the model's.
    """
    if type(optimizer) in ELEMENTWISE_OPTIMIZERS:
        return None
    name = type(optimizer).__name__
    for group in _groups_with_parameters(optimizer):
        try:
            together, apart = _updates_together_and_apart(optimizer, group, group["params"][0])
        except Exception as error:  # whatever the user's optimizer does with parameters not the model's
            raise CannotProbe(f"{name} does not step on other parameters than the model's: {error}") from None
        if not together.any():
            return f"{name} does not step on the parameters in its param_groups"
        if float((together - apart).norm()) > 1e-3 * float(together.norm()):
            return f"{name} updates a parameter differently where it has other parameters, too"
    return None


class CannotProbe(Exception):
    """An optimizer does not step on random parameters; the text says why."""


def _updates_together_and_apart(
    optimizer: optim.Optimizer, group: dict[str, Any], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps on two matrices with one optimizer and with one for each. Returns how far each entry has moved,
    flat, in both cases. Entries are small, so that small steps are exact."""
    generator = torch.Generator().manual_seed(0)
    device = torch.device("cpu") if like.is_meta else like.device
    start, direction = torch.randn(2, 2, *_PROBE_SHAPE, generator=generator)
    start *= 1e-4
    noise = torch.randn(len(_PROBE_SCALES), 2, *_PROBE_SHAPE, generator=generator) / 10
    results: list[torch.Tensor] = []
    for owned in ([[0, 1]], [[0], [1]]):
        params = [nn.Parameter(matrix.to(device, copy=True)) for matrix in start]
        probes = [_copy_optimizer(optimizer, group, [params[i] for i in own]) for own in owned]
        for scales, other in zip(_PROBE_SCALES, noise, strict=True):
            for param, scale, gradient in zip(params, scales, direction + other, strict=True):
                param.grad = (scale * gradient).to(device)
            for probe in probes:
                probe.step()
        moved = torch.stack([p.detach().cpu() for p in params]).double() - start.double()
        results.append(moved.flatten())
    return results[0], results[1]


def why_not_stepwise(optimizer: optim.Optimizer) -> str | None:
    """Returns the reason why parameters cannot be updated in turn, each with the others left out of the
    optimizer's groups; None if they can."""
    if type(optimizer) in ELEMENTWISE_OPTIMIZERS:
        return None
    name = type(optimizer).__name__
    for group in _groups_with_parameters(optimizer):
        try:
            together, in_turn = _step_together_and_in_turn(optimizer, group, group["params"][0])
        except Exception as error:  # whatever the user's optimizer does with part of its parameters
            return f"{name} does not step on some of its parameters alone: {error}"
        if not torch.equal(together, in_turn):
            return f"{name} updates a parameter differently where others are updated before or after it"
    return None


def _step_together_and_in_turn(
    optimizer: optim.Optimizer, group: dict[str, Any], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps on two random matrices, at once and one after the other. Returns both, flat, after the steps."""
    generator = torch.Generator().manual_seed(0)
    device = torch.device("cpu") if like.is_meta else like.device
    start, *gradients = (
        torch.randn(2, *_PROBE_SHAPE, generator=generator).to(device) for _ in range(1 + _PROBE_STEPS)
    )
    results: list[torch.Tensor] = []
    for turns in ([[0, 1]], [[0], [1]]):
        params = [nn.Parameter(matrix.clone()) for matrix in start]
        probe = _copy_optimizer(optimizer, group, params)
        for gradient in gradients:
            for param, own in zip(params, gradient, strict=True):
                param.grad = own.clone()
            for turn in turns:
                probe.param_groups[0]["params"] = [params[i] for i in turn]
                probe.step()
        results.append(torch.cat([p.detach().flatten() for p in params]))
    return results[0], results[1]


def _step_whole_and_split(
    optimizer: optim.Optimizer, group: dict[str, Any], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Steps on a random matrix and, with an optimizer for each, on its two parts. Returns (initial values,
    matrix after the steps, parts after the steps), all flat and float32."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-1, 1, 24)
    values = [torch.randn(24, generator=generator) * scale for _ in range(1 + _PROBE_STEPS)]
    device = torch.device("cpu") if like.is_meta else like.device
    start, *gradients = (v.to(device) for v in values)
    whole = nn.Parameter(start.clone().view(_PROBE_SHAPE))
    parts = [nn.Parameter(start[:_PROBE_SPLIT].clone()), nn.Parameter(start[_PROBE_SPLIT:].clone())]
    probes = [_copy_optimizer(optimizer, group, [param]) for param in (whole, *parts)]
    for gradient in gradients:
        whole.grad = gradient.clone().view(_PROBE_SHAPE)
        for part_param, part_gradient in zip(
            parts, (gradient[:_PROBE_SPLIT], gradient[_PROBE_SPLIT:]), strict=True
        ):
            part_param.grad = part_gradient.clone()
        for probe in probes:
            probe.step()
    return start.float(), whole.detach().flatten().float(), torch.cat([p.detach() for p in parts]).float()


def _copy_optimizer(
    optimizer: optim.Optimizer, group: dict[str, Any], params: list[nn.Parameter]
) -> optim.Optimizer:
    """Returns a copy of the optimizer with other parameters, without its state and hooks."""
    probe = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__)
    probe.state = defaultdict(dict)
    options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    if "lr" in options:
        options["lr"] = _PROBE_LEARNING_RATE
    probe.param_groups = [{**copy.deepcopy(options), "params": params}]
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(probe, hooks, OrderedDict())
    return probe
