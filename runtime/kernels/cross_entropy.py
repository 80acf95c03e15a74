"""Cross entropy of a linear head's logits, which never exist beyond a chunk of rows (tiling: `linear_loss`).

    logits = capped(hidden @ weight.T + bias)          capped(x) = softcap * tanh(x / softcap)
    loss of a row = logsumexp(logits) - (1 - s) * logits[target] - s * mean(logits)         s = label_smoothing

Sums over the rows whose target is not `ignore_index`. FLOPs: 2NHV forward and 4NHV for the gradients, as unfused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from secc.runtime.kernels import tuning
from secc.runtime.kernels.activations import capped
from secc.runtime.kernels.backend import accumulator, as_rows, ceil_div, has_kernels, jit, on_device, require, tl
from secc.runtime.kernels.linear_loss import (
    Head,
    HeadGradient,
    Tiling,
    autocast,
    candidates,
    default_launch,
    fake_gradients,
    require_fits,
    row_chunks,
    scaled,
)
from secc.runtime.kernels.shards import Shards, combine

NAME = "linear_cross_entropy"
# As Liger-Kernel tiles it: the logits of a chunk take what the hidden states take, and a 16-bit weight's gradient nothing beside itself.
TILING = Tiling(NAME, logits_bytes=0, own_dtype_chunks=None)


@dataclass(frozen=True)
class Target:
    """What a row's loss compares with: labels, which are left out, smoothing, the cap, and where this shard's vocabulary starts."""

    ignore_index: int
    label_smoothing: float
    softcap: float  # 0: none
    first: int
    vocabulary: int  # of all shards

    def check_options(self, name: str) -> None:
        """Raise UserError for options that mean nothing."""
        require(self.vocabulary > 0, f"{name}: an empty vocabulary")
        require(0.0 <= self.label_smoothing <= 1.0, f"{name}: label_smoothing {self.label_smoothing} is outside 0 … 1")
        require(self.softcap >= 0, f"{name}: softcap must be positive", "None means no cap")

    def check(self, target: torch.Tensor) -> None:
        """Raise UserError for a label that is no token. On a GPU such a row's loss is NaN instead, since looking would stall it."""
        if not target.is_cuda and bool(((target != self.ignore_index) & self.outside(target)).any()):
            bad = target[(target != self.ignore_index) & self.outside(target)][0].item()
            require(False, f"target {bad} is not in a vocabulary of {self.vocabulary}", "is ignore_index what the labels use?")

    def outside(self, target: torch.Tensor) -> torch.Tensor:
        """Which labels are no tokens of the vocabulary (`ignore_index` too, as a rule)."""
        return (target < 0) | (target >= self.vocabulary)


@jit
def _statistics(logits, bias, target, out, stride, width, first, cap, BIAS: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr):
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
        z = capped(z, cap, CAP)
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
    picked = tl.where(here, capped(picked, cap, CAP), 0.0)
    tl.store(out + row * 4, top)
    tl.store(out + row * 4 + 1, total)
    tl.store(out + row * 4 + 2, picked)
    tl.store(out + row * 4 + 3, plain)


def statistics(logits: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, rule: Target) -> torch.Tensor:
    """[rows, 4] of a chunk on this shard: greatest logit, sum of exp(logit - greatest), the target's logit (0 elsewhere), sum of logits."""
    rows, width = logits.shape
    if not has_kernels(logits):
        return _statistics_reference(logits, bias, target, rule)
    out = logits.new_empty(rows, 4, dtype=torch.float32)
    launch = tuning.launch(NAME, width or 1, logits)
    with on_device(logits):
        _statistics[(rows,)](
            logits, logits if bias is None else bias, target, out, logits.stride(0), width, rule.first, rule.softcap or 1.0,
            BIAS=bias is not None, CAP=rule.softcap != 0, BLOCK=launch.block, num_warps=launch.warps,
        )  # fmt: skip
    return out


def _final_logits(logits: torch.Tensor, bias: torch.Tensor | None, softcap: float) -> torch.Tensor:
    z = logits.to(accumulator(logits.dtype))
    z = z if bias is None else z + bias
    return softcap * torch.tanh(z / softcap) if softcap else z


