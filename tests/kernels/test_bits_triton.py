from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secc.runtime.randomness import bits_triton
from secc.runtime.randomness.bits import mix_counters
from tests.kernels.float64_comparison import example_count, tensor_seeds


@pytest.mark.skipif(not bits_triton.has_bits_kernel(torch.zeros(1)), reason="runs under Triton's interpreter")
@settings(max_examples=example_count(30), deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 70), seed=tensor_seeds())
def test_agrees_with_plain_pytorch(rows, width, seed):
    generator = torch.Generator().manual_seed(seed)
    counters = [torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator) for n in (rows, width)]
    assert torch.equal(bits_triton.random_bits(*counters), mix_counters(*counters))


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes the place of the compiler"
)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_compiles_for_a_gpu():
    from tools.compile_kernels import compile_only

    counters = torch.zeros(2, dtype=torch.int64)
    with compile_only(90) as compiled:
        bits_triton.random_bits(counters, counters)
    (kernel,) = compiled
    assert ".target sm_90" in kernel.asm["ptx"] and len(kernel.asm["cubin"]) > 0
