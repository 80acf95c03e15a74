"""Divergence and cross entropy on one student's head: one pass over its logits yields both, a second one the
gradient of their weighted sum.

The weights are known only in backward (each sum has its own upstream gradient), so gradients cannot be
computed with the losses as in `linear_kl`. Backward computes both models' logits again and writes the
gradient of the weighted sum at once. FLOPs for N rows: 2NHV for each model's logits, twice, and 4NHV for the
gradients. That is 12NHV at equal hidden sizes; separate losses spend 14NHV and keep two gradients of the
weight, unfused PyTorch spends 8NHV. Seven numbers per row are kept between forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from secc.runtime.kernels import launch_tuning
from secc.runtime.kernels.activations import apply_softcap
from secc.runtime.kernels.backend import (
    accumulator_dtype,
    as_rows,
    ceil_div,
    check_argument,
    has_kernels,
    jit,
    on_device,
    tl,
)
from secc.runtime.kernels.chunked_head import (
    ChunkedHead,
    ChunkedHeadGradient,
    cast_as_autocast,
    choose_chunk_rows,
    default_loss_launch,
    loss_launch_candidates,
    split_for_teacher,
    split_rows,
)
from secc.runtime.kernels.divergence import (
    Divergence,
    DivergenceKind,
    cap_slope,
    chunk_log_softmax,
    compute_row_norms,
    compute_row_values,
    gradient_at_token,
    gradient_at_token_reference,
)
from secc.runtime.kernels.fused_operator import fused_operator
from secc.runtime.kernels.kl import Biases, check_head_pair, weigh_rows
from secc.runtime.kernels.tile_cross_entropy import (
    LabelTarget,
    compute_row_losses,
    compute_tile_statistics,
    logit_gradient,
)
from secc.runtime.kernels.vocab_group import VocabGroup

LINEAR_KL_CE_NAME = "linear_kl_ce"


@dataclass(frozen=True)
class RowUpstream:
    """What backward knows of rows: norms [6, rows] (student at T, teacher at T, student), R [rows], and the
    upstream gradients of both sums."""

    norms: torch.Tensor
    inner: torch.Tensor
    divergence: torch.Tensor
    cross_entropy: torch.Tensor


@jit
def _weighted_gradient_kernel(
    student, teacher, norms, inner, weights, target, divergence, cross_entropy, student_stride,
    teacher_stride, norms_stride, width, first, ignored, peak, spread, scale, beta, student_cap, teacher_cap,
    KIND: tl.constexpr, STUDENT_CAP: tl.constexpr, TEACHER_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    place = student + row * student_stride + columns
    z = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    teacher_z = tl.load(teacher + row * teacher_stride + columns, mask=inside, other=0.0).to(tl.float32)
    z = apply_softcap(z, student_cap, STUDENT_CAP)
    teacher_z = apply_softcap(teacher_z, teacher_cap, TEACHER_CAP)
    norms += row
    log_q = z * scale - tl.load(norms) - tl.load(norms + norms_stride)
    log_p = teacher_z * scale - tl.load(norms + 2 * norms_stride) - tl.load(norms + 3 * norms_stride)
    change = scale * gradient_at_token(log_q, log_p, tl.load(inner + row), beta, KIND)
    weight = tl.load(weights + row)
    change = tl.where(weight != 0, tl.load(divergence) * weight * change, 0.0)
    label = tl.load(target + row).to(tl.int64)
    log_q = z - tl.load(norms + 4 * norms_stride) - tl.load(norms + 5 * norms_stride)
    other = logit_gradient(log_q, columns, label - first, peak, spread)
    change += tl.where(label == ignored, 0.0, tl.load(cross_entropy) * other)
    if STUDENT_CAP:
        change *= 1.0 - (z / student_cap) * (z / student_cap)
    tl.store(place, change.to(student.dtype.element_ty), mask=inside)


def _write_weighted_gradient_reference_(
    student: torch.Tensor,
    teacher: torch.Tensor,
    weights: torch.Tensor,
    target: torch.Tensor,
    up: RowUpstream,
    rule: Divergence,
    labels: LabelTarget,
) -> None:
    log_q = chunk_log_softmax(student, up.norms[:2], rule.temperature, rule.student_softcap)
    log_p = chunk_log_softmax(teacher, up.norms[2:4], rule.temperature, rule.teacher_softcap)
    change = gradient_at_token_reference(log_q, log_p, up.inner, rule) * weights.unsqueeze(1)
    change = change.masked_fill_((weights == 0).unsqueeze(1), 0.0) * up.divergence
    other = chunk_log_softmax(student, up.norms[4:], 1.0, rule.student_softcap).exp_()
    columns = torch.arange(labels.first_token, labels.first_token + other.shape[1], device=other.device)
    other -= (columns == target.unsqueeze(1)) * (
        1 - labels.label_smoothing
    ) + labels.label_smoothing / labels.vocabulary
    change += other.masked_fill_((target == labels.ignore_index).unsqueeze(1), 0.0) * up.cross_entropy
    student.copy_(change * cap_slope(student, rule.student_softcap))


def write_weighted_gradient_(
    student: torch.Tensor,
    teacher: torch.Tensor,
    weights: torch.Tensor,
    target: torch.Tensor,
    up: RowUpstream,
    rule: Divergence,
    labels: LabelTarget,
) -> None:
    """Replaces a chunk's student logits [rows, width] by their gradient of the weighted sum of both losses.
    `teacher` [rows, width] are logits, `weights` and `target` [rows] the rows' weights and labels."""
    rows, width = student.shape
    if not has_kernels(student):
        _write_weighted_gradient_reference_(student, teacher, weights, target, up, rule, labels)
    elif width:
        launch = launch_tuning.choose_launch(LINEAR_KL_CE_NAME, width, student)
        with on_device(student):
            _weighted_gradient_kernel[(rows, ceil_div(width, launch.block))](
                student, teacher, up.norms, up.inner, weights, target, up.divergence, up.cross_entropy,
                student.stride(0), teacher.stride(0), up.norms.stride(0), width, labels.first_token,
                labels.ignore_index, 1 - labels.label_smoothing, labels.label_smoothing / labels.vocabulary,
                1 / rule.temperature, rule.beta, rule.student_softcap or 1.0, rule.teacher_softcap or 1.0,
                KIND=rule.kind, STUDENT_CAP=rule.student_softcap != 0, TEACHER_CAP=rule.teacher_softcap != 0,
                BLOCK=launch.block, num_warps=launch.warps,
            )  # fmt: skip


