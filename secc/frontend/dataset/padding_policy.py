"""Decides whether micro-batches may have their own widths: only where padded positions provably do not
reach the loss.

A global batch is padded to its longest sample. Where that padding reaches the loss (a mean over padded
positions, attention without a mask) it belongs to the semantics of the user's model. The probe pads
batches beyond their own width; if the loss or any gradient changes, every micro-batch must have the global
batch's width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from math import isfinite, isqrt
from typing import Any

import torch
from torch import nn

from secc.frontend.dataset.input_symbols import ModelInputs
from secc.frontend.dataset.light_samples import count_entries, count_features
from secc.frontend.dataset.small_samples import survey_small_samples
from secc.frontend.dataset.survey import DatasetSurvey, InputPattern, Sample, sequence_length
from secc.frontend.excerpt.first_layers import ExcerptResult, ModelExcerpt
from secc.frontend.excerpt.limits import CannotRunExcerpt, ExcerptLimits
from secc.runtime.errors import NotEnoughMemory, UserError
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.batch_sizes import combine_sizes, pad_batch, read_symbol_sizes
from secc.runtime.plan.schema import RandomOp
from secc.runtime.randomness.micro_batch_draws import MicroBatchDraws
from secc.runtime.training.eager_reference import (
    GRADIENT_TOLERANCE,
    LossAndGradients,
    PlanRandomness,
    compare_results,
    run_eager,
)
from secc.runtime.training.widened_floats import computes_in_sixteen_bits, widen_batch, widened_floats

# Of a model with fewer parameters all micro-batches of the survey are probed, else two of each pattern.
_SMALL_MODEL_PARAMETERS = 1 << 22
# Lengths of small models' samples that differ in the remainder by this are probed: behind a convolution with
# a stride, padding reaches samples of some lengths only.
_REMAINDERS = 8
_EXTRA_PADDING = 3  # positions of extra padding, odd so that it shows in patch and pooling sizes
_MOST_FURTHER_PADDING = 128  # positions of further padding in an excerpt, where long samples take long
# Padding up to this multiple of a batch's own width, if the dataset has samples as wide: convolutions absorb
# a few padded positions, so a little extra padding may not show.
_MAX_WIDENING = 4
# Pairs of positions in the rows of a batch, which attention takes time for. If a batch of a pattern has more,
# the one with the fewest pairs is probed in place of all, and padded up to this many.
_MAX_PAIRS = 1 << 26
# Entries of a batch's largest tensor, which is mostly the scores of a vocabulary for each token. A batch with
# more is composed of lighter samples. If the lightest have more, too, the smallest batch of a pattern is
# padded a little in place of all, and few short samples far, up to this many entries or twice their width.
_MAX_ENTRIES = 1 << 27

# What a model or collate raises that refuses a batch of another width.
_REFUSALS = (UserError, RuntimeError, ValueError, IndexError, AssertionError)


class WidthsReason(Enum):
    """Why micro-batches have the widths that they have; the value is what the report says."""

    SHOWN = "padding was shown not to affect the loss"
    SHOWN_SMALL = "padding was shown not to affect the loss of small_model()"
    CHOSEN = "--widths chose it, and nothing was tested"
    UNPADDED = "no input has a padded width"
    AFFECTED = "padding changes the loss or a gradient, or wider batches are refused"
    INEXACT = (
        "at their own widths the plan is not exact: padding reaches the loss, or what a section sends is"
        " padded with varying numbers, which the next one reads"
    )
    NEEDED = "a plan at the global batch's widths fails; this one was compared with plain PyTorch"
    TOO_LARGE = "the model is too large to be run here, and has no small_model() that takes these samples"


@dataclass(frozen=True)
class PaddingPolicy:
    """The widths of micro-batches, "own" or "global", and why. detail: on what it was shown, or why it could
    not be."""

    widths: str
    reason: WidthsReason
    detail: str = ""

    def as_checks(self, inputs: ModelInputs) -> dict[str, object]:
        """Returns the entries of `checks` in plan.json: the reason, and where narrower widths may do,
        their price and the remedy."""
        entries: dict[str, object] = {"widths": self.reason.value + self.detail}
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
    limits: ExcerptLimits | None = None,
) -> PaddingPolicy:
    """Returns widths "own" if padding does not reach the loss in any pattern, else "global".

    draws: random ops, which draw as plans draw. model: None if it does not fit on this machine; then, or if
    its step takes too much memory, `small_model()` is tested, on samples of `small_dataset()` if there is
    one, or else an excerpt of the model within `limits` (default: those of this machine). If neither can be
    run, the answer is "global".
    """
    if not any(s.is_padded for s in inputs.symbols):
        return PaddingPolicy("own", WidthsReason.UNPADDED)
    if model is not None:
        try:
            if _is_padding_never_seen(user, survey, inputs, model, draws):
                return PaddingPolicy("own", WidthsReason.SHOWN)
            return PaddingPolicy("global", WidthsReason.AFFECTED)
        except NotEnoughMemory:
            pass  # even for the shortest samples
    try:
        small = user.build_small_model()
        if small is not None:
            if _is_padding_never_seen(user, survey_small_samples(user, survey), inputs, small, draws):
                return PaddingPolicy("own", WidthsReason.SHOWN_SMALL)
            return PaddingPolicy("global", WidthsReason.AFFECTED, ", in small_model()")
        small_fault = ""
    except Exception as error:  # random ops of the large model may have other names in the small one
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        small_fault = f"; small_model() fails here: {reason}"
    try:
        return _probe_excerpt(user, survey, inputs, draws, limits or ExcerptLimits.of_this_machine())
    except CannotRunExcerpt as error:
        why = str(error)
    except NotEnoughMemory as error:
        why = error.message
    except Exception as error:  # whatever the user's code raises
        why = f"its code raises {type(error).__name__} there"
    detail = f"{small_fault}; one layer of each kind cannot stand for it: {why}"
    return PaddingPolicy("global", WidthsReason.TOO_LARGE, detail)


def _probe_excerpt(
    user: UserModel,
    survey: DatasetSurvey,
    inputs: ModelInputs,
    draws: Sequence[RandomOp],
    limits: ExcerptLimits,
) -> PaddingPolicy:
    """Pads a batch of each pattern and compares loss, gradients and hidden states of an excerpt of the model.
    Raises CannotRunExcerpt if it cannot stand for the model, and whatever the user's code raises."""
    batches = [_widen_light_batches(user, survey, inputs, p) for p in survey.micro_batch_patterns()]
    tokens = {token for options in batches for batch in options for token in batch.iter_tokens()}
    excerpt = ModelExcerpt(user, tokens, limits)
    randomness = PlanRandomness(excerpt.model, draws, inputs.symbols)
    for options in batches:
        batch, own = _run_first_option(user, excerpt, randomness, options)
        try:
            wide = excerpt.run(batch.wide, randomness.draws_for(user, batch.samples, batch.widths))
        except NotEnoughMemory:
            raise
        except _REFUSALS:
            return PaddingPolicy("global", WidthsReason.AFFECTED, _describe_excerpt(excerpt))
        if not compare_results(wide.outcome, own.outcome).is_exact:
            return PaddingPolicy("global", WidthsReason.AFFECTED, _describe_excerpt(excerpt))
        if changed := _find_changed_layer(own, wide):
            raise CannotRunExcerpt(f"padding changes what {changed} returns, which may reach the loss later")
    return PaddingPolicy("own", WidthsReason.SHOWN, _describe_excerpt(excerpt))


