"""Decides whether micro-batches may have their own widths: only where padded positions provably do not
reach the loss.

A global batch is padded to its longest sample. Where that padding reaches the loss (a mean over padded
positions, attention without a mask) it belongs to the semantics of the user's model. The probe pads
batches beyond their own width; if the loss or any gradient changes, every micro-batch must have the global
batch's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import isqrt

import torch
from torch import nn

from secc.frontend.dataset.input_symbols import ModelInputs
from secc.frontend.dataset.small_samples import survey_small_samples
from secc.frontend.dataset.survey import DatasetSurvey, Sample, sequence_length
from secc.runtime.errors import UserError
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.batch_sizes import combine_sizes, pad_batch, read_symbol_sizes
from secc.runtime.plan.schema import RandomOp
from secc.runtime.training.eager_reference import PlanRandomness, compare_results, run_eager
from secc.runtime.training.widened_floats import widen_batch, widened_floats

# Of a model with fewer parameters all micro-batches of the survey are probed, else two of each pattern.
_SMALL_MODEL_PARAMETERS = 1 << 22
_EXTRA_PADDING = 3  # positions of extra padding, odd so that it shows in patch and pooling sizes
# Padding up to this multiple of a batch's own width, if the dataset has samples as wide: convolutions absorb
# a few padded positions, so a little extra padding may not show.
_MAX_WIDENING = 4
# Pairs of positions in the rows of a batch, which attention takes time for. If a batch of a pattern has more,
# the one with the fewest pairs is probed in place of all, and padded up to this many.
_MAX_PAIRS = 1 << 26


class WidthsReason(Enum):
    """Why micro-batches have the widths that they have; the value is what the report says."""

    SHOWN = "padding was shown not to affect the loss"
    SHOWN_SMALL = "padding was shown not to affect the loss of small_model()"
    CHOSEN = "--widths chose it, and nothing was tested"
    UNPADDED = "no input has a padded width"
    AFFECTED = "padding changes the loss or a gradient, or wider batches are refused"
    NEEDED = "a plan at the global batch's widths fails; this one was compared with plain PyTorch"
    TOO_LARGE = "the model is too large to be run here, and has no small_model() that takes these samples"


@dataclass(frozen=True)
class PaddingPolicy:
    """The widths of micro-batches, "own" or "global", and why."""

    widths: str
    reason: WidthsReason

    def as_checks(self, inputs: ModelInputs) -> dict[str, object]:
        """Returns the entries of `checks` in plan.json: the reason, and where narrower widths may do,
        their price and the remedy."""
        entries: dict[str, object] = {"widths": self.reason.value}
        if self.reason is WidthsReason.TOO_LARGE:
            price = ", ".join(_describe_price(inputs, s.name) for s in inputs.symbols if s.is_padded)
            remedy = "define small_model(), or give --widths own if padding cannot reach the loss"
            entries["widths_price"] = f"{price}; {remedy}"
        return entries


def _describe_price(inputs: ModelInputs, name: str) -> str:
    """Describes how much wider samples become by padding to the widest that was drawn."""
    sizes = [s[name] for s in inputs.sample_sizes if s.get(name)]
    if not sizes:
        return f"{name} is padded"
    mean = sum(sizes) / len(sizes)
    return f"{name} of {mean:.0f} on average is padded to up to {max(sizes)}, {max(sizes) / mean:.2f} times"


def choose_padding_policy(
    user: UserModel,
    survey: DatasetSurvey,
    inputs: ModelInputs,
    model: nn.Module | None,
    draws: Sequence[RandomOp] = (),
) -> PaddingPolicy:
    """Returns widths "own" if padding does not reach the loss in any pattern, else "global".

    draws: random ops, which draw as plans draw. model: None if it does not fit on this machine; then
    `small_model()` is tested, on samples of `small_dataset()` if there is one. Without a small model that
    takes the samples the answer is "global".
    """
    if not any(s.is_padded for s in inputs.symbols):
        return PaddingPolicy("own", WidthsReason.UNPADDED)
    if model is not None:
        if _is_padding_never_seen(user, survey, inputs, model, draws):
            return PaddingPolicy("own", WidthsReason.SHOWN)
        return PaddingPolicy("global", WidthsReason.AFFECTED)
    try:
        small = user.build_small_model()
        if small is not None and _is_padding_never_seen(
            user, survey_small_samples(user, survey), inputs, small, draws
        ):
            return PaddingPolicy("own", WidthsReason.SHOWN_SMALL)
    except Exception:  # random ops of the large model may have other names in the small one
        pass
    return PaddingPolicy("global", WidthsReason.TOO_LARGE)


def _is_padding_never_seen(
    user: UserModel,
    survey: DatasetSurvey,
    inputs: ModelInputs,
    model: nn.Module,
    draws: Sequence[RandomOp],
) -> bool:
    """Whether extra padding leaves loss and gradients of all probed batches as they are."""
    randomness = PlanRandomness(model, draws, inputs.symbols)
    max_batches = None if sum(p.numel() for p in model.parameters()) < _SMALL_MODEL_PARAMETERS else 2
    batches = (
        limited
        for pattern in survey.micro_batch_patterns()
        for limited in _limit_pairs(survey.compose_batches(pattern)[:max_batches])
    )
    return all(_is_padding_unseen(user, inputs, model, randomness, batch, far) for batch, far in batches)


def _limit_pairs(batches: list[list[Sample]]) -> list[tuple[list[Sample], tuple[bool, ...]]]:
    """Returns the batches of a pattern, each with whether it is to be padded far: every second one is. If one
    is too large, the smallest of them stands for all, padded a little and far."""

    def count_pairs(batch: list[Sample]) -> int:
        return len(batch) * max(map(sequence_length, batch)) ** 2

    fits = all(count_pairs(batch) <= _MAX_PAIRS for batch in batches)
    if not fits:
        return [(min(batches, key=count_pairs), (False, True))]
    return [(batch, (i % 2 > 0,)) for i, batch in enumerate(batches)]


def _is_padding_unseen(
    user: UserModel,
    inputs: ModelInputs,
    model: nn.Module,
    randomness: PlanRandomness,
    samples: list[Sample],
    far: tuple[bool, ...],
) -> bool:
    """Whether loss and gradients of `samples` stay the same with extra padding, a little or (True) far."""
    batch = user.collate(samples)
    sizes = combine_sizes([read_symbol_sizes(batch, inputs.symbols)], inputs.symbols)
    names = [s.name for s in inputs.symbols if s.is_padded and sizes[s.name]]
    widths = [{n: _padded_width(inputs, n, sizes[n], f, samples) for n in names} for f in far]
    try:
        wider = [pad_batch(batch, inputs.inputs, w) for w in widths]
        # Rounding to 16 bits would hide padding that reaches the loss a little.
        with widened_floats(model, torch.float32):
            draws = randomness.draws_for(user, samples)
            own_result = run_eager(model, widen_batch(batch, torch.float32), draws)
            for padded, to in zip(wider, widths, strict=True):
                draws = randomness.draws_for(user, samples, to)
                result = run_eager(model, widen_batch(padded, torch.float32), draws)
                if not compare_results(result, own_result).is_exact:
                    return False
    except (UserError, RuntimeError, ValueError, IndexError):
        return False  # the model or collate refuses other widths
    return True


def _padded_width(inputs: ModelInputs, name: str, own: int, far: bool, samples: list[Sample]) -> int:
    """Returns a width to pad `samples` to: a little more than the batch's own, or, if `far`, that of the
    widest drawn sample, within limits."""
    most = _MAX_WIDENING * own
    if own == max(map(sequence_length, samples)):
        most = min(most, isqrt(_MAX_PAIRS // len(samples)))
    widest = min(max(s[name] for s in inputs.sample_sizes), most) if far else 0
    return max(own + _EXTRA_PADDING, widest)
