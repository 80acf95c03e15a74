"""Divergence between a teacher's and a student's next-token distributions, from hidden states and heads,
without whole logits.

Tiled as in `chunked_head`, with one chunk of logits per model; `divergence` has the mathematics. FLOPs for N
rows: 2NHV for each model's logits and 4NHV for the student's gradients, as unfused.
"""

from __future__ import annotations

import torch

from secc.runtime.kernels import launch_tuning
from secc.runtime.kernels.backend import accumulator_dtype, as_rows, ceil_div, check_argument
from secc.runtime.kernels.chunked_head import (
    ChunkedHead,
    ChunkedHeadGradient,
    cast_as_autocast,
    check_head_fits,
    choose_chunk_rows,
    default_loss_launch,
    loss_launch_candidates,
    make_fake_gradients,
    save_gradients,
    scale_saved_gradients,
    split_for_teacher,
    split_rows,
)
from secc.runtime.kernels.divergence import Divergence, DivergenceKind, compute_row_norms, compute_row_values
from secc.runtime.kernels.fused_operator import fused_operator
from secc.runtime.kernels.vocab_group import VocabGroup

LINEAR_KL_NAME = "linear_kl"


Biases = tuple[torch.Tensor | None, torch.Tensor | None]


def weigh_rows(mask: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the weights [rows] of rows, in the dtype of sums: a floating `mask` [rows] itself, 1 where
    another is not 0, and 1 everywhere without a mask. `hidden` [rows, H] gives rows, dtype and device."""
    dtype = accumulator_dtype(hidden.dtype)
    if mask is None:
        return hidden.new_ones(hidden.shape[0], dtype=dtype)
    return (mask if mask.is_floating_point() else mask != 0).to(dtype)


@fused_operator("secc::linear_kl")
def _linear_kl_op(
    student_hidden: torch.Tensor, student_weight: torch.Tensor, teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor, student_bias: torch.Tensor | None, teacher_bias: torch.Tensor | None,
    mask: torch.Tensor | None, temperature: float, kind: str, beta: float, student_softcap: float,
    teacher_softcap: float, vocabulary: int, group: str, want_hidden: bool, want_weight: bool,
    want_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    rule, shards, weights = (
        Divergence(kind, beta, temperature, student_softcap, teacher_softcap),
        VocabGroup(group),
        weigh_rows(mask, student_hidden),
    )
    tokens = ceil_div(vocabulary, shards.size)
    chunk = choose_chunk_rows(LINEAR_KL_NAME, student_hidden, student_weight, tokens)
    losses = student_hidden.new_empty(student_hidden.shape[0], dtype=accumulator_dtype(student_hidden.dtype))
    with torch.autocast(student_hidden.device.type, enabled=False):
        student, teacher = (
            ChunkedHead(student_hidden, student_weight, student_bias, chunk),
            ChunkedHead(teacher_hidden, teacher_weight, teacher_bias, chunk),
        )
        gradient = ChunkedHeadGradient(student, student_weight, want_hidden, want_weight, want_bias)
        for rows in split_rows(student_hidden.shape[0], chunk):
            logits = student.compute_logits(rows)
            for part, within in split_for_teacher(rows, teacher_hidden, tokens):
                z, teacher_z = logits[within], teacher.compute_logits(part)
                norms = compute_row_norms(LINEAR_KL_NAME, z, teacher_z, rule, shards)
                losses[part], _ = compute_row_values(
                    LINEAR_KL_NAME, z, teacher_z, norms, weights[part], rule, shards,
                    gradient=gradient.is_wanted,
                )  # fmt: skip
            if gradient.is_wanted:
                gradient.add_chunk(rows, logits)
        total = shards.sum_in_rank_order(losses.sum(dtype=torch.float64)).to(losses.dtype)
        return total, (weights != 0).sum(), *gradient.results(shards)


@_linear_kl_op.register_fake
def _(
    student_hidden, student_weight, teacher_hidden, teacher_weight, student_bias, teacher_bias, mask,
    temperature, kind, beta, student_softcap, teacher_softcap, vocabulary, group, want_hidden, want_weight,
    want_bias,
):  # fmt: skip
    tokens = ceil_div(vocabulary, VocabGroup(group).size)
    chunk = choose_chunk_rows(LINEAR_KL_NAME, student_hidden, student_weight, tokens)
    gradients = make_fake_gradients(
        student_hidden, student_weight, chunk, want_hidden, want_weight, want_bias
    )
    loss = student_hidden.new_empty((), dtype=accumulator_dtype(student_hidden.dtype))
    return loss, student_hidden.new_empty((), dtype=torch.int64), *gradients


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    save_gradients(ctx, output[2:], (inputs[0], inputs[1], inputs[4]), inputs[-3:])


def _backward(ctx, upstream, *_):
    if upstream is None:
        return (None,) * 17
    hidden, weight, bias = scale_saved_gradients(ctx, upstream)
    return hidden, weight, None, None, bias, *(None,) * 12


_linear_kl_op.register_autograd(_backward, setup_context=_setup_context)


def check_head_pair(
    name: str, student_hidden: torch.Tensor, student_weight: torch.Tensor, teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor, mask: torch.Tensor | None, biases: Biases,
) -> None:  # fmt: skip
    """Raises UserError unless both heads, each `hidden` [..., H], `weight` [v, H] and bias [v] with a width H
    of its own, fit and have the same rows and vocabulary, and `mask` [...] fits the rows."""
    check_head_fits(f"{name}, the student", student_hidden, student_weight, biases[0])
    check_head_fits(f"{name}, the teacher", teacher_hidden, teacher_weight, biases[1])
    check_argument(
        student_hidden.device == teacher_hidden.device,
        f"{name}: student and teacher are on different devices",
    )
    rows, teacher_rows = list(student_hidden.shape[:-1]), list(teacher_hidden.shape[:-1])
    check_argument(rows == teacher_rows, f"{name}: rows {rows} of the student, {teacher_rows} of the teacher")
    sizes = student_weight.shape[0], teacher_weight.shape[0]
    check_argument(
        sizes[0] == sizes[1],
        f"{name}: the student has {sizes[0]} tokens, the teacher {sizes[1]}",
        f"if the longer one is padded, cut it: weight[:{min(sizes)}] takes the softmax over the tokens that"
        " both have",
    )
    check_argument(
        mask is None or list(mask.shape) == rows, f"{name}: the mask has one entry for each row, {rows}"
    )
    check_argument(
        mask is None or not mask.requires_grad, f"{name}: rows' weights get no gradient", "detach them"
    )
    for bias in biases:
        check_argument(
            bias is None or list(bias.shape) == [sizes[0]], f"{name}: one bias for each of {sizes[0]} tokens"
        )


def linear_kl(
    student_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    kind: DivergenceKind = "forward",
    beta: float = 0.5,
    student_bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divergence of the teacher's and the student's softmax(logits / temperature) without whole logits.
    Returns (sum over rows, number of counted rows).

    `student_hidden` [..., H], `student_weight` [V, H], `teacher_hidden` [..., K], `teacher_weight` [V, K],
    `mask` [...] bool or integer (rows with 0 do not count), or floating: weights of the rows. `student_bias`
    and `teacher_bias` [V]. A softcap makes a model's logits softcap * tanh(logits / softcap), before the
    temperature. Kinds: `forward` KL(teacher || student),
    `reverse` KL(student || teacher), `js` beta * KL(teacher || m) + (1 - beta) * KL(student || m) with m =
    beta * teacher + (1 - beta) * student, 0 < beta < 1. There is no factor of temperature squared. The sum is
    float32 (float64 for float64), the count int64. Gradients reach the student's arguments only. Raises
    UserError for shapes or dtypes that do not fit and for unequal vocabularies.
    """
    return sharded_linear_kl(
        student_hidden,
        student_weight,
        teacher_hidden,
        teacher_weight,
        mask,
        (student_bias, teacher_bias),
        Divergence(kind, beta, temperature, student_softcap or 0.0, teacher_softcap or 0.0),
        student_weight.shape[0],
        "",
    )


def sharded_linear_kl(
    student_hidden: torch.Tensor, student_weight: torch.Tensor, teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor, mask: torch.Tensor | None, biases: Biases, rule: Divergence,
    vocabulary: int, group: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`linear_kl` on the tokens of both vocabularies that this rank of `group` holds: weights are [v, H] and
    [v, K], `biases` (the student's and the teacher's) [v], the other shapes are the same. `vocabulary` is the
    number of tokens on all ranks."""
    check_head_pair(
        LINEAR_KL_NAME, student_hidden, student_weight, teacher_hidden, teacher_weight, mask, biases
    )
    check_argument(vocabulary > 0, f"{LINEAR_KL_NAME}: an empty vocabulary")
    student_hidden, teacher_hidden, teacher_weight = (
        cast_as_autocast(student_hidden),
        cast_as_autocast(teacher_hidden.detach()),
        teacher_weight.detach(),
    )
    rule.check_options(LINEAR_KL_NAME)
    student_bias, teacher_bias = biases
    given = student_hidden, student_weight, student_bias
    wants = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in given]
    loss, count, *_ = _linear_kl_op(
        as_rows(student_hidden), student_weight, as_rows(teacher_hidden), teacher_weight, student_bias,
        None if teacher_bias is None else teacher_bias.detach(),
        None if mask is None else mask.reshape(-1), rule.temperature, rule.kind, rule.beta,
        rule.student_softcap, rule.teacher_softcap, vocabulary, group, *wants,
    )  # fmt: skip
    return loss, count


def _make_trial(rows: int, size: int, dtype: torch.dtype, device: torch.device):
    hidden = torch.randn(rows, 1024, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(size, 1024, dtype=dtype, device=device) / 32
    teacher = torch.randn(rows, 1024, dtype=dtype, device=device)
    return lambda: linear_kl(hidden, weight, teacher, weight)


launch_tuning.register_kernel(
    launch_tuning.TunableKernel(LINEAR_KL_NAME, default_loss_launch, loss_launch_candidates, _make_trial)
)
