"""Optimizers with hooks that look beyond an entry, or beyond a parameter, are told from those that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from secc.runtime.parameters.optimizer_parts import (
    NamedParams,
    why_not_apart,
    why_not_sliced,
    why_whole_model,
)

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


COUNTS: dict[str, Any] = {"steps": 0, "norms": []}
STEPS = 0


class Counter:
    """A hook that counts what it sees, in itself and in variables of the file."""

    def __init__(self) -> None:
        self.steps, self.seen, self.mean = 0, [torch.zeros(2)], {"norm": torch.zeros(())}

    def __call__(self, found: optim.Optimizer, *_: Any) -> None:
        self.steps += 1
        self.seen[0] += 1
        self.seen.append(torch.ones(2))
        self.mean["norm"] = self.mean["norm"] + 1
        count_in_file()
        clip_all([p for g in found.param_groups for p in g["params"] if p.grad is not None])


def count_in_file() -> None:
    global STEPS
    STEPS += 1  # pyright: ignore[reportConstantRedefinition]
    COUNTS["steps"] += 1
    COUNTS["norms"].append(1)


@pytest.mark.parametrize("as_method", [False, True])
def test_what_hooks_remember_is_put_back(as_method: bool) -> None:
    counter, outer = Counter(), [0]

    def build(params: NamedParams) -> optim.Optimizer:
        optimizer = optim.SGD([p for _, p in params], lr=0.1)
        optimizer.register_step_pre_hook(counter.__call__ if as_method else counter)
        optimizer.register_step_post_hook(lambda *_: outer.append(1))
        return optimizer

    assert "differently where others" in (why_not_apart(build, PARAMETERS) or "")
    assert (counter.steps, len(counter.seen), float(counter.mean["norm"])) == (0, 1, 0.0)
    assert torch.equal(counter.seen[0], torch.zeros(2)) and outer == [0]
    assert (STEPS, COUNTS) == (0, {"steps": 0, "norms": []})


def follow(params: NamedParams) -> optim.Optimizer:
    """A teacher that follows parameters which the hook finds elsewhere than in what it was given."""
    optimizer = optim.SGD([p for _, p in params], lr=0.1)

    def after(*_: Any) -> None:
        PARAMETERS["embed"].data.mul_(0.5)

    optimizer.register_step_post_hook(after)
    return optimizer


def average(params: NamedParams) -> optim.Optimizer:
    """Averages of what was given, and sizes of what was not."""
    optimizer = optim.SGD([p for _, p in params], lr=0.1)
    averages = {p: p.detach().clone() for _, p in params}

    def after(*_: Any) -> None:
        for p, kept in averages.items():
            kept.lerp_(p, 1 / PARAMETERS["embed"].shape[0])

    optimizer.register_step_post_hook(after)
    return optimizer


def test_hooks_that_use_other_parameters_than_given_are_found() -> None:
    found = why_whole_model(follow, PARAMETERS)
    assert found is not None and "test_optimizer_parts.py:" in found
    assert why_whole_model(average, PARAMETERS) is None
    assert why_whole_model(with_hook(clip_all), PARAMETERS) is None
