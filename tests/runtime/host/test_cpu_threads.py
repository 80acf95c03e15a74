"""Operators of a small model use one thread while it is compared with its plan, and as many as before
afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from secc.runtime.host.cpu_threads import MOST_BYTES_OF_ONE_THREAD, limit_threads, restore_threads


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_small_model_has_one_thread_inside_the_block() -> None:
    with pytest.raises(KeyError), restore_threads():
        limit_threads(nn.Linear(4, 4))
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_larger_model_has_all_threads() -> None:
    with restore_threads():
        limit_threads(nn.Linear(MOST_BYTES_OF_ONE_THREAD // 4 + 1, 1, bias=False, device="meta"))
        assert torch.get_num_threads() == 2