@fused_operator("secc::linear_kl_ce")
def _linear_kl_ce_op(
    student_hidden: torch.Tensor, student_weight: torch.Tensor, teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor, student_bias: torch.Tensor | None, teacher_bias: torch.Tensor | None,
    target: torch.Tensor, mask: torch.Tensor | None, temperature: float, kind: str, beta: float,
    student_softcap: float, teacher_softcap: float, ignore_index: int, label_smoothing: float, first: int,
    vocabulary: int, group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    rule, labels = (
        Divergence(kind, beta, temperature, student_softcap, teacher_softcap),
        LabelTarget(ignore_index, label_smoothing, student_softcap, first, vocabulary),
    )
    labels.check_labels(target)
    shards, weights = VocabGroup(group), weigh_rows(mask, student_hidden)
    rows_of_all, dtype = student_hidden.shape[0], accumulator_dtype(student_hidden.dtype)
    divergences, cross_entropies = student_hidden.new_empty(2, rows_of_all, dtype=dtype).unbind()
    norms, inner = (
        student_hidden.new_empty(6, rows_of_all, dtype=dtype),
        student_hidden.new_empty(rows_of_all, dtype=dtype),
    )
    tokens = ceil_div(vocabulary, shards.size)
    chunk = choose_chunk_rows(LINEAR_KL_CE_NAME, student_hidden, student_weight, tokens)
    with torch.autocast(student_hidden.device.type, enabled=False):
        student, teacher = (
            ChunkedHead(student_hidden, student_weight, student_bias, chunk),
            ChunkedHead(teacher_hidden, teacher_weight, teacher_bias, chunk),
        )
        for rows in split_rows(rows_of_all, chunk):
            z = student.compute_logits(rows)
            for part, within in split_for_teacher(rows, teacher_hidden, tokens):
                teacher_z = teacher.compute_logits(part)
                now = compute_row_norms(LINEAR_KL_CE_NAME, z[within], teacher_z, rule, shards)
                norms[:4, part] = now
                divergences[part], inner[part] = compute_row_values(
                    LINEAR_KL_CE_NAME, z[within], teacher_z, now, weights[part], rule, shards, gradient=False
                )
            partials = shards.all_gather(compute_tile_statistics(z, None, target[rows], labels))
            cross_entropies[rows], norms[4:, rows] = compute_row_losses(partials, target[rows], labels)
    divergence = shards.sum_in_rank_order(divergences.sum(dtype=torch.float64)).to(dtype)
    cross_entropy = cross_entropies.sum(dtype=torch.float64).to(dtype)
    return (
        divergence,
        (weights != 0).sum(),
        cross_entropy,
        (target != ignore_index).sum(),
        norms,
        inner,
    )


@_linear_kl_ce_op.register_fake
def _(
    student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias, target, mask,
    temperature, kind, beta, student_softcap, teacher_softcap, ignore_index, label_smoothing, first,
    vocabulary, group,
):  # fmt: skip
    rows, new = student_hidden.shape[0], student_hidden.to(accumulator_dtype(student_hidden.dtype)).new_empty
    return new(()), new((), dtype=torch.int64), new(()), new((), dtype=torch.int64), new(6, rows), new(rows)


@fused_operator("secc::linear_kl_ce_backward")
def _linear_kl_ce_backward_op(
    student_hidden: torch.Tensor, student_weight: torch.Tensor, teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor, student_bias: torch.Tensor | None, teacher_bias: torch.Tensor | None,
    target: torch.Tensor, mask: torch.Tensor | None, norms: torch.Tensor, inner: torch.Tensor,
    divergence: torch.Tensor, cross_entropy: torch.Tensor, temperature: float, kind: str, beta: float,
    student_softcap: float, teacher_softcap: float, ignore_index: int, label_smoothing: float, first: int,
    vocabulary: int, group: str, want_hidden: bool, want_weight: bool, want_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    rule, labels = (
        Divergence(kind, beta, temperature, student_softcap, teacher_softcap),
        LabelTarget(ignore_index, label_smoothing, student_softcap, first, vocabulary),
    )
    shards, weights = VocabGroup(group), weigh_rows(mask, student_hidden)
    tokens = ceil_div(vocabulary, shards.size)
    chunk = choose_chunk_rows(LINEAR_KL_CE_NAME, student_hidden, student_weight, tokens)
    with torch.autocast(student_hidden.device.type, enabled=False):
        student, teacher = (
            ChunkedHead(student_hidden, student_weight, student_bias, chunk),
            ChunkedHead(teacher_hidden, teacher_weight, teacher_bias, chunk),
        )
        gradient = ChunkedHeadGradient(student, student_weight, want_hidden, want_weight, want_bias)
        for rows in split_rows(student_hidden.shape[0], chunk):
            z = student.compute_logits(rows)
            for part, within in split_for_teacher(rows, teacher_hidden, tokens):
                up = RowUpstream(norms[:, part], inner[part], divergence, cross_entropy)
                teacher_z = teacher.compute_logits(part)
                write_weighted_gradient_(z[within], teacher_z, weights[part], target[part], up, rule, labels)
            gradient.add_chunk(rows, z)
        hidden, weight, bias = gradient.results(shards)
    bias = bias if student_bias is None else bias.to(student_bias.dtype)
    return hidden, weight.to(student_weight.dtype), bias


@_linear_kl_ce_backward_op.register_fake
def _(
    student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias, target, mask,
    norms, inner, divergence, cross_entropy, temperature, kind, beta, student_softcap, teacher_softcap,
    ignore_index, label_smoothing, first, vocabulary, group, want_hidden, want_weight, want_bias,
):  # fmt: skip
    hidden = torch.empty_like(student_hidden) if want_hidden else student_hidden.new_empty(0)
    weight = torch.empty_like(student_weight) if want_weight else student_weight.new_empty(0)
    bias = (
        student_hidden.new_empty(0)
        if student_bias is None
        else student_bias.new_empty(student_bias.shape[0] if want_bias else 0)
    )
    return hidden, weight, bias


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1], output[3], output[4], output[5])
    ctx.save_for_backward(*inputs[:8], *output[4:])
    ctx.options = inputs[8:]


