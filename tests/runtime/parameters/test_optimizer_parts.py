"""Optimizers with hooks that look beyond an entry, or beyond a parameter, are told from those that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from secc.runtime.parameters.optimizer_parts import NamedParams, why_not_apart, why_not_sliced

PARAMETERS = {
    "embed": nn.Parameter(torch.ones(5, 4)),
    "layers.0": nn.Parameter(torch.ones(4, 4)),
    "layers.1": nn.Parameter(torch.ones(4)),
}


def with_hook(limit: Any) -> Any:
    """An optimizer that calls `limit(params)` before each step."""

    def build(params: NamedParams) -> optim.Optimizer:
        optimizer = optim.SGD([p for _, p in params], lr=0.1)

        def before(found: optim.Optimizer, *_: Any) -> None:
            limit([p for g in found.param_groups for p in g["params"] if p.grad is not None])

        optimizer.register_step_pre_hook(before)
        return optimizer

    return build


def clip_all(params: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(params, 0.1)


def clip_each(params: list[nn.Parameter]) -> None:
    for p in params:
        nn.utils.clip_grad_norm_([p], 0.1)


def clip_entries(params: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_value_(params, 0.1)


def clip_what_was_given(params: NamedParams) -> optim.Optimizer:
    optimizer = optim.SGD([p for _, p in params], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: clip_all([p for _, p in params if p.grad is not None]))
    return optimizer


def mask_rows(params: NamedParams) -> optim.Optimizer:
    """Updates even rows of matrices only, by masks of their shapes."""
    optimizer = optim.SGD([p for _, p in params], lr=0.1)
    masks = {p: (torch.arange(p.shape[0]) % 2 == 0).float().view(-1, *[1] * (p.ndim - 1)) for _, p in params}

    def before(found: optim.Optimizer, *_: Any) -> None:
        for p in found.param_groups[0]["params"]:
            p.grad.mul_(masks[p])

    optimizer.register_step_pre_hook(before)
    return optimizer


@pytest.mark.parametrize(
    ("build", "is_coupled", "is_uncuttable"),
    [
        (lambda p: optim.AdamW([q for _, q in p]), False, False),
        (with_hook(clip_all), True, True),
        (with_hook(clip_each), False, True),
        (with_hook(clip_entries), False, False),
        (clip_what_was_given, True, True),
        (mask_rows, False, True),
    ],
)
def test_hooks_that_look_beyond_an_entry_are_found(build: Any, is_coupled: bool, is_uncuttable: bool) -> None:
    assert bool(why_not_apart(build, PARAMETERS)) == is_coupled
    assert bool(why_not_sliced(build, PARAMETERS)) == is_uncuttable
    assert all(torch.equal(p, torch.ones_like(p)) for p in PARAMETERS.values())


def test_nothing_is_known_of_an_optimizer_that_fails_on_other_parameters() -> None:
    def build(params: NamedParams) -> optim.Optimizer:
        raise ValueError(params[0][0])

    assert why_not_apart(build, PARAMETERS) is None
