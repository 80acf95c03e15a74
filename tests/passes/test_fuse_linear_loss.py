"""Losses on linear heads under `fuse-linear-loss`: each spelling comes to the operator it should, with the
same loss and gradients.

The fused case is computed from uneven micro-batches and held against the eager model, as for
`normalize-loss`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp

from secc import pass_pipeline
from secc.frontend.capture.capture import Capture, capture_model
from secc.frontend.capture.linear_blocks import annotate_linear_blocks
from secc.frontend.capture.to_ir import capture_to_ir
from secc.frontend.dataset.input_symbols import describe_inputs
from secc.frontend.dataset.sampling import survey_dataset
from secc.ir.analysis.fusion_report import read_fusions
from secc.ir.dialect.ops import GlueOp, graph_of
from secc.runtime.model.meta_build import build_meta_model
from secc.runtime.model.user_file import UserModel, load_model_file
from secc.runtime.plan.batch_sizes import pad_batch, read_symbol_sizes
from tests.passes.case_interpreter import Source, distributed_loss
from tests.passes.fused_loss_examples import FUSED, MODEL, REFUSED
from tests.passes.test_normalize_loss import same

PASSES = "canonicalize,dce,normalize-loss,dce,fuse-linear-loss"
SPLIT = (slice(0, 3), slice(3, 5), slice(5, 7))


def fused(
    tmp_path: Path, before: str, loss: str, passes: str = PASSES
) -> tuple[UserModel, Capture, ModuleOp]:
    path = tmp_path / "model.py"
    lines = [*before.split("; "), f"return {loss}"]
    path.write_text(MODEL.replace("{body}", "\n".join("        " + line for line in lines)))
    user = load_model_file(path)
    drawn, meta = survey_dataset(user, 24), build_meta_model(user)
    found = capture_model(user, meta, drawn, describe_inputs(user, drawn))
    module = capture_to_ir(found)
    annotate_linear_blocks(module, meta)
    pass_pipeline.run_passes(module, pass_pipeline.parse_pipeline(passes))
    return user, found, module


def compare(user: UserModel, found: Capture, module: ModuleOp) -> None:
    """Assert that loss and gradients are the eager model's."""
    (case,) = graph_of(module).cases
    torch.manual_seed(0)
    model, dataset = user.build_model(), user.dataset()
    samples = [dataset[i] for i in range(7)]
    whole = read_symbol_sizes(user.collate(samples), found.inputs.symbols, len(samples))

    def source(part: list[Any], padded: bool) -> Source:
        batch = user.collate(part)
        batch = pad_batch(batch, found.inputs.inputs, {"S": whole["S"]}) if padded else batch
        return Source(
            batch, model, found.constants, read_symbol_sizes(batch, found.inputs.symbols, len(part))
        )

    micro_batches = [source(samples[s], padded=True) for s in SPLIT]
    loss = distributed_loss(case, micro_batches, [source([s], padded=False) for s in samples], whole)
    same(loss, model(**user.collate(samples)), list(model.parameters()))


@pytest.mark.parametrize(
    ("before", "loss", "rules"), FUSED, ids=[f"{before}; {loss}" for before, loss, _ in FUSED]
)
def test_each_spelling_of_a_loss_is_fused_exactly(
    before: str, loss: str, rules: list[str], tmp_path: Path
) -> None:
    user, found, module = fused(tmp_path, before, loss)
    noted = read_fusions(graph_of(module))
    assert [f.rule for f in noted] == rules, noted
    assert not any(f.why for f in noted)
    assert all(f.where.startswith(("model.py:", "loss_utils.py:")) for f in noted)
    (case,) = graph_of(module).cases
    assert not any(isinstance(op, GlueOp) and "softmax" in op.base_name for op in case.ops)
    compare(user, found, module)


@pytest.mark.parametrize(
    ("before", "loss", "why"), REFUSED, ids=[f"{before}; {loss}" for before, loss, _ in REFUSED]
)
def test_a_loss_that_is_not_fused_has_a_reason(before: str, loss: str, why: str, tmp_path: Path) -> None:
    _, _, module = fused(tmp_path, before, loss)
    noted = read_fusions(graph_of(module))
    assert noted and all(why in f.why and f.where.startswith("model.py:") for f in noted), noted
    (case,) = graph_of(module).cases
    assert not any(isinstance(op, GlueOp) and op.target.data.startswith("secc.") for op in case.ops)
