"""Sizes of batches: reads symbol values from a batch, combines those of samples, and pads a batch to wider
widths.

A single sample has the sizes of `collate([sample])`; for a set of samples, rows add up and widths take their
maximum. So every rank knows all shapes of a step from a few integers per sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from secc.runtime.errors import UserError
from secc.runtime.plan import schema as plan
from secc.runtime.plan.expr_eval import evaluate_expr

if TYPE_CHECKING:
    from secc.runtime.plan.step_program import SampleMeta


def read_symbol_sizes(
    batch: Mapping[str, Any], symbols: Iterable[plan.Symbol], samples: int = 1
) -> dict[str, int]:
    """Reads the value of each symbol from a batch of `samples` samples; 0 where its key is missing.

    A symbol without a key (`B` of a model with packed inputs only) is the number of samples.
    """
    return {s.name: (_dim_size(batch, s.key, s.dim) if s.key else samples) for s in symbols}


def _dim_size(batch: Mapping[str, Any], key: str, dim: int) -> int:
    return int(batch[key].shape[dim]) if key in batch else 0


def combine_sizes(sizes: Iterable[Mapping[str, int]], symbols: Iterable[plan.Symbol]) -> dict[str, int]:
    """Combines the symbol values of parts of a batch: rows add up, widths take their maximum; all 0 without
    parts.
    """
    parts = list(sizes)
    return {
        s.name: sum(part[s.name] for part in parts)
        if s.kind == "rows"
        else max((part[s.name] for part in parts), default=0)
        for s in symbols
    }


def pad_sample_sizes(
    plan: plan.Plan, samples: Sequence[SampleMeta], own_samples: int | None = None
) -> list[Mapping[str, int]]:
    """Returns each sample's symbol values, with the global batch's widths if the plan pads to those.

    From position `own_samples` on the samples belong to the next global batch, which has widths of its own.
    """
    if plan.widths != "global":
        return [s.sizes for s in samples]
    padded: list[Mapping[str, int]] = []
    for batch in (samples[:own_samples], samples[len(samples) if own_samples is None else own_samples :]):
        combined = combine_sizes([s.sizes for s in batch], plan.symbols)
        widths = {s.name: combined[s.name] for s in plan.symbols if s.is_padded}
        padded += [{**s.sizes, **widths} for s in batch]
    return padded


def pad_batch(
    batch: Mapping[str, Any], inputs: Iterable[plan.Input], widths: Mapping[str, int]
) -> dict[str, Any]:
    """Returns the batch with each padded dim grown to its extent under `widths` (width symbols only), filled
    as collate fills it.

    Raises UserError where a dim has to grow and collate's padding is not a constant, ValueError where the
    batch is wider than `widths`.
    """
    padded = dict(batch)
    for i in inputs:
        if i.key not in padded:
            continue
        fills = {dim: (side, value) for dim, side, value in i.pads}
        for dim, text in enumerate(i.dims):
            target = _target_width(text, widths)
            if target is not None:
                padded[i.key] = _pad_dim(padded[i.key], i, dim, target, fills.get(dim))
    return padded


def _target_width(text: str, widths: Mapping[str, int]) -> int | None:
    """Returns the extent of a dim under `widths`, or None if it is a constant or has other symbols."""
    if text.isdecimal():
        return None
    try:
        return evaluate_expr(text, widths)
    except ValueError:
        return None


def _pad_dim(
    tensor: torch.Tensor, of: plan.Input, dim: int, target: int, fill: tuple[str, plan.PadFill] | None
) -> torch.Tensor:
    missing = target - tensor.shape[dim]
    if missing == 0:
        return tensor
    if missing < 0:
        raise ValueError(
            f"{of.key} dim {dim}: expected at most {target} entries to pad to, got {tensor.shape[dim]}"
        )
    if fill is None:
        raise UserError(
            f"{of.key!r}: expected padding with one constant along dim {dim}, "
            "but collate() fills it with varying values",
            remedy="let collate() fill the padding of this key with a constant, with one constant row, or "
            "with the sample's last entry",
        )
    side, value = fill
    if isinstance(value, str) and tensor.shape[dim] == 0:
        raise UserError(
            f"{of.key!r}: padding along dim {dim} goes on from the entry before it, and there is none",
            remedy="let no sample be empty in this dim, or let collate() fill its padding with a constant",
        )
    if value == plan.REPEATING_FILL:
        nearest = tensor.narrow(dim, 0 if side == "left" else tensor.shape[dim] - 1, 1)
        repeated = nearest.expand(*(missing if d == dim else -1 for d in range(tensor.ndim)))
        return torch.cat([repeated, tensor] if side == "left" else [tensor, repeated], dim)
    if isinstance(value, str):
        last = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
        steps = torch.arange(1, missing + 1, dtype=tensor.dtype, device=tensor.device)
        return torch.cat([tensor, last + steps.view(-1, *[1] * (tensor.ndim - 1 - dim))], dim)
    if isinstance(value, tuple):
        constant = [int(d) if d.isdecimal() else 1 for d in of.dims]
        shape = [missing if d == dim else size for d, size in enumerate(tensor.shape)]
        row = torch.tensor(value, dtype=tensor.dtype, device=tensor.device).view(constant).expand(shape)
        return torch.cat([row, tensor] if side == "left" else [tensor, row], dim)
    amounts = [0, 0] * (tensor.ndim - 1 - dim) + ([missing, 0] if side == "left" else [0, missing])
    return functional.pad(tensor, amounts, value=value)


def check_batch_shapes(
    batch: Mapping[str, Any], inputs: Iterable[plan.Input], sizes: Mapping[str, int]
) -> None:
    """Raises UserError if a tensor of the batch does not have the dims of the plan's inputs.

    The dataset survey sees only some samples, so others may have shapes that the plan does not cover.
    """
    for i in inputs:
        if i.key not in batch:
            continue
        shape, expected = tuple(batch[i.key].shape), tuple(evaluate_expr(d, sizes) for d in i.dims)
        if shape != expected:
            dims = ", ".join(i.dims)
            raise UserError(
                f"{i.key!r}: expected the shape [{dims}] = {list(expected)} of the plan, got {list(shape)}",
                remedy="let dataset() show such samples earlier, or compile again with more --stats-samples",
            )
