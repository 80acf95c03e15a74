"""The eager model as reference: what plain PyTorch computes with a whole batch in one process.

Every claim of exactness is a comparison with this, under the tolerances that are written down here once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from secc.runtime.model.nested_batch import unflatten_batch
from secc.runtime.model.user_file import UserModel, extract_loss
from secc.runtime.plan.batch_sizes import read_symbol_sizes
from secc.runtime.plan.schema import RandomOp, Symbol
from secc.runtime.plan.step_program import SampleMeta
from secc.runtime.randomness.micro_batch_draws import (
    MicroBatchDraws,
    ModelRandomness,
    backward_context,
    forward_context,
    make_sample_keys,
)
from secc.runtime.training.eager_watch import EagerWatch, memory_errors

LOSS_TOLERANCE = 1e-6  # relative
GRADIENT_TOLERANCE = 1e-5  # of the parameter's own gradient norm, plus
GRADIENT_FLOOR = 1e-8  # of the norm of all gradients: some gradients, such as a key bias, are rounding noise
# In 16 bits, in unit round-offs. Each way to split a batch rounds differently, and k independent roundings
# to nearest differ by about sqrt(k) unit round-offs: k = 25 on the way to a loss, which is a mean, and 170 on
# the way through forward and backward to a gradient. The loss of plain PyTorch in bfloat16 was observed 1 %
# off its value in float32 at the same weights, which is 2.6 unit round-offs.
_LOSS_ROUND_OFFS, _GRADIENT_ROUND_OFFS, _FLOOR_ROUND_OFFS = 5, 13, 0.5


@dataclass(frozen=True)
class Tolerances:
    """How far results may be from the reference. loss: relative. gradient: a share of the norm of the
    parameter's own gradient, plus floor: a share of the norm of all gradients. dtype: the coarsest that
    is computed in."""

    loss: float
    gradient: float
    floor: float
    dtype: torch.dtype

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}: loss {self.loss:.2g}, gradients {self.gradient:.2g} + {self.floor:.2g} of all"


FLOAT32_TOLERANCES = Tolerances(LOSS_TOLERANCE, GRADIENT_TOLERANCE, GRADIENT_FLOOR, torch.float32)


def derive_tolerances(dtypes: Iterable[torch.dtype]) -> Tolerances:
    """Returns the tolerances of code that computes in float32 or wider and in these 16-bit floats: multiples
    of the unit round-off of the coarsest."""
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
    if torch.finfo(coarsest).bits > 16:
        return FLOAT32_TOLERANCES
    round_off = torch.finfo(coarsest).eps / 2
    return Tolerances(
        _LOSS_ROUND_OFFS * round_off,
        _GRADIENT_ROUND_OFFS * round_off,
        _FLOOR_ROUND_OFFS * round_off,
        coarsest,
    )


REFERENCE_SEED = 0  # of the step that a comparison stands for

Gradients = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class LossAndGradients:
    """The loss and the gradient of each trainable parameter, None where the loss does not reach it. A tied
    parameter is listed once. changes: what forward added to buffers, where that was looked at. narrow: the
    16-bit floats that plain PyTorch's forward computed in. needs_watch: whether `EagerWatch` may see
    something when the same samples run with more padding."""

    loss: float
    gradients: Gradients
    changes: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    narrow: frozenset[torch.dtype] = frozenset()
    needs_watch: bool = True


def run_eager(
    model: nn.Module,
    batch: Mapping[str, Any],
    draws: MicroBatchDraws | None = None,
    watches: bool = True,
    backward: bool = True,
) -> LossAndGradients:
    """Runs one forward and, unless told otherwise, backward of the model on `batch`. Gradients of the model
    are cleared before and after.

    draws: the random numbers of the batch's samples, for a model that draws any. Raises IndexError for
    targets that torch does not check, and NotEnoughMemory; without `watches` only where torch gets no memory.
    """
    model.zero_grad(set_to_none=True)
    watch = EagerWatch()
    with memory_errors():
        with watch if watches else nullcontext(), forward_context(draws):
            loss = extract_loss(model(**unflatten_batch(batch)))
        if backward and loss.requires_grad:  # not if what trains is what only other samples reach
            with backward_context(draws):
                loss.backward()
    loss_value = float(loss.detach().double())
    result = LossAndGradients(
        loss_value,
        copy_gradients(model),
        narrow=frozenset(watch.found),
        needs_watch=not (watches and watch.would_see_nothing),
    )
    model.zero_grad(set_to_none=True)
    return result


class PlanRandomness:
    """Random numbers of a model's batches as plans draw them, for a whole batch that runs as one
    micro-batch."""

    def __init__(self, model: nn.Module, draws: Sequence[RandomOp], symbols: Sequence[Symbol]) -> None:
        self._randomness = ModelRandomness(model, draws, symbols) if draws else None
        self._symbols = symbols

    def draws_for(
        self, user: UserModel, samples: Sequence[Mapping[str, Any]], widths: Mapping[str, int] | None = None
    ) -> MicroBatchDraws | None:
        """Returns the random numbers of `samples` in one batch padded to `widths`; None for a model that
        draws none."""
        if self._randomness is None:
            return None
        sizes = [read_symbol_sizes(user.collate([s]), self._symbols) for s in samples]
        metas = [SampleMeta(i, frozenset(), s) for i, s in enumerate(sizes)]
        return self._randomness.make_draws(
            REFERENCE_SEED,
            make_sample_keys(REFERENCE_SEED, metas),
            [{**sample_sizes, **(widths or {})} for sample_sizes in sizes],
        )


def copy_gradients(model: nn.Module) -> Gradients:
    """Returns a copy of every trainable parameter's gradient."""
    return {
        n: None if p.grad is None else p.grad.detach().clone()
        for n, p in model.named_parameters()
        if p.requires_grad
    }


