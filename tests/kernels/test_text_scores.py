"""Preference losses, which sum log-probabilities by text before they compare them, from hidden states."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from secc.runtime.kernels import launch_tuning, linear_cross_entropy_rows
from tests.kernels.float64_comparison import assert_agree

ROWS, VOCABULARY, SOFTCAP = 512, 4096, 3.0


def launch(rows: int, columns: int) -> AbstractContextManager[None]:
    return launch_tuning.use_launch(
        "linear_cross_entropy", launch_tuning.LaunchParameters(columns, rows, columns=columns)
    )


def compare_texts(rows: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    """The loss of two texts by the sums of their marked log-probabilities."""
    return -F.logsigmoid((rows * marks.to(rows.dtype)).sum(-1).diff(dim=0)).mean()


class Texts:
    """Losses of texts, fused and plain, with a bias and capped logits."""

    def __init__(self, *rows: int, vocabulary: int) -> None:
        torch.manual_seed(0)
        self.target, self.marks = torch.randint(vocabulary, rows), (torch.rand(rows) < 0.7).long()

    def fused(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        rows = linear_cross_entropy_rows(hidden, weight, self.target, bias=bias, softcap=SOFTCAP)
        return compare_texts(-rows, self.marks)

    def plain(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        logits = SOFTCAP * torch.tanh((hidden @ weight.T + bias) / SOFTCAP)
        picked = logits.float().log_softmax(-1) if logits.dtype != torch.float64 else logits.log_softmax(-1)
        return compare_texts(picked.gather(-1, self.target[..., None]).squeeze(-1), self.marks)


def test_gradients_are_those_of_finite_differences() -> None:
    texts = Texts(2, 5, vocabulary=19)
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 5, 4), (19, 4), (19,))]
    with launch(3, 8):
        assert torch.autograd.gradcheck(texts.fused, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_agrees_with_float64(dtype: torch.dtype) -> None:
    texts = Texts(2, 12, vocabulary=40)
    inputs = [torch.randn(s).to(dtype) for s in ((2, 12, 16), (40, 16), (40,))]
    with launch(3, 16):
        assert_agree(
            texts.fused, texts.plain, inputs, 2e-5 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
        )


def peak_of(run: Callable[[], object]) -> int:
    """Returns the most bytes that tensors take at one time while `run` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    assert record.profiler is not None and record.profiler.kineto_results is not None
    events = record.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")  # pyright: ignore[reportAttributeAccessIssue]
    return max(itertools.accumulate(change for _, change in changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_takes_less_memory_than_logits(dtype: torch.dtype) -> None:
    texts = Texts(2, ROWS // 2, vocabulary=VOCABULARY)
    inputs = [
        torch.randn(s).to(dtype).requires_grad_()
        for s in ((2, ROWS // 2, 32), (VOCABULARY, 32), (VOCABULARY,))
    ]
    with launch(16, 1024):
        fused = peak_of(lambda: texts.fused(*inputs).backward())
    logits = 4 * ROWS * VOCABULARY
    assert fused < logits / 4 < 2 * logits < peak_of(lambda: texts.plain(*inputs).backward())
