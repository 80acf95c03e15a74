"""The sizes of batches: reading symbols off them, combining those of samples, and padding a batch to wider
widths.

For one sample the sizes are those of `collate([sample])`; for a set of samples rows add up and widths take
their maximum. This is what lets every rank know all shapes of a step from small integers alone.
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
    """The value of each symbol in a batch of `samples` samples; 0 where its key is missing.

    A symbol without a key (`B` of a model whose inputs are all packed) is the number of samples.
    """
    return {s.name: (_dim_size(batch, s.key, s.dim) if s.key else samples) for s in symbols}


def _dim_size(batch: Mapping[str, Any], key: str, dim: int) -> int:
    return int(batch[key].shape[dim]) if key in batch else 0


def combine_sizes(sizes: Iterable[Mapping[str, int]], symbols: Iterable[plan.Symbol]) -> dict[str, int]:
    """The sizes of a set of samples from those of its parts: rows add up, widths take their maximum; all 0
    for the empty set."""
    parts = list(sizes)
    total = {
        s.name: sum(p[s.name] for p in parts)
        if s.kind == "rows"
        else max((p[s.name] for p in parts), default=0)
        for s in symbols
    }
    return total


def pad_sample_sizes(
    plan: plan.Plan, samples: Sequence[SampleMeta], own: int | None = None
) -> list[Mapping[str, int]]:
    """Each sample's sizes in a micro-batch: its own, or where the plan pads to the global batch's widths,
    those widths.

    From position `own` on the samples are those of the next global batch.
    """
    if plan.widths != "global":
        return [s.sizes for s in samples]
    found: list[Mapping[str, int]] = []
    for part in (samples[:own], samples[len(samples) if own is None else own :]):
        total = combine_sizes([s.sizes for s in part], plan.symbols)
        widths = {s.name: total[s.name] for s in plan.symbols if s.is_padded}
        found += [{**s.sizes, **widths} for s in part]
    return found


def pad_batch(
    batch: Mapping[str, Any], inputs: Iterable[plan.Input], widths: Mapping[str, int]
) -> dict[str, Any]:
    """The batch with each padded dim at its extent under `widths` (width symbols only), as collate would have
    padded it.

    Raises UserError where a dim has to grow and collate's padding is not a constant, or where the batch is
    wider than asked.
    """
    padded = dict(batch)
    for i in inputs:
        if i.key not in padded:
            continue
        fills = {dim: (side, value) for dim, side, value in i.pads}
        for dim, text in enumerate(i.dims):
            target = _target_width(text, widths)
            if target is not None:
                padded[i.key] = _pad_dim(padded[i.key], i.key, dim, target, fills.get(dim))
    return padded


def _target_width(text: str, widths: Mapping[str, int]) -> int | None:
    """The extent that `widths` give to a dim, or None if it is a constant or made of other symbols."""
    if text.isdecimal():
        return None
    try:
        return evaluate_expr(text, widths)
    except ValueError:
        return None


def _pad_dim(
    tensor: torch.Tensor, key: str, dim: int, target: int, fill: tuple[str, float] | None
) -> torch.Tensor:
    missing = target - tensor.shape[dim]
    if missing == 0:
        return tensor
    if missing < 0:
        raise ValueError(f"{key} dim {dim} has {tensor.shape[dim]} entries, more than the {target} to pad to")
    if fill is None:
        raise UserError(
            f"{key!r} has to be padded along dim {dim}, but what collate puts there is not one value",
            remedy="let collate() fill the padding of this key with a constant",
        )
    side, value = fill
    amounts = [0, 0] * (tensor.ndim - 1 - dim) + ([missing, 0] if side == "left" else [0, missing])
    return functional.pad(tensor, amounts, value=value)


def check_batch_shapes(
    batch: Mapping[str, Any], inputs: Iterable[plan.Input], sizes: Mapping[str, int]
) -> None:
    """Refuse a batch whose tensors do not have the dims that the plan was made for: a survey sees only some
    samples of a dataset."""
    for i in inputs:
        if i.key not in batch:
            continue
        shape, expected = tuple(batch[i.key].shape), tuple(evaluate_expr(d, sizes) for d in i.dims)
        if shape != expected:
            dims = ", ".join(i.dims)
            raise UserError(
                f"{i.key!r} has the shape {list(shape)}, but the plan was made for [{dims}] = {list(expected)}",
                remedy="let dataset() show such samples earlier, or compile again with more --stats-samples",
            )
