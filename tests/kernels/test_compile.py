"""Compiles every launch for GPUs that need not be present: each kernel fits into registers and loads wide."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from tools.compile_kernels import (
    OperatorLaunches,
    all_launches,
    compile_launches,
    compile_only,
    measure_resources,
)

LAUNCHES = all_launches()
# What a step of an 8B model launches; the other sizes, dtypes and architectures are slow.
MAIN = (
    "linear_cross_entropy",
    "linear_kl forward",
    "norms 128",
    "norms 4096",
    "gates 12288",
    "rope 128",
    "rows 8192",
)
WITHOUT_ROWS = (
    "_row_losses_kernel",
    "_mix_kernel",
    "_note_entries_kernel",
)  # they read a few numbers a row, or compute them


@pytest.mark.parametrize(
    "launches", [launch for launch in LAUNCHES if launch.name in MAIN], ids=lambda x: x.name
)
def test_launches_for_hopper_load_wide_and_do_not_spill(launches: OperatorLaunches) -> None:
    with compile_only(90) as compiled:
        launches.run(torch.bfloat16)
    assert compiled
    for kernel in compiled:
        assert measure_resources(kernel).stack_bytes == 0, f"{kernel.name} spills"
        if kernel.name not in WITHOUT_ROWS:
            wide = re.search(r"ld\.global\S*\.v[48]", kernel.asm["ptx"])
            assert wide, f"{kernel.name} does not load 16 bytes at a time"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_kernel_spills(architecture: int, dtype: torch.dtype) -> None:
    found = compile_launches(LAUNCHES, architecture, dtype)
    assert len(found) > 40
    assert [(operator, r) for operator, r in found if r.stack_bytes] == []