def _statistics_reference(logits: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, rule: Target) -> torch.Tensor:
    z = _final_logits(logits, bias, rule.softcap)
    rows, width = z.shape
    if not width:
        return torch.tensor([-torch.inf, 0.0, 0.0, 0.0], dtype=z.dtype, device=z.device).expand(rows, 4)
    label = target - rule.first
    here = (label >= 0) & (label < width)
    picked = z.gather(1, label.clamp(0, width - 1).unsqueeze(1)).squeeze(1)
    top = z.amax(1)
    total = (z - torch.where(top == -torch.inf, 0.0, top).unsqueeze(1)).exp().sum(1)
    return torch.stack([top, total, torch.where(here, picked, 0.0), z.sum(1)], 1)


@jit
def _row_losses(partials, target, out, shards, rows, ignored, vocabulary, smoothing, BLOCK: tl.constexpr):
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


def row_losses(partials: torch.Tensor, target: torch.Tensor, rule: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses [rows], norms [2, rows] as `combine` gives them) from the shards' partials [shards, rows, 4] (see `statistics`)."""
    shards, rows, _ = partials.shape
    if not has_kernels(partials):
        return _row_losses_reference(partials, target, rule)
    out = partials.new_empty(3, rows)
    with on_device(partials):
        _row_losses[(ceil_div(rows, 128),)](
            partials, target, out, shards, rows, rule.ignore_index, rule.vocabulary, float(rule.label_smoothing), BLOCK=128
        )
    return out[0], out[1:]


def _row_losses_reference(partials: torch.Tensor, target: torch.Tensor, rule: Target) -> tuple[torch.Tensor, torch.Tensor]:
    norms = combine(partials[:, :, 0], partials[:, :, 1])
    picked, total = partials[:, :, 2].sum(0), partials[:, :, 3].sum(0)
    loss = norms[0] - picked + norms[1]
    if rule.label_smoothing:
        loss = loss + rule.label_smoothing * (picked - total / rule.vocabulary)
    loss = loss.masked_fill(rule.outside(target), torch.nan)
    return loss.masked_fill(target == rule.ignore_index, 0.0), norms


@jit
def gradient_of_logit(log_q, columns, label, peak, spread):
    """d loss / d logit: softmax minus the smoothed target distribution."""
    return tl.exp(log_q) - tl.where(columns == label, peak, 0.0) - spread


