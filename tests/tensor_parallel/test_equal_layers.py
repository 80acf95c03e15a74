"""Equal layers of two sections are split by each section's own tp, though only one of them is observed."""

from __future__ import annotations

from pathlib import Path

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.report.html_page import report_page
from secc.runtime.plan.plan_file import load_plan

NANO_PAIR = Path(__file__).parent.parent / "models/nano_pair.py"


def test_equal_layers_under_two_tp(tmp_path: Path) -> None:
    options = CompileOptions(cluster="local:6", global_batch=6, set=("encoder.tp=2", "decoder.tp=4"))
    compile_model(NANO_PAIR, options).write_plan(tmp_path / "plan", report_page)
    plan = load_plan(tmp_path / "plan")
    split = {
        tower: {s.name.removeprefix(f"{tower}.") for s in plan.find_section(tower).shards if ".h." in s.name}
        for tower in ("encoder", "decoder")
    }
    assert split["encoder"] == split["decoder"] and len(split["encoder"]) > 8
