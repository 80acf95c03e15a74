"""The IR of a capture verifies, prints and parses back, and holds what the capture found."""

from __future__ import annotations

from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import Options
from filecheck.parser import Parser, pattern_for_opts
from xdsl.dialects.builtin import ModuleOp

from secc.frontend.capture.to_ir import capture_to_ir
from secc.ir.dialect.ops import GlueOp, GuardOp, graph_of
from secc.ir.text_io.module_text import parse_module, print_module, verify_module
from secc.runtime.model.user_file import load_model_file
from tests.frontend.generic_replay import capture_user_model

LLAVA = """
// CHECK: sec.graph "model" optional ["pixel_values"] labels "labels"
// CHECK: sec.symbol "B" kind "rows" key "input_ids" dim 0
// CHECK: sec.symbol "S" kind "width" key "input_ids" dim 1
// CHECK: sec.key "pixel_values" optional : !sec.tensor<[n_pixel_values, 3, 32, 32], f32>
// CHECK: sec.pattern when [] share
// CHECK: sec.pattern when ["pixel_values"] share
// CHECK: sec.block "model.vision_tower" class "CLIPVisionModel"
// CHECK-SAME: component "model.vision_tower" layers 2 at "modeling_clip.py
// CHECK: sec.case "c1" when ["pixel_values"] {
// CHECK: [[IDS:%[0-9]+]] = sec.input "input_ids"
// CHECK: [[PX:%[0-9]+]] = sec.input "pixel_values"
// CHECK: [[TEXT:%[0-9]+]] = sec.call "model.language_model.embed_tokens" ([[IDS]])
// CHECK-SAME: args "$0" outs [""] at "modeling_llava.py
// CHECK: sec.call "model.vision_tower" ([[PX]])
// CHECK-SAME: outs [".last_hidden_state"]
// CHECK-SAME: !sec.tensor<[n_pixel_values, 17, 32], f32, grad>
// CHECK: [[IMAGE:%[0-9]+]] = sec.glue "aten.reshape.default"
// CHECK-SAME: args "$0, [16*n_pixel_values, 48]"
// CHECK: sec.guard
// CHECK-SAME: equals "True"
// CHECK: sec.glue "aten.masked_scatter.default" ([[TEXT]], {{%[0-9]+}}, [[IMAGE]]) args "$0, $1, $2"
// CHECK: sec.call "model.language_model"
// CHECK: sec.call "lm_head"
// CHECK: [[LOSS:%[0-9]+]], {{%[0-9]+}} = sec.glue "aten.nll_loss_forward.default"
// CHECK: sec.return ([[LOSS]])
"""

DISTILLATION = """
// CHECK: sec.block "teacher.model" class "Qwen3Model"
// CHECK-SAME: trainable 0 component "teacher" layers 3
// CHECK: sec.call "teacher.model"
// CHECK-SAME: no_grad
// CHECK-SAME: f32>
// CHECK: sec.call "teacher.lm_head"
// CHECK-SAME: no_grad
// CHECK: sec.call "student.model"
// CHECK-SAME: f32, grad>
"""


@cache
def _module(models: Path, name: str) -> ModuleOp:
    return capture_to_ir(capture_user_model(load_model_file(models / f"{name}.py")))


@pytest.mark.parametrize(("name", "checks"), [("llava_tiny", LLAVA), ("qwen_distil", DISTILLATION)])
def test_the_ir_says_what_was_captured(models: Path, name: str, checks: str) -> None:
    printed = print_module(_module(models, name))
    options = Options(match_filename=name)
    matcher = Matcher(
        options, FInput(name, printed), Parser(options, StringIO(checks), *pattern_for_opts(options))
    )
    assert matcher.run() == 0, printed


@pytest.mark.parametrize("name", ["llava_tiny", "qwen_distil", "two_modalities", "batchnorm"])
def test_the_ir_verifies_and_reads_back(models: Path, name: str) -> None:
    module = _module(models, name)
    verify_module(module)
    text = print_module(module)
    assert print_module(parse_module(text)) == text


def test_ties_and_couplings_are_declared(models: Path) -> None:
    assert 'sec.tie names ["embed.weight", "head.weight"]' in print_module(_module(models, "two_modalities"))
    assert 'couples #sec.coupling<"batch_norm", ' in print_module(_module(models, "batchnorm"))


def test_glue_is_functional_and_guards_read_inputs(models: Path) -> None:
    for case in graph_of(_module(models, "llava_tiny")).cases:
        for op in case.walk():
            if isinstance(op, GlueOp):
                assert not op.target.data.split(".")[1].endswith("_")
            if isinstance(op, GuardOp):
                assert op.equals.data == "True" and op.where is not None