@jit
def _gradient(
    logits, bias, target, norms, norms_stride, stride, width, first, ignored, peak, spread, cap,
    BIAS: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    place = logits + row * stride + columns
    z = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        z += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    z = capped(z, cap, CAP)
    label = tl.load(target + row).to(tl.int64)
    log_q = z - tl.load(norms + row) - tl.load(norms + norms_stride + row)
    change = gradient_of_logit(log_q, columns, label - first, peak, spread)
    if CAP:
        change *= 1.0 - (z / cap) * (z / cap)
    change = tl.where(label == ignored, 0.0, change)
    tl.store(place, change.to(logits.dtype.element_ty), mask=inside)


def gradient_(logits: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, norms: torch.Tensor, rule: Target) -> None:
    """Replace a chunk's logits by the gradient of the summed loss with respect to the product hidden @ weight.T."""
    rows, width = logits.shape
    if not has_kernels(logits):
        _gradient_reference_(logits, bias, target, norms, rule)
    elif width:
        launch = tuning.launch(NAME, width, logits)
        with on_device(logits):
            _gradient[(rows, ceil_div(width, launch.block))](
                logits, logits if bias is None else bias, target, norms, norms.stride(0), logits.stride(0), width, rule.first,
                rule.ignore_index, 1 - rule.label_smoothing, rule.label_smoothing / rule.vocabulary, rule.softcap or 1.0,
                BIAS=bias is not None, CAP=rule.softcap != 0, BLOCK=launch.block, num_warps=launch.warps,
            )  # fmt: skip


def _gradient_reference_(logits: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, norms: torch.Tensor, rule: Target) -> None:
    z = _final_logits(logits, bias, rule.softcap)
    change = (z - norms[0].unsqueeze(1) - norms[1].unsqueeze(1)).exp_()
    columns = torch.arange(rule.first, rule.first + z.shape[1], device=z.device)
    change -= (columns == target.unsqueeze(1)) * (1 - rule.label_smoothing) + rule.label_smoothing / rule.vocabulary
    if rule.softcap:
        change *= 1 - (z / rule.softcap) ** 2
    logits.copy_(change.masked_fill_((target == rule.ignore_index).unsqueeze(1), 0.0))


@torch.library.custom_op("secc::linear_cross_entropy", mutates_args=())
def _operator(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, ignore_index: int, label_smoothing: float,
    softcap: float, first: int, vocabulary: int, group: str, want_hidden: bool, want_weight: bool, want_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    rule, shards = Target(ignore_index, label_smoothing, softcap, first, vocabulary), Shards(group)
    rule.check(target)
    chunk = TILING.chunk(hidden, ceil_div(vocabulary, shards.size))
    losses = hidden.new_empty(hidden.shape[0], dtype=accumulator(hidden.dtype))
    with torch.autocast(hidden.device.type, enabled=False):
        head = Head(hidden, weight, chunk)
        gradient = HeadGradient(TILING, head, weight, bias, (want_hidden, want_weight, want_bias))
        for rows in row_chunks(hidden.shape[0], chunk):
            logits = head.logits(rows)
            partials = shards.gather(statistics(logits, bias, target[rows], rule))
            losses[rows], norms = row_losses(partials, target[rows], rule)
            if gradient.wanted:
                gradient_(logits, bias, target[rows], norms, rule)
                gradient.add(rows, logits)
        return losses.sum(dtype=torch.float64).to(losses.dtype), (target != ignore_index).sum(), *gradient.results(shards)


@_operator.register_fake
def _(
    hidden, weight, bias, target, ignore_index, label_smoothing, softcap, first, vocabulary, group, want_hidden, want_weight, want_bias
):  # fmt: skip
    shard = ceil_div(vocabulary, Shards(group).size)
    gradients = fake_gradients(TILING, hidden, weight, bias, shard, (want_hidden, want_weight, want_bias))
    return hidden.new_empty((), dtype=accumulator(hidden.dtype)), target.new_empty((), dtype=torch.int64), *gradients


def _setup_context(ctx, inputs, output):
    ctx.dtypes = tuple(None if t is None else t.dtype for t in inputs[:3])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[2:])


def _backward(ctx, upstream, *_):
    if upstream is None:
        return (None,) * 13
    return *scaled(ctx, upstream, ctx.dtypes), *(None,) * 10


_operator.register_autograd(_backward, setup_context=_setup_context)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of `hidden @ weight.T + bias` without the logits: (sum over rows, number of rows that count).

    `hidden` [..., H], `weight` [V, H], `target` [...] integers, `bias` [V]; rows with `ignore_index` are left out. The sum is float32
    (float64 for float64), the count int64. `softcap`: logits become softcap * tanh(logits / softcap). Gradients reach hidden, weight
    and bias. Under autocast the products take its dtype. Raises UserError for shapes or dtypes that do not fit, and on the CPU for a
    target that is no token (on a GPU the sum is NaN).
    """
    return sharded(hidden, weight, target, bias, Target(ignore_index, label_smoothing, softcap or 0.0, 0, weight.shape[0]), "")


def sharded(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None, rule: Target, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """`linear_cross_entropy` on the tokens that this rank holds (from `rule.first` on) of a vocabulary that the ranks of `group` share."""
    require_fits(NAME, hidden, weight, bias)
    hidden = autocast(hidden)
    require(target.shape == hidden.shape[:-1], f"{NAME}: target {list(target.shape)} for hidden {list(hidden.shape)}")
    require(not target.is_floating_point(), f"{NAME}: targets are token numbers, not {target.dtype}")
    require(bias is None or bias.shape == weight.shape[:1], f"{NAME}: one bias for each of {weight.shape[0]} tokens")
    rule.check_options(NAME)
    grad = torch.is_grad_enabled()
    wants = [grad and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    loss, count, *_ = _operator(
        as_rows(hidden), weight, bias, target.reshape(-1), rule.ignore_index, rule.label_smoothing, rule.softcap, rule.first,
        rule.vocabulary, group, *wants,
    )  # fmt: skip
    return loss, count


def _trial(rows: int, size: int, dtype: torch.dtype, device: torch.device):
    hidden = torch.randn(rows, 1024, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(size, 1024, dtype=dtype, device=device) / 32
    target = torch.randint(size, (rows,), device=device)
    return lambda: linear_cross_entropy(hidden, weight, target)


tuning.register(tuning.Tunable(NAME, default_launch, candidates, _trial))