def _widen_light_batches(
    user: UserModel, survey: DatasetSurvey, inputs: ModelInputs, pattern: InputPattern
) -> list[_WidenedBatch]:
    """Returns a batch of few light samples that have a pattern, shortened as forward or collate may refuse,
    and one of these samples as they are."""
    options = list[_WidenedBatch]()
    with suppress(Exception):  # whatever the user's collate raises
        options.append(_WidenedBatch(user, inputs, survey.lightest_samples(pattern)))
    whole = survey.without_crops().lightest_samples(pattern)
    return [*options, _WidenedBatch(user, inputs, whole)]


def _run_first_option(
    user: UserModel, excerpt: ModelExcerpt, randomness: PlanRandomness, options: Sequence[_WidenedBatch]
) -> tuple[_WidenedBatch, ExcerptResult]:
    """Runs the excerpt on the first batch that the user's forward takes and that gives gradients. Raises what
    forward raises for the last one, and CannotRunExcerpt if that gives none."""
    for batch in options:
        is_last = batch is options[-1]
        try:
            own = excerpt.run(batch.own, randomness.draws_for(user, batch.samples))
        except Exception as error:  # whatever the user's forward raises for shortened samples
            if is_last or isinstance(error, NotEnoughMemory):
                raise
            continue
        gradients = own.outcome.gradients.values()
        if isfinite(own.outcome.loss) and any(g is not None and bool(g.any()) for g in gradients):
            return batch, own
    raise CannotRunExcerpt("its loss depends on no weight that gets a gradient there")


