"""Compares ops on vocabulary shards, on ranks that are threads, with the same ops on whole tensors: values
and gradients."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from secc.frontend.tp_search.thread_ranks import run_thread_ranks
from secc.runtime.errors import UserError
from secc.runtime.tensor_parallel.vocab_parallel_ops import VocabShards

TOKENS = 11  # which neither two nor four ranks share evenly
LABELS = torch.tensor([0, 10, 4, -100, 5])
CLASSES = torch.linspace(0.5, 2, TOKENS, dtype=torch.float64)
aten = torch.ops.aten

# name -> (on whole logits [5, 11], on parts of them)
CASES = {
    "log_softmax": (lambda x: x.log_softmax(1), lambda p, x: p.whole(p.log_softmax(x, 1), 1)),
    "softmax": (lambda x: x.t().softmax(0), lambda p, x: p.whole(p.softmax(x.t(), 0), 0)),
    "bfloat16": (
        lambda x: x.bfloat16().log_softmax(1),
        lambda p, x: p.whole(p.log_softmax(x.bfloat16(), 1), 1),
    ),
    "logsumexp": (lambda x: x.logsumexp(-1, True), lambda p, x: p.logsumexp(x, [-1], True)),
    "squares of logsumexp": (lambda x: x.logsumexp(1).square(), lambda p, x: p.logsumexp(x, 1).square()),
    "mean": (lambda x: x.square().mean(1), lambda p, x: p.mean(x.square(), [1])),
    "mean of all": (lambda x: x.square().mean(), lambda p, x: p.mean(x.square())),
    "gather": (
        lambda x: x.gather(1, LABELS.clamp(0)[:, None]),
        lambda p, x: p.gather(x, 1, LABELS.clamp(0)[:, None]),
    ),
    "topk": (lambda x: x.topk(6, 1).values, lambda p, x: p.topk(x, 6, 1)[0]),
    "nll": (
        lambda x: F.nll_loss(x.log_softmax(1), LABELS, reduction="none"),
        lambda p, x: p.nll_loss(p.log_softmax(x, 1), LABELS, None, 0, -100)[0],
    ),
    "nll, classes weighted, a token left out": (
        lambda x: F.nll_loss(x.log_softmax(1), LABELS.clamp(0), CLASSES, ignore_index=10, reduction="sum"),
        lambda p, x: p.nll_loss(p.log_softmax(x, 1), LABELS.clamp(0), p.take(CLASSES, 0), 2, 10)[0],
    ),
    "nll2d": (
        lambda x: F.nll_loss(x.log_softmax(1)[:, :, None], LABELS[:, None], reduction="none"),
        lambda p, x: p.nll_loss2d(
            p.log_softmax(x, 1)[:, :, None, None], LABELS[:, None, None], None, 0, -100
        )[0].squeeze(2),
    ),
    "whole values between parts": (
        lambda x: (x - x.logsumexp(1, True)).exp().square().sum(1),
        lambda p, x: p.leave((x - p.enter(p.logsumexp(x, 1, True))).exp().square().sum(1)),
    ),
    "argmax": (lambda x: x.argmax(1), lambda p, x: p.argmax(x, 1)),
    "amax": (lambda x: x.detach().amax(1, True), lambda p, x: p.amax(x, [1], True)),
}


def logits() -> torch.Tensor:
    x = torch.randn(5, TOKENS, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 20
    x[0, :3] = -torch.inf  # all that the first of four ranks has of the row
    x[0, 0] = 1.0
    return x


def derived(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a weighted sum of `out`."""
    if not out.requires_grad:
        return x.new_zeros(x.shape)
    return torch.autograd.grad((out * torch.arange(1, out.numel() + 1).view(out.shape)).sum(), x)[0]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_shards_give_the_results_of_the_whole(name: str, count: int) -> None:
    on_whole, on_parts = CASES[name]
    whole = logits().requires_grad_()
    wanted = on_whole(whole)

    def rank(group):
        parts = VocabShards(TOKENS, group if count > 1 else None)
        own = logits()[:, parts.start : parts.stop].clone().requires_grad_()
        out = on_parts(parts, own)
        return out.detach(), derived(out, own)

    ranks = run_thread_ranks(count, rank)
    rtol, atol = (2e-2, 1e-2) if name == "bfloat16" else (1e-7, 1e-7)
    for out, _ in ranks:
        assert torch.equal(out, ranks[0][0]), "all ranks have the same values, bit for bit"
        torch.testing.assert_close(out, wanted.detach(), rtol=rtol, atol=atol)
    torch.testing.assert_close(
        torch.cat([g for _, g in ranks], 1), derived(wanted, whole), rtol=rtol, atol=atol
    )


def test_label_outside_of_the_vocabulary_is_rejected() -> None:
    x = VocabShards(TOKENS).log_softmax(logits(), 1)
    with pytest.raises(UserError, match="target 11 is not in a vocabulary of 11"):
        VocabShards(TOKENS).nll_loss(x, torch.full((5,), 11), None, 2, -100)


class LargeTensors(TorchDispatchMode):
    """Counts the tensors of at least `size` entries that are alive at once, of those made in its context."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.alive, self.most = size, set[int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            key = t.untyped_storage()._cdata if isinstance(t, torch.Tensor) else None
            if key is not None and t.numel() >= self.size and key not in known:
                self.alive.add(key)
                weakref.finalize(t.untyped_storage(), self.alive.discard, key)
        self.most = max(self.most, len(self.alive))
        return out


@pytest.mark.parametrize("name", ["log_softmax", "softmax", "logsumexp"])
def test_a_backward_makes_no_more_tensors_of_the_size_of_logits_than_it_returns(name: str) -> None:
    x = torch.randn(64, 512, requires_grad=True)
    out: torch.Tensor = getattr(VocabShards(512), name)(x, 1)
    gradient = torch.randn(out.shape)
    with LargeTensors(x.numel()) as made:
        (found,) = torch.autograd.grad(out, x, gradient)
    assert made.most == 1
    expected = torch.autograd.grad(getattr(x, name)(1), x, gradient)[0]
    torch.testing.assert_close(found, expected)
