"""`--set NAME.ep`: what a plan says of it, and what is said where it is impossible."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from secc.report.html_page import report_page
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import Shard

MODELS = Path(__file__).parent.parent / "models"


def _options(*pins: str, ranks: int = 4) -> CompileOptions:
    return CompileOptions(
        cluster=f"local:{ranks}", global_batch=ranks, set=tuple(f"model.{pin}" for pin in pins)
    )


@pytest.mark.parametrize(
    ("model", "pins", "message", "remedy"),
    [
        ("glm4_moe", ("tp=2", "ep=3"), "model.ep=3 is impossible: it does not divide 4 experts", "ep to 2"),
        ("glm4_moe", ("dp=3", "ep=2"), "2 replicas would share experts, and dp=3 is no multiple", "dp to a"),
        ("glm4_moe", ("tp=8", "ep=4"), "model.tp=8 is impossible", "tp to 2 or 4"),
        (
            "glm4_moe",
            ("dp=4", "ep=8"),
            "model.ep=8 is impossible: it does not divide 4 experts",
            "ep to 2 or 4",
        ),
        ("dropped_tokens", ("dp=2", "ep=2"), "at dropped_tokens.py:17 a token's result", "each sample, or"),
        ("dropped_tokens", ("dp=2",), "experts of layers.0.experts give a token another", "each sample, or"),
        ("nano", ("tp=2", "ep=2"), "model.ep=2 is impossible: the section has no experts", "model.ep out"),
    ],
)
def test_an_impossible_ep_is_refused_with_a_remedy(
    model: str, pins: tuple[str, ...], message: str, remedy: str
) -> None:
    with pytest.raises(UserError) as refused:
        check_exactness(compile_model(MODELS / f"{model}.py", _options(*pins, ranks=8)))
    assert message in refused.value.message and remedy in refused.value.remedy


def test_a_plan_says_what_each_rank_holds(tmp_path: Path) -> None:
    made = compile_model(MODELS / "glm4_moe.py", _options("tp=2", "ep=2", "dp=2"))
    made.write_plan(tmp_path / "plan", report_page)
    plan = load_plan(tmp_path / "plan")
    mesh = json.loads((tmp_path / "plan/plan.json").read_text())["sections"]["model"]["mesh"]
    assert (mesh["dp"], mesh["tp"], mesh["ep"], len(mesh["ranks"])) == (2, 2, 2, 4)
    shards = {s.name: s for s in plan.find_section("model").shards}
    experts = next(n for n in shards if n.endswith("experts.down_proj")).removesuffix(".down_proj")
    assert shards[f"{experts}.gate_up_proj"] == Shard(f"{experts}.gate_up_proj", 0, (4,))
    report = (tmp_path / "plan/report.html").read_text()
    assert "each rank has some of the experts" in report
    assert "counted by running the model on up to 16 drawn samples" in report
    assert re.search(r"the busiest of 2 parts takes 1\.\d\d times its share", report)
