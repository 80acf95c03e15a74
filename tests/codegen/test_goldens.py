"""From captured IR to every file of a plan, pinned by goldens: run with --update-goldens and read the
difference."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from secc.codegen import plan_builder as plan_codegen
from secc.codegen.plan_files import PlanFiles, build_plan_files
from secc.driver.compile_options import CompileOptions
from secc.driver.default_pipeline import build_pipeline
from secc.driver.section_variants import run_to_lowered
from secc.ir.text_io.module_text import parse_module
from secc.runtime.plan.schema import ModelRef

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
PINNED = ("plan.json", "sections/", "ranks/", "run.py", "launch.sh", "slurm.sbatch")


def planned() -> PlanFiles:
    """The files of tests/models/llava_tiny.py on three ranks, from its captured IR."""
    module = parse_module((HERE / "llava.mlir").read_text())
    options = CompileOptions(cluster="local:3", global_batch=12, strategy="apart")
    run_to_lowered(module, build_pipeline(options))
    parameters = {
        f"{path}.weight": "float32[4, 4] train"
        for path in ("model.vision_tower", "model.language_model", "lm_head")
    }
    plan = plan_codegen.build_plan(module, ModelRef("model.py", "0" * 64, parameters), {"secc": "golden"})
    return build_plan_files(plan, module, [], {}, source="", report="")


@pytest.fixture(scope="module")
def files() -> PlanFiles:
    return planned()


def test_files_equal_goldens(files: PlanFiles, update_goldens: bool) -> None:
    pinned = {name: text for name, text in files.items() if name.startswith(PINNED) and isinstance(text, str)}
    if update_goldens:
        for name, text in pinned.items():
            path = GOLDEN / f"{name}.golden"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    found = {
        str(p.relative_to(GOLDEN)).removesuffix(".golden"): p.read_text() for p in GOLDEN.rglob("*.golden")
    }
    assert pinned == found


def test_planning_twice_gives_the_same_bytes(files: PlanFiles) -> None:
    assert planned() == files


def test_generated_python_compiles(files: PlanFiles) -> None:
    for name, text in files.items():
        if name.endswith(".py"):
            assert ast.parse(text, name).body


def test_rank_files_name_their_sections(files: PlanFiles) -> None:
    ranks = [text for name, text in files.items() if name.startswith("ranks/")]
    assert len(ranks) == 3
    assert sum("VisionTower(model)" in str(t) for t in ranks) >= 1
    assert sum("LanguageModel(model)" in str(t) for t in ranks) >= 1
