"""Cross entropy of rows from tiles of logits: Triton kernels and their PyTorch reference.

    logits = softcap(hidden @ weight.T + bias)         softcap(x) = cap * tanh(x / cap)
    loss of a row = logsumexp(logits) - (1 - s) * logits[target] - s * mean(logits)     s = label_smoothing

A tile is some rows of some tokens. `compute_tile_statistics` reads a tile once, `compute_row_losses` joins
the tiles of a row, `write_logits_gradient_` overwrites a tile with its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from secc.runtime.kernels import launch_tuning
from secc.runtime.kernels.activations import apply_softcap
from secc.runtime.kernels.backend import (
    accumulator_dtype,
    ceil_div,
    check_argument,
    has_kernels,
    jit,
    on_device,
    tl,
)
from secc.runtime.kernels.vocab_group import combine_softmax_partials

CROSS_ENTROPY_NAME = "linear_cross_entropy"


@dataclass(frozen=True)
class LabelTarget:
    """Options of the cross entropy. `ignore_index`: label of rows that are left out; `softcap`: 0 for none;
    `first_token`: the first token of this shard; `vocabulary`: tokens of all shards."""

    ignore_index: int
    label_smoothing: float
    softcap: float
    first_token: int
    vocabulary: int

    def check_options(self, name: str) -> None:
        """Raises UserError for options without a meaning."""
        check_argument(self.vocabulary > 0, f"{name}: an empty vocabulary")
        check_argument(
            0.0 <= self.label_smoothing <= 1.0,
            f"{name}: label_smoothing {self.label_smoothing} is outside 0 … 1",
        )
        check_argument(self.softcap >= 0, f"{name}: softcap must be positive", "None means no cap")

    def check_labels(self, target: torch.Tensor) -> None:
        """Raises UserError for a label in `target` [N] that is not a token. Not checked on a GPU, because
        reading the labels would stall it; the loss of such a row is NaN there."""
        if not target.is_cuda and bool(((target != self.ignore_index) & self.is_outside(target)).any()):
            bad = target[(target != self.ignore_index) & self.is_outside(target)][0].item()
            check_argument(
                False,
                f"target {bad} is not in a vocabulary of {self.vocabulary}",
                "is ignore_index what the labels use?",
            )

    def is_outside(self, target: torch.Tensor) -> torch.Tensor:
        """Returns a bool for each label of `target`, in its shape: whether it is no token of the vocabulary
        (`ignore_index` normally is none)."""
        return (target < 0) | (target >= self.vocabulary)


@jit
def _statistics_kernel(
    logits,
    bias,
    target,
    out,
    stride,
    width,
    first,
    cap,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    plain = tl.zeros((), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        z = tl.load(logits + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            z += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        z = apply_softcap(z, cap, CAP)
        plain += tl.sum(tl.where(inside, z, 0.0), 0)
        z = tl.where(inside, z, float("-inf"))
        higher = tl.maximum(top, tl.max(z, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(z - base), 0)
        top = higher
    label = tl.load(target + row).to(tl.int64) - first
    here = (label >= 0) & (label < width)
    picked = tl.load(logits + row * stride + label, mask=here, other=0.0).to(tl.float32)
    if BIAS:
        picked += tl.load(bias + label, mask=here, other=0.0).to(tl.float32)
    picked = tl.where(here, apply_softcap(picked, cap, CAP), 0.0)
    tl.store(out + row * 4, top)
    tl.store(out + row * 4 + 1, total)
    tl.store(out + row * 4 + 2, picked)
    tl.store(out + row * 4 + 3, plain)


def compute_tile_statistics(
    logits: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, rule: LabelTarget
) -> torch.Tensor:
    """Returns [rows, 4] for a tile: maximum logit, sum of exp(logit - maximum), the target's logit (0 if it
    is not in the tile), sum of logits.

    `logits` [rows, width]: products with the tokens from `rule.first_token` on; `bias` [width]: of these
    tokens.
    """
    rows, width = logits.shape
    if not has_kernels(logits):
        return _statistics_reference(logits, bias, target, rule)
    out = logits.new_empty(rows, 4, dtype=torch.float32)
    launch = launch_tuning.choose_launch(CROSS_ENTROPY_NAME, width or 1, logits)
    with on_device(logits):
        _statistics_kernel[(rows,)](
            logits, logits if bias is None else bias, target, out, logits.stride(0), width,
            rule.first_token, rule.softcap or 1.0, BIAS=bias is not None, CAP=rule.softcap != 0,
            BLOCK=launch.block, num_warps=launch.warps,
        )  # fmt: skip
    return out


def _final_logits(logits: torch.Tensor, bias: torch.Tensor | None, softcap: float) -> torch.Tensor:
    z = logits.to(accumulator_dtype(logits.dtype))
    z = z if bias is None else z + bias
    return softcap * torch.tanh(z / softcap) if softcap else z


def _statistics_reference(
    logits: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, rule: LabelTarget
) -> torch.Tensor:
    z = _final_logits(logits, bias, rule.softcap)
    rows, width = z.shape
    if not width:
        return torch.tensor([-torch.inf, 0.0, 0.0, 0.0], dtype=z.dtype, device=z.device).expand(rows, 4)
    label = target - rule.first_token
    here = (label >= 0) & (label < width)
    picked = z.gather(1, label.clamp(0, width - 1).unsqueeze(1)).squeeze(1)
    top = z.amax(1)
    total = (z - torch.where(top == -torch.inf, 0.0, top).unsqueeze(1)).exp().sum(1)
    return torch.stack([top, total, torch.where(here, picked, 0.0), z.sum(1)], 1)


@jit
def _row_losses_kernel(
    partials, target, out, shards, rows, ignored, vocabulary, smoothing, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = row < rows
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    picked = tl.zeros((BLOCK,), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    for shard in range(0, shards):
        place = partials + (shard * rows + row) * 4
        here = tl.load(place, mask=inside, other=float("-inf"))
        higher = tl.maximum(top, here)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.load(place + 1, mask=inside, other=0.0) * tl.exp(here - base)
        picked += tl.load(place + 2, mask=inside, other=0.0)
        plain += tl.load(place + 3, mask=inside, other=0.0)
        top = higher
    top = tl.where(top == float("-inf"), 0.0, top)
    label = tl.load(target + row, mask=inside, other=0).to(tl.int64)
    loss = top - picked + tl.log(total)
    if smoothing > 0:
        loss += smoothing * (picked - plain / vocabulary)
    loss = tl.where((label >= 0) & (label < vocabulary), loss, float("nan"))
    tl.store(out + row, tl.where(label == ignored, 0.0, loss), mask=inside)
    tl.store(out + rows + row, top, mask=inside)
    tl.store(out + 2 * rows + row, tl.log(total), mask=inside)


def compute_row_losses(
    partials: torch.Tensor, target: torch.Tensor, rule: LabelTarget
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (losses [rows], norms [2, rows] as from `combine_softmax_partials`) from the statistics of all
    tiles [tiles, rows, 4]."""
    shards, rows, _ = partials.shape
    if not has_kernels(partials):
        return _row_losses_reference(partials, target, rule)
    out = partials.new_empty(3, rows)
    with on_device(partials):
        _row_losses_kernel[(ceil_div(rows, 128),)](
            partials,
            target,
            out,
            shards,
            rows,
            rule.ignore_index,
            rule.vocabulary,
            float(rule.label_smoothing),
            BLOCK=128,
        )
    return out[0], out[1:]


