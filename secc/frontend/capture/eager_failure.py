"""Tells whether plain PyTorch fails on the model and its samples too, so that messages blame the right
code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from secc.errors import NotEnoughMemory, UserError
from secc.runtime.model.error_remedies import DEFAULT_REMEDY, remedy_for
from secc.runtime.model.source_lines import error_source_line
from secc.runtime.model.user_file import UserModel
from secc.runtime.parameters.mixed_precision import find_uncast_buffers
from secc.runtime.recorder import is_gradient_error
from secc.runtime.training.eager_watch import run_forward
from secc.runtime.training.widened_floats import is_missing_kernel


def is_user_error(error: BaseException) -> bool:
    """Whether an error of a capture was raised by the user's code, or by torch called from it."""
    cause = error.__cause__
    return cause is not None and (not isinstance(cause, UserError) or is_user_error(cause))


def find_eager_failure(
    user: UserModel, model: nn.Module, samples: Sequence[dict[str, Any]]
) -> UserError | None:
    """Runs forward in plain PyTorch on a batch of these samples; returns its error, None if it succeeds or
    takes too much memory."""
    batch = user.collate(samples)
    try:
        _run_with_or_without_gradients(model, batch)
    except NotEnoughMemory:
        return None
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        if is_missing_kernel(error):
            return None
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        if type(error).__module__.startswith("torch._dynamo"):
            message = (
                f"forward calls code that torch compiles, which cannot be read: {type(error).__name__}: {why}"
            )
            remedy = (
                "leave torch.compile out; in place of flex attention use scaled_dot_product_attention with a "
                'mask, or attn_implementation="sdpa"'
            )
            return UserError(message, error_source_line(error), remedy)
        alone = len(samples) == 1 and (
            any(isinstance(v, torch.Tensor) and not v.numel() for v in batch.values())
            or find_eager_failure(user, model, [*samples, *samples]) is None
        )
        given = "one of the samples" if len(samples) == 1 else "the first samples"
        given = "a batch of one sample, as a micro-batch may be," if alone else given
        message = (
            f"forward fails in plain PyTorch too, on {given} on this machine's CPU: "
            f"{type(error).__name__}: {why}"
        )
        remedy = (
            _explain_batch_of_one(user, batch)
            if alone
            else _explain_failure(error) + explain_default_batch(user, batch, samples)
        )
        return UserError(message, error_source_line(error), remedy)
    return None


def _explain_failure(error: BaseException) -> str:
    remedy = remedy_for(error)
    return (
        "correct the model file until plain PyTorch computes a loss" if remedy == DEFAULT_REMEDY else remedy
    )


def _run_with_or_without_gradients(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Runs forward without gradients, or with them where forward takes some itself."""
    try:
        with torch.no_grad():
            run_forward(model, batch)
    except RuntimeError as error:
        if not is_gradient_error(error):
            raise
        with torch.enable_grad():
            run_forward(model, batch)


def _explain_batch_of_one(user: UserModel, batch: Mapping[str, Any]) -> str:
    """Says how a sample that plain PyTorch cannot compute alone can be computed; a sample may have no rows of
    an input, as no pictures."""
    empty = [k for k, v in batch.items() if isinstance(v, torch.Tensor) and not v.numel()]
    if not empty:
        return "let forward compute one sample: a norm over one value, for example, needs larger inputs"
    names = ", ".join(empty)
    it = "it" if len(empty) == 1 else "them"
    where = (
        "collate() leave it out of a batch"
        if user.defines("collate")
        else "dataset() leave it out of a sample"
    )
    where = where if len(empty) == 1 else where.replace(" it ", " them ")
    return (
        f"this sample has no entries of {names}, and neither may a micro-batch: let {where} that has none of"
        f" {it}, and give the argument of forward the default None"
    )


def explain_default_batch(
    user: UserModel, batch: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]
) -> str:
    """Says what forward may not expect of a batch that the default collation made: keys with rows of some
    samples only; keys with two or three dims that are joined along dim 0, where padding may be meant (of
    samples of different lengths) or a stack (of those that some samples lack); and keys with one row in each
    sample that are stacked, where they may be meant to be joined. "" without any."""
    joined, partial, unstacked, stacked = list[str](), list[str](), list[str](), list[str]()
    for key, value in batch.items() if not user.defines("collate") else ():
        held = [v for s in samples if isinstance(v := s.get(key), torch.Tensor)]
        if 0 < len(held) < len(samples):
            partial.append(f"{key} of {len(held)} of {len(samples)}")
        lengths = [len(v) for v in held if v.ndim in (2, 3)]
        if isinstance(value, torch.Tensor) and lengths and len(value) == sum(lengths):
            if len(set(lengths)) > 1:
                joined.append(f"{key} {list(value.shape)}")
            elif len(held) < len(samples) and value.ndim == held[0].ndim and lengths[0] > 1:
                unstacked.append(f"{key} {list(value.shape)}")
        if held and all(v.ndim > 1 and len(v) == 1 for v in held) and value.ndim > held[0].ndim:
            stacked.append(f"{key} {list(value.shape)}")
    explanation = ""
    if partial:
        explanation += (
            f"; without collate(), samples that lack a key have no rows of it, here {', '.join(partial)} "
            "samples: let forward take such batches, or write `collate(samples) -> dict`"
        )
    if joined:
        explanation += (
            f"; without collate(), rows of all samples are joined along dim 0 in this batch, as in "
            f"{', '.join(joined)}: write `collate(samples) -> dict` if forward expects [samples, longest, …]"
        )
    if unstacked:
        explanation += (
            f"; without collate(), values that some samples lack are joined along dim 0, in this batch "
            f"{', '.join(unstacked)}: where forward expects a row for each, let a sample hold `value[None]`"
        )
    if stacked:
        explanation += (
            f"; without collate(), values of one shape are stacked, in this batch {', '.join(stacked)}: "
            "where forward expects no dim of 1 there, let a sample hold `value[0]`"
        )
    return explanation


def blame_compute_dtype(error: UserError, dtype: str, model: nn.Module) -> UserError:
    """Returns the error of a model that computes in its own dtypes but fails when cast by `--dtype`, with
    what stayed float32 and what to do; `error` itself if `dtype` is ""."""
    if not dtype:
        return error
    tables = ", ".join(find_uncast_buffers(model))
    kept = f"buffers that are not saved ({tables}) stay float32: cast them" if tables else "cast others"
    remedy = (
        f"--dtype casts parameters and saved buffers; {kept} where they are used (`table.to(x.dtype)`), or "
        "leave --dtype out and compute under torch.autocast in forward"
    )
    return UserError(f"--dtype {dtype}: {error.message}", error.where, remedy)
