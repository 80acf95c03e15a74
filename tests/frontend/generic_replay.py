"""Runs a generic graph at given sizes with the user's modules, and compares loss and gradients with the eager
model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx, nn

from secc.frontend.capture.capture import Capture, capture_model
from secc.frontend.capture.generalize import GenericGraph
from secc.frontend.dataset.input_symbols import describe_inputs
from secc.frontend.dataset.sampling import survey_dataset
from secc.ir.dialect.size_expr import evaluate_size
from secc.runtime.model.meta_build import build_meta_model
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.batch_sizes import read_symbol_sizes
from secc.runtime.recorder import Replay
from secc.runtime.training.eager_reference import LossAndGradients, compare_results, copy_gradients, run_eager


class GenericReplay(Replay):
    """Evaluates the expressions in a generic graph's arguments at `sizes`."""

    def __init__(self, model: nn.Module, generic: GenericGraph, sizes: Mapping[str, int]) -> None:
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
                return evaluate_size(value, self.sizes)
            case list() | tuple():
                return type(value)(self._value(v) for v in value)
            case dict():
                return {k: self._value(v) for k, v in value.items()}
            case _:
                return value


def capture_user_model(user: UserModel, **options: Any) -> Capture:
    """The capture of a model file as `secc compile` makes it."""
    drawn = survey_dataset(user)
    return capture_model(user, build_meta_model(user), drawn, describe_inputs(user, drawn), **options)


def build_real_model(user: UserModel) -> nn.Module:
    """The model with random weights."""
    torch.manual_seed(0)
    return user.build_model()


def assert_equals_eager(
    user: UserModel, found: Capture, samples: list[dict[str, Any]], model: nn.Module
) -> None:
    """The generic graph of the samples' pattern gives eager's loss and gradients."""
    batch = user.collate(samples)
    pattern = found.optional_keys & batch.keys()
    case = next(c for c in found.cases if c.pattern == pattern)
    reference = run_eager(model, batch)
    sizes = read_symbol_sizes(batch, found.inputs.symbols, len(samples))
    loss = GenericReplay(model, case.generic, sizes).compute_loss(batch)
    loss.backward()
    difference = compare_results(LossAndGradients(float(loss.detach()), copy_gradients(model)), reference)
    model.zero_grad()
    assert difference.is_exact, difference
