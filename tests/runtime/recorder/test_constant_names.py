"""Names of constants: equal tensors have one, and large tensors take no memory for it."""

from __future__ import annotations

import tracemalloc

import torch

from secc.runtime.recorder.match_outline import constant_digest


def test_equal_constants_have_one_name() -> None:
    table = torch.arange(12.0).reshape(3, 4)
    assert constant_digest(table) == constant_digest(table.t().contiguous().t())
    others = [table + 1, table.reshape(4, 3), table.double(), table.to(torch.bfloat16), table > 3]
    assert len({constant_digest(t) for t in (table, *others)}) == 1 + len(others)


def test_a_large_constant_does_not_become_python_numbers() -> None:
    table = torch.zeros(1 << 20)
    tracemalloc.start()
    try:
        constant_digest(table)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
