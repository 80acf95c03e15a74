from __future__ import annotations

import pytest
import torch

from tools.bench_kernels import ERROR_SLACK, KernelResult, draw_results, measure_precision, results_table
from tools.kernel_cases import TINY_SIZES, loss_cases, memory_bound_cases


@pytest.mark.parametrize("case", loss_cases() + memory_bound_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_are_as_precise_as_unfused_pytorch(case, dtype):
    found = measure_precision(case, TINY_SIZES, dtype, torch.device("cpu"))
    for ours, theirs in zip(found["secc"], found["eager"], strict=True):
        assert ours <= ERROR_SLACK * theirs + 2e-5


def test_results_print_as_a_table_and_a_plot():
    results = [
        KernelResult("rms_norm", "tiny", 48, "secc", 1.0, 0.5, 2.0, 0.8),
        KernelResult("rms_norm", "tiny", 48, "eager", failure="out of memory"),
    ]
    assert "| rms_norm | tiny | 48 | secc | 1.000 | 0.500 | 2 | 80 % |  |" in results_table(results)
    assert "out of memory" in results_table(results)
    assert "secc 1 ms" in draw_results(results)
