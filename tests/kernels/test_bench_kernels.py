from __future__ import annotations

import pytest
import torch

from tools.bench_kernels import SLACK, Result, plot, precision, table
from tools.kernel_cases import TINY, entries, losses


@pytest.mark.parametrize("case", losses() + entries(), ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_operator_errs_no_more_than_unfused_pytorch(case, dtype):
    found = precision(case, TINY, dtype, torch.device("cpu"))
    for ours, theirs in zip(found["secc"], found["eager"], strict=True):
        assert ours <= SLACK * theirs + 2e-5


def test_results_print_as_a_table_and_a_plot():
    results = [
        Result("rms_norm", "tiny", 48, "secc", 1.0, 2.0, 0.8),
        Result("rms_norm", "tiny", 48, "eager", failure="out of memory"),
    ]
    assert "| rms_norm | tiny | 48 | secc | 1.000 | 2 | 80 % |  |" in table(results)
    assert "out of memory" in table(results)
    assert "secc 1 ms" in plot(results)