@dataclass(frozen=True)
class ResultDifference:
    """Distance from the reference in units of the tolerance: up to 1 is exact. worst: the parameter with
    the largest gradient distance."""

    loss: float
    gradient: float
    worst: str

    @property
    def is_exact(self) -> bool:
        """Whether loss and gradients are within the tolerances."""
        return self.loss <= 1 and self.gradient <= 1


def compare_results(
    result: LossAndGradients, reference: LossAndGradients, tolerances: Tolerances = FLOAT32_TOLERANCES
) -> ResultDifference:
    """Returns how far `result` is from the reference, in units of the tolerances. Changes of buffers are
    compared as gradients are.

    A gradient that is None on one side only is infinitely far.
    """
    loss = abs(result.loss - reference.loss) / (tolerances.loss * max(abs(reference.loss), 1e-12))
    worst, gradient = "", 0.0
    for found, wanted in ((result.gradients, reference.gradients), (result.changes, reference.changes)):
        norms = {name: _double_norm(g) for name, g in wanted.items() if g is not None}
        total = sum(norm**2 for norm in norms.values()) ** 0.5
        for name, expected in wanted.items():
            allowed = tolerances.gradient * norms.get(name, 0.0) + tolerances.floor * total
            distance = _gradient_distance(found.get(name), expected, allowed)
            if distance > gradient or not worst:
                worst, gradient = name, distance
    return ResultDifference(loss, gradient, worst)


def _to_double(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to(torch.complex128 if gradient.is_complex() else torch.float64)


def _double_norm(gradient: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(_to_double(gradient)))


def _gradient_distance(gradient: torch.Tensor | None, expected: torch.Tensor | None, allowed: float) -> float:
    """Returns how far a gradient is from the expected one, in units of what is allowed."""
    if gradient is None or expected is None:
        return 0.0 if gradient is expected else float("inf")
    error = _double_norm(_to_double(gradient) - _to_double(expected))
    return error / allowed if allowed else (0.0 if error == 0 else float("inf"))
