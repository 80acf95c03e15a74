"""Reasons in reports: alternatives are priced as plans are; parts of time and memory add up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from xdsl.dialects.builtin import ModuleOp

from secc import pass_pipeline
from secc.codegen import plan_builder as plan_codegen
from secc.codegen.plan_builder import attribute_value
from secc.driver.compile_options import CompileOptions
from secc.driver.default_pipeline import build_pipeline
from secc.driver.section_variants import run_to_lowered
from secc.ir.dialect.ops import graph_of
from secc.ir.text_io import module_text
from secc.passes.allocate import Allocate
from secc.report.html_page import report_page
from secc.report.plan_tables import plan_summary, plan_tables
from secc.report.text_table import bytes_text
from secc.runtime.plan.schema import ModelRef, Plan

TESTS = Path(__file__).parents[1]
GIB = 1 << 30
KEYS = ("dp", "tp", "pp", "micro_batch", "sharding", "recompute")
VLM = (TESTS / "passes" / "allocate_vlm.mlir").read_text()
LAYERS = (
    'flops = "2400000*B*S", ops = 20, units = 12, kept = "1000*B*S", working = '
    '"20000*B*S", again = "2400000*B*S"'
)


def allocate_module(source: str = VLM, **options: Any) -> ModuleOp:
    module = module_text.parse_module(source)
    pass_pipeline.run_passes(module, (Allocate(**({"cluster": "1x3xcpu", "global_batch": 16} | options)),))
    return module


def reasons_of(module: ModuleOp) -> dict[str, Any]:
    return json.loads(attribute_value(graph_of(module), "reasons", "{}"))


def step_time(module: ModuleOp) -> float:
    return json.loads(attribute_value(graph_of(module), "prediction", "{}"))["step_time_s"]


def layouts(module: ModuleOp) -> dict[str, dict[str, Any]]:
    return {
        s.sym.data: {key: attribute_value(s, key, None) for key in KEYS} for s in graph_of(module).sections
    }


FROZEN = VLM.replace("trainable 600000", "trainable 0").replace(
    '"vision" mode "train"', '"vision" mode "forward"'
)
for _before, _after in (
    ('[] share "0.5"', '[] share "0.0"'),
    ('["pixel_values"] share "0.5"', '["pixel_values"] share "1.0"'),
):
    FROZEN = FROZEN.replace(f"pattern when {_before}", f"pattern when {_after}")


@pytest.mark.parametrize("section", ["vision", "lm"])
@pytest.mark.parametrize(("source", "strategy"), [(VLM, "colocate"), (FROZEN, "apart")])
def test_alternatives_match_plans_with_that_choice(source: str, strategy: str, section: str) -> None:
    """Each alternative, pinned with all other choices, gives the predicted step time; also with prefetch
    of a frozen section."""
    module = allocate_module(source, strategy=strategy)
    found = [a for a in reasons_of(module)[section]["alternatives"] if a["fits"]]
    assert {a["choice"].partition("=")[0] for a in found} >= (
        {"micro_batch", "sharding", "recompute"} if source == VLM else {"micro_batch"}
    )
    assert bool(attribute_value(graph_of(module), "run_ahead_gib", 0.0)) == (source == FROZEN)
    for alternative in found:
        taken = layouts(module) | {section: alternative["layout"]}
        pins = tuple(f"{s}.{key}={value}" for s, layout in taken.items() for key, value in layout.items())
        assert (
            step_time(allocate_module(source, set=pins, strategy=strategy)) == alternative["step_time_s"]
        ), alternative["choice"]
        assert (
            alternative["step_time_s"] >= step_time(module) or source == FROZEN
        )  # chosen by simulated time, not by the closed form


def test_parts_add_up() -> None:
    module = allocate_module(
        VLM.replace('outs [""] in @lm', f'outs [""] in @lm {{{LAYERS}, saved = "5000*B*S"}}'),
        set=("lm.recompute=full",),
    )
    whole = sum(sum(found["time_s"].values()) for found in reasons_of(module).values())
    assert whole == pytest.approx(step_time(module), rel=0.01)  # both sections share all ranks
    for name, found in reasons_of(module).items():
        section = next(s for s in graph_of(module).sections if s.sym.data == name)
        assert sum(found["memory"]["parts"].values()) == found["memory"]["used"]
        assert found["memory"]["used"] / GIB == pytest.approx(
            attribute_value(section, "memory_gib", 0.0), abs=1e-3
        )
    assert reasons_of(module)["lm"]["memory"]["largest_tensor"]["tensor"] == "f32[B, S, 64] of lm"


def test_stages_that_run_ahead_do_not_fill_in_a_step() -> None:
    """A frozen pipeline on ranks of its own bounds the step; the parts of its time add up to it."""
    layers = LAYERS.replace("2400000*B*S", "480000000*B*S")
    source = FROZEN.replace('outs [""] in @vision', f'outs [""] in @vision {{{layers}}}')
    pins = ("vision.pp=2", "lm.dp=1")
    ahead, waiting = (
        allocate_module(source, strategy="apart", set=pins, run_ahead=text) for text in ("auto", "0")
    )
    parts, with_filling = (reasons_of(module)["vision"]["time_s"] for module in (ahead, waiting))
    assert sum(parts.values()) == pytest.approx(step_time(ahead), rel=0.01)
    assert sum(with_filling.values()) == pytest.approx(step_time(waiting), rel=0.01)
    assert with_filling.pop("filling and draining stages") > 0
    assert parts == with_filling


def test_alternatives_that_do_not_fit_show_their_memory() -> None:
    """Without recomputation the step would be faster, but needs 12 GiB on a rank that has 7.6."""
    module = allocate_module(
        VLM.replace('outs [""] in @lm', f'outs [""] in @lm {{{LAYERS}, saved = "{150 << 20}*B*S"}}'),
        set=("lm.micro_batch=1",),
    )
    kept = next(a for a in reasons_of(module)["lm"]["alternatives"] if a["choice"] == "recompute=none")
    assert not kept["fits"] and kept["memory"] > 11 * GIB and kept["step_time_s"] < step_time(module)


@pytest.fixture(scope="module")
def plan() -> Plan:
    module = module_text.parse_module((TESTS / "codegen" / "llava.mlir").read_text())
    options = CompileOptions(cluster="1x3xH100", global_batch=12, strategy="apart")
    run_to_lowered(module, build_pipeline(options))
    parameters = {
        f"{path}.weight": "float32[4, 4] train"
        for path in ("model.vision_tower", "model.language_model", "lm_head")
    }
    return plan_codegen.build_plan(module, ModelRef("model.py", "0" * 64, parameters), {})


def test_larger_micro_batches_are_named_with_their_steps(plan: Plan) -> None:
    solver = {**plan.solver, "micro_batches": {"language_model": {"1": 0.5, "4": 0.25}}}
    name = "larger micro-batches"
    text = dict(plan_summary(replace(plan, solver=solver)))[name]
    steps = "0.5 s with up to 1 sample, 0.25 s with up to 4 samples"
    assert text == f"language_model (its replicas wait for each other): {steps}"
    assert name not in dict(plan_summary(plan))


def test_sections_with_more_short_samples_are_named_with_their_steps(plan: Plan) -> None:
    solver = {**plan.solver, "sample_limits": {"language_model": {"1": 0.5, "4": 0.25}}}
    name = "more short samples in a micro-batch"
    text = dict(plan_summary(replace(plan, solver=solver)))[name]
    assert text == "language_model: 0.5 s with up to 1 sample, 0.25 s with up to 4 samples"
    assert name not in dict(plan_summary(plan))


def test_report_lists_reasons(plan: Plan) -> None:
    found = {t.title: t for t in plan_tables(plan)}
    choices = found["Alternatives"].rows
    assert [r[0] for r in choices].count("language_model") >= 3 and any(
        r[1].startswith("sharding=") and r[3] for r in choices
    )
    assert ("vision_tower", "2 blocks", "counted: FLOPs and bytes of each operation") in found[
        "Cost origins"
    ].rows
    assert any(r[0] == "H100" and "datasheet" in r[2] for r in found["Cost origins"].rows)
    parts = {r[1]: r[2] for r in found["Memory"].rows if r[0] == "language_model"}
    assert {
        "weights",
        "optimizer states",
        "total",
        "free",
        "reserved for driver and fragmentation",
    } <= parts.keys()
    rooms = {
        (r[0], r[2])
        for r in found["Memory"].rows
        if r[1] == "in-flight budget: activations kept from forward to backward"
    }
    assert rooms == {(s.name, bytes_text(s.room_bytes)) for s in plan.sections if s.room_bytes} != set()
    assert any(part.startswith("largest tensor between blocks: ") for part in parts)
    assert {r[0] for r in found["Bottlenecks"].rows} == {"vision_tower", "language_model"}
    for title in ("Alternatives", "Bottlenecks", "Memory", "Cost origins"):
        assert f"<summary>{title} <span" in report_page(plan)