def _backward(ctx, divergence, _, cross_entropy, *__):
    if divergence is None and cross_entropy is None:
        return (None,) * 18
    zero = torch.zeros_like(divergence if divergence is not None else cross_entropy)
    upstream = [zero if g is None else g.contiguous() for g in (divergence, cross_entropy)]
    needs = ctx.needs_input_grad
    wants = needs[0], needs[1], needs[4]
    gradients = _linear_kl_ce_backward_op(*ctx.saved_tensors, *upstream, *ctx.options, *wants)
    hidden, weight, bias = (g if want else None for g, want in zip(gradients, wants, strict=True))
    return hidden, weight, None, None, bias, *(None,) * 13


_linear_kl_ce_op.register_autograd(_backward, setup_context=_setup_context)


def linear_kl_ce(
    student_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    target: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    kind: DivergenceKind = "forward",
    beta: float = 0.5,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    student_bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`linear_kl` and `linear_cross_entropy` of one student. Returns (sum of the divergence, its rows, sum of
    the cross entropy, its rows), all 0-dim.

    Arguments and shapes as there: `mask` [...] selects or weights the rows of the divergence, `target` [...]
    (with `ignore_index`) those of the cross entropy, which uses temperature 1. The caller may weight the sums
    as desired, or use only one. Raises UserError as these functions do.
    """
    return sharded_linear_kl_ce(
        student_hidden, student_weight, teacher_hidden, teacher_weight, target, mask,
        (student_bias, teacher_bias),
        Divergence(kind, beta, temperature, student_softcap or 0.0, teacher_softcap or 0.0),
        LabelTarget(ignore_index, label_smoothing, student_softcap or 0.0, 0, student_weight.shape[0]), "",
    )  # fmt: skip


def sharded_linear_kl_ce(
    student_hidden: torch.Tensor, student_weight: torch.Tensor, teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor, target: torch.Tensor, mask: torch.Tensor | None, biases: Biases,
    rule: Divergence, labels: LabelTarget, group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """`linear_kl_ce` on the tokens of both vocabularies that this rank of `group` holds: weights are [v, H]
    and [v, K], `biases` (the student's and the teacher's) [v], the other shapes are the same."""
    check_head_pair(
        LINEAR_KL_CE_NAME, student_hidden, student_weight, teacher_hidden, teacher_weight, mask, biases
    )
    student_bias, teacher_bias = biases
    student_hidden, teacher_hidden, teacher_weight = (
        cast_as_autocast(student_hidden),
        cast_as_autocast(teacher_hidden.detach()),
        teacher_weight.detach(),
    )
    rule.check_options(LINEAR_KL_CE_NAME)
    labels.check_options(LINEAR_KL_CE_NAME)
    check_argument(
        target.shape == student_hidden.shape[:-1],
        f"{LINEAR_KL_CE_NAME}: target {list(target.shape)} for hidden {list(student_hidden.shape)}",
    )
    check_argument(
        not target.is_floating_point(), f"{LINEAR_KL_CE_NAME}: targets are token numbers, not {target.dtype}"
    )
    outputs = _linear_kl_ce_op(
        as_rows(student_hidden), student_weight, as_rows(teacher_hidden), teacher_weight, student_bias,
        None if teacher_bias is None else teacher_bias.detach(), target.reshape(-1),
        None if mask is None else mask.reshape(-1), rule.temperature, rule.kind, rule.beta,
        rule.student_softcap, rule.teacher_softcap, labels.ignore_index, labels.label_smoothing,
        labels.first_token, labels.vocabulary,
        group,
    )  # fmt: skip
    return outputs[0], outputs[1], outputs[2], outputs[3]


def _make_trial(rows: int, size: int, dtype: torch.dtype, device: torch.device):
    hidden = torch.randn(rows, 1024, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(size, 1024, dtype=dtype, device=device) / 32
    target = torch.randint(size, (rows,), device=device)

    def run() -> None:
        divergence, _, cross_entropy, _ = linear_kl_ce(hidden, weight, hidden, weight, target)
        torch.autograd.grad(divergence + cross_entropy, hidden)

    return run


launch_tuning.register_kernel(
    launch_tuning.TunableKernel(LINEAR_KL_CE_NAME, default_loss_launch, loss_launch_candidates, _make_trial)
)
