"""Layers that are called with a cache of keys are split: a second run of a layer does not read what its first
run wrote into the cache."""

from __future__ import annotations

from pathlib import Path

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.report.html_page import report_page
from secc.runtime.plan.plan_file import load_plan

MODEL = Path(__file__).parent.parent / "models/cached_layers.py"


def test_layers_with_a_cache_are_split(tmp_path: Path) -> None:
    options = CompileOptions(cluster="local:4", global_batch=4, set=("teacher.tp=2", "student.tp=2"))
    compile_model(MODEL, options).write_plan(tmp_path / "plan", report_page)
    plan = load_plan(tmp_path / "plan")
    split = {s.name for name in ("teacher", "student") for s in plan.find_section(name).shards}
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        for layer in range(4):
            assert {
                f"teacher.model.layers.{layer}.{name}.weight",
                f"student.model.layers.{layer}.{name}.weight",
            } <= split
