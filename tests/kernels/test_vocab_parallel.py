from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from secc.runtime.kernels import launch_tuning, linear_cross_entropy, linear_kl, linear_kl_ce
from secc.runtime.kernels.vocab_parallel import (
    combine_softmax_partials,
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_linear_kl,
    vocab_parallel_linear_kl_ce,
)
from tests.runtime.gloo_ranks import run_ranks

BOUNDS = (0, 8, 11)  # the vocabulary of 11 tokens on two ranks, unevenly
TARGET = torch.tensor([0, 7, 8, 10, -100])


def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 4), (11, 4), (5, 3), (11, 3), (11,)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def slices(rank: int):
    """Returns what a rank holds: whole hidden states, and weights and bias of its own tokens."""
    hidden, weight, teacher, teacher_weight, bias = tensors()
    mine = slice(BOUNDS[rank], BOUNDS[rank + 1])
    return (
        hidden.requires_grad_(),
        weight[mine].requires_grad_(),
        teacher,
        teacher_weight[mine],
        bias[mine].requires_grad_(),
    )


def sharded(rank: int):
    """Returns all losses and gradients of this rank."""
    dist.init_process_group("gloo")
    place = {"group": dist.group.WORLD, "first": BOUNDS[rank], "vocabulary": 11}
    found = {}
    with launch_tuning.use_launch("linear_cross_entropy", launch_tuning.LaunchParameters(4, 2, columns=5)):
        hidden, weight, _, _, bias = slices(rank)
        loss, _ = vocab_parallel_linear_cross_entropy(
            hidden, weight, TARGET, bias=bias, label_smoothing=0.1, softcap=3.0, **place
        )
        found["ce"] = loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias))
    for kind in ("forward", "reverse", "js"):
        hidden, weight, teacher, teacher_weight, _ = slices(rank)
        with launch_tuning.use_launch("linear_kl", launch_tuning.LaunchParameters(4, 2)):
            loss, _ = vocab_parallel_linear_kl(
                hidden,
                weight,
                teacher,
                teacher_weight,
                group=dist.group.WORLD,
                vocabulary=11,
                kind=kind,
                temperature=2.0,
            )
        found[kind] = loss.detach(), *torch.autograd.grad(loss, (hidden, weight))
        loss, _, labels, _ = vocab_parallel_linear_kl_ce(
            hidden, weight, teacher, teacher_weight, TARGET, kind=kind, **place
        )
        found[kind + "+ce"] = (
            (loss + labels).detach(),
            *torch.autograd.grad(2 * loss + labels, (hidden, weight)),
        )
    return found


def whole():
    """Returns the same, computed from the whole vocabulary."""
    hidden, weight, teacher, teacher_weight, bias = tensors()
    for t in (hidden, weight, bias):
        t.requires_grad_()
    loss, _ = linear_cross_entropy(hidden, weight, TARGET, bias=bias, label_smoothing=0.1, softcap=3.0)
    found = {"ce": (loss, *torch.autograd.grad(loss, (hidden, weight, bias)))}
    for kind in ("forward", "reverse", "js"):
        loss, _ = linear_kl(hidden, weight, teacher, teacher_weight, kind=kind, temperature=2.0)
        found[kind] = loss, *torch.autograd.grad(loss, (hidden, weight))
        loss, _, labels, _ = linear_kl_ce(hidden, weight, teacher, teacher_weight, TARGET, kind=kind)
        found[kind + "+ce"] = loss + labels, *torch.autograd.grad(2 * loss + labels, (hidden, weight))
    return found


@pytest.mark.gloo
def test_two_ranks_compute_the_losses_of_one():
    ranks, wanted = run_ranks(2, sharded), whole()
    for name, (loss, hidden, *own) in wanted.items():
        assert torch.equal(ranks[0][name][0], ranks[1][name][0]), (
            f"{name}: both ranks hold the same loss, bit for bit"
        )
        for rank in ranks:
            torch.testing.assert_close(rank[name][:2], (loss.detach(), hidden))
        for i, gradient in enumerate(own):
            torch.testing.assert_close(torch.cat([rank[name][2 + i] for rank in ranks]), gradient)


def test_combined_partials_normalise_the_whole_row():
    logits = torch.randn(3, 4, 7) * 20
    logits[1] = -torch.inf  # a shard without any logits
    maxima = logits.amax(2)
    sums = (logits - maxima.clamp(min=-1e30).unsqueeze(2)).exp().sum(2)
    norms = combine_softmax_partials(maxima, sums)
    torch.testing.assert_close(norms.sum(0), logits.transpose(0, 1).reshape(4, -1).logsumexp(1))
