"""The losses on linear heads under tensor parallelism: every rank holds a slice of the vocabulary, and none
computes whole logits.

Each rank passes its slice of the weights and the same hidden states and labels. Per row, a few numbers
(maximum, sum of exponentials, the label's logit) are gathered over the group and combined in rank order, so
that all ranks compute the same loss, bit for bit. The gradient of a slice stays on its rank; the gradient of
the hidden states is summed over the group. So no further communication is needed around these calls: hidden
states enter replicated, and the loss leaves replicated.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from secc.runtime.kernels import cross_entropy, kl, kl_cross_entropy
from secc.runtime.kernels.divergence import Divergence, DivergenceKind
from secc.runtime.kernels.tile_cross_entropy import LabelTarget
from secc.runtime.kernels.vocab_group import combine_softmax_partials

__all__ = [
    "combine_softmax_partials",
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_linear_cross_entropy_rows",
    "vocab_parallel_linear_kl",
    "vocab_parallel_linear_kl_ce",
]


def vocab_parallel_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    first: int,
    vocabulary: int,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`linear_cross_entropy` with this rank's `weight` [v, H] and `bias` [v] for tokens first … first + v of
    `vocabulary`.

    `target` holds token numbers of the whole vocabulary. Slices may differ in length and be empty. Collective
    over `group`.
    """
    rule = LabelTarget(ignore_index, label_smoothing, softcap or 0.0, first, vocabulary)
    return cross_entropy.sharded_linear_cross_entropy(hidden, weight, target, bias, rule, group.group_name)


def vocab_parallel_linear_cross_entropy_rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    first: int,
    vocabulary: int,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """`linear_cross_entropy_rows` with the arguments of `vocab_parallel_linear_cross_entropy`. The rows leave
    replicated."""
    rule = LabelTarget(ignore_index, label_smoothing, softcap or 0.0, first, vocabulary)
    return cross_entropy.sharded_linear_cross_entropy_rows(
        hidden, weight, target, bias, rule, group.group_name
    )


def vocab_parallel_linear_kl(
    student_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    vocabulary: int,
    temperature: float = 1.0,
    kind: DivergenceKind = "forward",
    beta: float = 0.5,
    student_bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`linear_kl` with the same slice of v of the `vocabulary` tokens in both weights of a rank, [v, H] and
    [v, K], and in biases, [v]; the other shapes are the same. Collective over `group`."""
    rule = Divergence(kind, beta, temperature, student_softcap or 0.0, teacher_softcap or 0.0)
    return kl.sharded_linear_kl(
        student_hidden,
        student_weight,
        teacher_hidden,
        teacher_weight,
        mask,
        (student_bias, teacher_bias),
        rule,
        vocabulary,
        group.group_name,
    )


def vocab_parallel_linear_kl_ce(
    student_hidden: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    target: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    first: int,
    vocabulary: int,
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
    """`linear_kl_ce` with tokens first … first + v of `vocabulary` in both weights of a rank, [v, H] and [v,
    K], and in biases, [v]; the other shapes are the same. Collective over `group`."""
    rule, labels = (
        Divergence(kind, beta, temperature, student_softcap or 0.0, teacher_softcap or 0.0),
        LabelTarget(ignore_index, label_smoothing, student_softcap or 0.0, first, vocabulary),
    )
    heads, biases = (
        (student_hidden, student_weight, teacher_hidden, teacher_weight),
        (student_bias, teacher_bias),
    )
    return kl_cross_entropy.sharded_linear_kl_ce(*heads, target, mask, biases, rule, labels, group.group_name)
