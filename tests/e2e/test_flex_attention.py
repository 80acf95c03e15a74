"""Models with flex attention train as plain PyTorch does: a decoder with documents side by side under a
window and ALiBi, and transformers' own use of it, with pipelines, sharded parameters, and tensor and context
parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from secc.driver.compile_options import CompileOptions
from tests.e2e.reference_runs import ReferencedModel

ROWS = [
    ("flex_documents", 2, "sharding=zero3 micro_batch=1"),
    ("flex_documents", 2, "pp=2 micro_batch=2"),
    ("flex_documents", 2, "tp=2"),
    ("flex_documents", 2, "cp=2 bf16"),
    ("flex_documents", 4, "cp=4 micro_batch=2"),
    ("flex_documents", 4, "cp=2 tp=2 recompute=full"),
    ("flex_qwen3", 2, "pp=2"),
    ("flex_qwen3", 2, "cp=2 micro_batch=1"),
    ("flex_qwen3", 4, "cp=2 tp=2 recompute=full"),
]


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ReferencedModel]:
    return cache(lambda name: ReferencedModel(name, tmp_path_factory.mktemp(name), 2))


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "pins"), ROWS)
def test_a_model_with_flex_attention_trains_as_plain_pytorch(
    captured: Callable[[str], ReferencedModel], name: str, ranks: int, pins: str, tmp_path: Path
) -> None:
    wanted = tuple(f"model.{pin}" for pin in pins.split() if "=" in pin)
    dtype = "bf16" if "bf16" in pins else ""
    made = captured(name).plan_with(
        CompileOptions(cluster=f"local:{ranks}", global_batch=6, set=wanted, dtype=dtype)
    )
    (section,) = made.plan.user_sections
    assert all(len(s.row_layers) == 4 for s in (section,) if s.mesh.cp > 1)
    assert captured(name).list_differences(made, tmp_path) == []