def _describe_excerpt(excerpt: ModelExcerpt) -> str:
    ran, layers = excerpt.layer_counts
    return f", with one layer of each kind at its real size ({ran} of {layers} layers)"


class _WidenedBatch:
    """A batch as wide as its samples, and padded about as far again, but not by many more positions than
    `_MOST_FURTHER_PADDING` and not beyond the widest drawn sample. An odd number of positions is added, so
    that it shows in sizes of patches and pools."""

    def __init__(self, user: UserModel, inputs: ModelInputs, samples: list[Sample]) -> None:
        self.samples, self.own = samples, user.collate(samples)
        sizes = combine_sizes([read_symbol_sizes(self.own, inputs.symbols)], inputs.symbols)
        names = [s.name for s in inputs.symbols if s.is_padded and sizes[s.name]]
        self.widths = {
            n: max(
                sizes[n] + _EXTRA_PADDING,
                min(
                    sizes[n] + min(sizes[n], _MOST_FURTHER_PADDING) + _EXTRA_PADDING,
                    max(s[n] for s in inputs.sample_sizes),
                ),
            )
            for n in names
        }
        self.wide = pad_batch(self.own, inputs.inputs, self.widths)

    def iter_tokens(self) -> Iterator[int]:
        """Yields the integers in the batch."""
        for value in (*self.own.values(), *self.wide.values()):
            if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
                yield from value.unique().tolist()


def _pick_unpadded(user: UserModel, survey: DatasetSurvey, pattern: InputPattern) -> list[Sample]:
    """Picks few short samples of one length, which together have the pattern."""
    batches = survey.compose_batches(pattern, even=True)
    samples = min(batches, key=lambda batch: len(batch) * max(map(sequence_length, batch)))
    return samples[:1] if pattern <= user.collate(samples[:1]).keys() else samples


def _find_changed_layer(own: ExcerptResult, wide: ExcerptResult) -> str:
    """Returns the path of a layer that ran in only one of two runs, or that does not return the same for the
    positions that both have; "" without one. Padding comes at one end of a dim."""
    for narrow, padded in zip(own.layers, wide.layers, strict=False):
        are_alike = narrow.path == padded.path and len(narrow.tensors) == len(padded.tensors)
        if not are_alike or not all(map(_are_rows_same, narrow.tensors, padded.tensors)):
            return narrow.path
    common = min(len(own.layers), len(wide.layers))
    return next((layer.path for layer in (*own.layers[common:], *wide.layers[common:])), "")


def _are_rows_same(own: torch.Tensor, padded: torch.Tensor) -> bool:
    """Whether `own` is at the start or at the end of each dim of `padded` that is longer."""
    if own.ndim != padded.ndim:
        return False
    for starts in (True, False):
        rows = padded
        for dim, size in enumerate(own.shape):
            if size <= padded.shape[dim]:
                rows = rows.narrow(dim, 0 if starts else padded.shape[dim] - size, size)
        if rows.shape == own.shape and float((rows - own).norm()) <= GRADIENT_TOLERANCE * float(own.norm()):
            return True
    return False


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
    is_unseen = partial(_is_padding_unseen, user, inputs, model, randomness)
    is_limited = max_batches is not None
    for pattern in survey.micro_batch_patterns():
        try:
            batches = _compose_light_batches(user, survey, pattern, max_batches, model)
            if not all(is_unseen(batch, far) for batch, far in batches):
                return False
        except NotEnoughMemory:
            if not is_unseen(_pick_unpadded(user, survey, pattern), (False, True)):
                return False
            is_limited = True
    others = [] if is_limited else _find_other_lengths(user, survey, inputs, model)
    return all(is_unseen([s], (False,)) for s in others)


def _compose_light_batches(
    user: UserModel, survey: DatasetSurvey, pattern: InputPattern, max_batches: int | None, model: nn.Module
) -> list[tuple[list[Sample], tuple[bool, ...]]]:
    """Returns batches of a pattern, each with whether it is to be padded a little or (True) far: of lighter
    samples, or only the smallest, where others are too large."""
    while True:
        batches = survey.compose_batches(pattern)[:max_batches]
        if all(count_entries(model, batch) <= _MAX_ENTRIES for batch in batches):
            return _limit_pairs(batches)
        lighter = survey.with_lighter_samples()
        if lighter is survey:
            return [
                (min(batches, key=partial(count_entries, model)), (False,)),
                (_pick_unpadded(user, survey, pattern), (True,)),
            ]
        survey = lighter


