"""These tests run twice: here, where CPU tensors use the PyTorch references, and with TRITON_INTERPRET=1 in a
separate process (`test_interpreter.py`), where they use the Triton kernels. Triton decides at import, so one
process cannot do both."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore = [
        "test_bench_kernels.py",
        "test_compile.py",
        "test_gpu_day.py",
        "test_interpreter.py",
        "test_memory.py",
        "test_launch_tuning.py",
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignores NumPy's warnings about infinities, which the kernels guard against."""
    for item in (i for i in items if Path(__file__).parent in i.path.parents):
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
