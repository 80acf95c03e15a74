"""cuDNN's attention is left out where samples differ in size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from secc.runtime.training.attention_kernels import KEEP_VARIABLE, choose_attention_kernels
from tests.runtime.captioner_plans import APART, make_plan


@pytest.fixture(autouse=True)
def restore_choice() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_uneven_samples_leave_cudnn_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(APART)
    monkeypatch.setenv(KEEP_VARIABLE, "1")
    choose_attention_kernels(plan)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.delenv(KEEP_VARIABLE)
    choose_attention_kernels(plan)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_samples_of_one_size_keep_it() -> None:
    plan = make_plan(APART)
    even = dataclasses.replace(plan, symbols=tuple(s for s in plan.symbols if s.name == "B"))
    choose_attention_kernels(even)
    assert torch.backends.cuda.cudnn_sdp_enabled()
