"""docs/concepts.md shows a real step: the example compiles to the sections, programs and code on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.report.html_page import report_page
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.schedule.scheduler import schedule_batch
from secc.simulate.global_batches import load_global_batches
from tools.print_step import micro_batch_lines, program_lines, sample_lines


@pytest.fixture(scope="module")
def plan_directory(examples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan that the page makes, with the options of its command."""
    directory = tmp_path_factory.mktemp("captions") / "plan"
    options = CompileOptions(
        cluster="local:3", global_batch=4, strategy="apart", set=("encoder.micro_batch=1",)
    )
    compile_model(examples / "captions.py", options).write_plan(directory, report_page)
    return directory


def test_the_step_is_the_one_on_the_page(root: Path, plan_directory: Path):
    page = (root / "docs/concepts.md").read_text()
    plan = load_plan(plan_directory)
    samples = next(load_global_batches(plan_directory, plan))
    schedule = schedule_batch(plan, samples)
    step = "\n".join([*micro_batch_lines(plan, schedule), *program_lines(schedule)])
    assert step in page, step
    lengths = [int(re.search(r"S=(\d+)", line)[1]) for line in sample_lines(samples)]  # pyright: ignore[reportOptionalSubscript]
    assert [int(n) for n in re.findall(r"^\| \d \| .* \| (\d+) \| \d \| [\d.]+ \|$", page, re.M)] == lengths


def test_the_code_on_the_page_is_generated(root: Path, plan_directory: Path):
    """The body of the section's method, its signature shortened on the page; the model's forward; the IR."""
    page = (root / "docs/concepts.md").read_text()
    module = (plan_directory / "sections/encoder.py").read_text()
    body = re.search(r"def always\(self, batch, edges\):\n(.*?)```", page, re.S)
    assert body is not None
    assert [line.strip() for line in body[1].splitlines()] == [
        line.strip() for line in module[module.index("def always") :].splitlines()[1:]
    ]
    example = (root / "examples/captions.py").read_text()
    forward = re.search(r"```python\n(def forward.*?)```", page, re.S)
    assert forward is not None
    assert all(line.strip() in example for line in forward[1].splitlines())


def test_the_ir_on_the_page_is_captured(root: Path, plan_directory: Path):
    page = (root / "docs/concepts.md").read_text()
    captured = (plan_directory / "ir/00-capture.mlir").read_text()
    quoted = re.search(r"```mlir\n(.*?)```", page, re.S)
    assert quoted is not None
    for line in quoted[1].splitlines():
        assert all(part.strip() in captured for part in line.split("...")), line