def _row_losses_reference(
    partials: torch.Tensor, target: torch.Tensor, rule: LabelTarget
) -> tuple[torch.Tensor, torch.Tensor]:
    norms = combine_softmax_partials(partials[:, :, 0], partials[:, :, 1])
    picked, total = partials[:, :, 2].sum(0), partials[:, :, 3].sum(0)
    loss = norms[0] - picked + norms[1]
    if rule.label_smoothing:
        loss = loss + rule.label_smoothing * (picked - total / rule.vocabulary)
    loss = loss.masked_fill(rule.is_outside(target), torch.nan)
    return loss.masked_fill(target == rule.ignore_index, 0.0), norms


@jit
def logit_gradient(log_q, columns, label, peak, spread):
    """Returns d loss / d logit: the softmax minus the smoothed target distribution."""
    return tl.exp(log_q) - tl.where(columns == label, peak, 0.0) - spread


@jit
def _logits_gradient_kernel(
    logits, bias, target, norms, upstream, norms_stride, stride, width, first, ignored, peak, spread, cap,
    BIAS: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    place = logits + row * stride + columns
    z = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        z += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    z = apply_softcap(z, cap, CAP)
    label = tl.load(target + row).to(tl.int64)
    log_q = z - tl.load(norms + row) - tl.load(norms + norms_stride + row)
    change = logit_gradient(log_q, columns, label - first, peak, spread)
    if CAP:
        change *= 1.0 - (z / cap) * (z / cap)
    change = tl.where(label == ignored, 0.0, tl.load(upstream + row) * change)
    tl.store(place, change.to(logits.dtype.element_ty), mask=inside)


def write_logits_gradient_(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    norms: torch.Tensor,
    upstream: torch.Tensor,
    rule: LabelTarget,
) -> None:
    """Replaces a tile's products hidden @ weight.T, `logits` [rows, width], by their gradient of
    the sum of `upstream` [rows] times the losses. `bias` is [width], `target` [rows], `norms` [2, rows]."""
    rows, width = logits.shape
    if not has_kernels(logits):
        _write_logits_gradient_reference_(logits, bias, target, norms, upstream, rule)
    elif width:
        launch = launch_tuning.choose_launch(CROSS_ENTROPY_NAME, width, logits)
        with on_device(logits):
            _logits_gradient_kernel[(rows, ceil_div(width, launch.block))](
                logits, logits if bias is None else bias, target, norms, upstream, norms.stride(0),
                logits.stride(0), width, rule.first_token, rule.ignore_index, 1 - rule.label_smoothing,
                rule.label_smoothing / rule.vocabulary, rule.softcap or 1.0, BIAS=bias is not None,
                CAP=rule.softcap != 0, BLOCK=launch.block, num_warps=launch.warps,
            )  # fmt: skip


def _write_logits_gradient_reference_(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    norms: torch.Tensor,
    upstream: torch.Tensor,
    rule: LabelTarget,
) -> None:
    z = _final_logits(logits, bias, rule.softcap)
    change = (z - norms[0].unsqueeze(1) - norms[1].unsqueeze(1)).exp_()
    columns = torch.arange(rule.first_token, rule.first_token + z.shape[1], device=z.device)
    change -= (columns == target.unsqueeze(1)) * (
        1 - rule.label_smoothing
    ) + rule.label_smoothing / rule.vocabulary
    if rule.softcap:
        change *= 1 - (z / rule.softcap) ** 2
    change *= upstream.unsqueeze(1)
    logits.copy_(change.masked_fill_((target == rule.ignore_index).unsqueeze(1), 0.0))
