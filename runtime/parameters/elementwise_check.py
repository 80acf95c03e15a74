"""Decides whether an optimizer is elementwise, that is, whether replicas may each step on a part of a
parameter.

torch's own elementwise optimizers are known by type. Any other optimizer steps on a random matrix and, from
the same values, on the same matrix split into two vectors. An optimizer that uses a tensor's norm, rows or
shape gives different results, or fails, and must not be sharded. In the same way an optimizer is tried that
is to step on some parameters after others.
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


def why_not_elementwise(optimizer: optim.Optimizer) -> str | None:
    """Returns the reason why the optimizer cannot be sharded, or None if it can."""
    if type(optimizer) in ELEMENTWISE_OPTIMIZERS:
        return None
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
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
    return None


def why_not_stepwise(optimizer: optim.Optimizer) -> str | None:
    """Returns the reason why parameters cannot be updated in turn, each with the others left out of the
    optimizer's groups; None if they can."""
    if type(optimizer) in ELEMENTWISE_OPTIMIZERS:
        return None
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
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
    """Steps on a random matrix and on its two parts. Returns (initial values, matrix after the steps, parts
    after the steps), all flat and float32."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-1, 1, 24)
    values = [torch.randn(24, generator=generator) * scale for _ in range(1 + _PROBE_STEPS)]
    device = torch.device("cpu") if like.is_meta else like.device
    start, *gradients = (v.to(device) for v in values)
    whole = nn.Parameter(start.clone().view(_PROBE_SHAPE))
    parts = [nn.Parameter(start[:_PROBE_SPLIT].clone()), nn.Parameter(start[_PROBE_SPLIT:].clone())]
    probes = [_copy_optimizer(optimizer, group, params) for params in ([whole], parts)]
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
