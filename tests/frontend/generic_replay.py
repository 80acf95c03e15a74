"""Runs a generic graph at given sizes with the user's modules, and compares loss and gradients with the eager
model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx, nn

from secc.frontend.capture.capture import Capture, capture
from secc.frontend.capture.generalize import Generic
from secc.frontend.dataset.eager_reference import Result, compare, eager, gradients
from secc.frontend.dataset.input_symbols import describe
from secc.frontend.dataset.sampling import survey
from secc.ir.dialect.size_expr import evaluate
from secc.runtime.model.meta_build import meta_model
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.batch_sizes import sizes_of
from secc.runtime.recorder import Replay


class GenericReplay(Replay):
    """Evaluates the expressions in a generic graph's arguments at `sizes`."""

    def __init__(self, model: nn.Module, generic: Generic, sizes: Mapping[str, int]) -> None:
        super().__init__(model, generic.graph, generic.constants)
        self.sizes = sizes

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        if n.op == "output":
            return super().fetch_args_kwargs_from_env(n)
        return self._value(n.meta["args"]), self._value(n.meta["kwargs"])

    def _value(self, value: Any) -> Any:
        match value:
            case fx.Node():
                return self.env[value]
            case sympy.Expr():
                return evaluate(value, self.sizes)
            case list() | tuple():
                return type(value)(self._value(v) for v in value)
            case dict():
                return {k: self._value(v) for k, v in value.items()}
            case _:
                return value


def captured(user: UserModel, **options: Any) -> Capture:
    """The capture of a model file as `secc compile` makes it."""
    drawn = survey(user)
    return capture(user, meta_model(user), drawn, describe(user, drawn), **options)


def real_model(user: UserModel) -> nn.Module:
    """The model with random weights."""
    torch.manual_seed(0)
    return user.model()


def assert_exact(user: UserModel, found: Capture, samples: list[dict[str, Any]], model: nn.Module) -> None:
    """The generic graph of the samples' pattern gives eager's loss and gradients."""
    batch = user.collate(samples)
    pattern = found.optional & batch.keys()
    case = next(c for c in found.cases if c.pattern == pattern)
    reference = eager(model, batch)
    sizes = sizes_of(batch, found.inputs.symbols, len(samples))
    loss = GenericReplay(model, case.generic, sizes).loss(batch)
    loss.backward()
    difference = compare(Result(float(loss.detach()), gradients(model)), reference)
    model.zero_grad()
    assert difference.exact, difference
