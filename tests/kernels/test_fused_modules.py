"""Modules rewritten by `fuse-blocks` compute what they computed before: here with the PyTorch references, in
the interpreter's process (`test_interpreter.py`) with the Triton kernels."""

from __future__ import annotations

import pytest
import torch

from secc.runtime.training.eager_reference import compare_results
from tests.fusion import test_fusion_rules
from tests.fusion.fuse_model import describe_misses, fuse_model, rules_by_class

QUICK = [test_fusion_rules.OnePlus, test_fusion_rules.Block]
SLOW = [test_fusion_rules.Inline, test_fusion_rules.ExactGelu, test_fusion_rules.Attention]


@pytest.mark.parametrize("cls", [*QUICK, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)])
def test_rewritten_modules_run_the_kernels(cls: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(cls()), torch.randn(2, 5, test_fusion_rules.WIDTH)
    own = test_fusion_rules.step(model, x)
    with fuse_model(model) as found:
        assert rules_by_class(found), describe_misses(found)
        difference = compare_results(test_fusion_rules.step(model, x), own)
    assert difference.is_exact, difference