def _find_other_lengths(
    user: UserModel, survey: DatasetSurvey, inputs: ModelInputs, model: nn.Module
) -> list[Sample]:
    """Returns samples, at most one for each remainder of a padded width, with remainders that no batch of the
    survey has; none if batches are large."""
    padded = [s.name for s in inputs.symbols if s.is_padded]

    def find_remainders(samples: list[Sample]) -> set[tuple[str, int]]:
        sizes = combine_sizes([read_symbol_sizes(user.collate(samples), inputs.symbols)], inputs.symbols)
        return {(name, sizes[name] % _REMAINDERS) for name in padded if sizes[name]}

    probed = [b for pattern in survey.micro_batch_patterns() for b in survey.compose_batches(pattern)]
    if any(len(batch) * max(map(sequence_length, batch)) ** 2 > _MAX_PAIRS for batch in probed):
        return []
    if any(count_entries(model, batch) > _MAX_ENTRIES for batch in probed):
        return []
    seen = set[tuple[str, int]]().union(*map(find_remainders, probed))
    others = list[Sample]()
    for sample in (s for pattern in survey.pattern_counts for s in survey.samples_of(pattern)):
        if new := find_remainders([sample]) - seen:
            seen |= new
            others.append(sample)
    return others


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
    features = count_features(model)
    widths = [{n: _padded_width(inputs, n, sizes[n], f, samples, features) for n in names} for f in far]
    try:
        wider = [pad_batch(batch, inputs.inputs, w) for w in widths]
        own_draws = partial(randomness.draws_for, user, samples)
        own_result = _run_widened(model, batch, own_draws)
        for padded, to in zip(wider, widths, strict=True):
            draws = partial(randomness.draws_for, user, samples, to)
            wide_result = _run_widened(model, padded, draws, own_result.needs_watch)
            if not compare_results(wide_result, own_result).is_exact:
                # A sum with cancellation may round differently beyond the tolerance; not in float64.
                wide, own = (
                    _run_in(torch.float64, model, *run) for run in ((padded, draws), (batch, own_draws))
                )
                if not compare_results(wide, own).is_exact:
                    return False
    except NotEnoughMemory:
        raise
    except _REFUSALS:
        return False  # the model or collate refuses other widths
    return True


def _run_widened(
    model: nn.Module,
    batch: Mapping[str, Any],
    make_draws: Callable[[], MicroBatchDraws | None],
    watches: bool = True,
) -> LossAndGradients:
    """Runs plain PyTorch with float32 in place of 16 bits: rounding would hide padding that reaches the loss
    a little. A model that computes nothing in 16 bits runs as it is, which takes a third of the time.
    watches: as `run_eager` has it."""
    if not computes_in_sixteen_bits(model):
        try:
            result = run_eager(model, batch, make_draws(), watches)
            if not result.narrow:
                return result
        except NotEnoughMemory:
            raise
        except _REFUSALS:
            pass  # in float32 it may work
    return _run_in(torch.float32, model, batch, make_draws)


def _run_in(
    dtype: torch.dtype,
    model: nn.Module,
    batch: Mapping[str, Any],
    make_draws: Callable[[], MicroBatchDraws | None],
) -> LossAndGradients:
    """Runs plain PyTorch with `dtype` in place of narrower floats."""
    with widened_floats(model, dtype):
        return run_eager(model, widen_batch(batch, dtype), make_draws())


def _padded_width(
    inputs: ModelInputs, name: str, own: int, far: bool, samples: list[Sample], features: int
) -> int:
    """Returns a width to pad `samples` to: a little more than the batch's own, or, if `far`, that of the
    widest drawn sample, within limits."""
    most = _MAX_WIDENING * own
    if own == max(map(sequence_length, samples)):
        most = min(most, isqrt(_MAX_PAIRS // len(samples)))
        most = min(most, max(_MAX_ENTRIES // features // len(samples), 2 * own))
    widest = min(max(s[name] for s in inputs.sample_sizes), most) if far else 0
    return max(own + _EXTRA_PADDING, widest)
