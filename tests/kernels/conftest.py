"""These tests run twice: here, where CPU tensors take the PyTorch references, and with TRITON_INTERPRET=1 in
a process of its own (`test_interpreter.py`), where the same tests drive the Triton kernels. Triton decides
when it is imported, so one process cannot do both.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore = [
        "test_bench.py",
        "test_compile.py",
        "test_interpreter.py",
        "test_memory.py",
        "test_tuning.py",
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """NumPy warns of the infinities that the kernels guard against."""
    for item in (i for i in items if Path(__file__).parent in i.path.parents):
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
