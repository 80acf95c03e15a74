"""Losses under `normalize-loss`: captured from PyTorch, computed from uneven micro-batches, and held against
the eager model.

Loss and every gradient must agree; a loss that mixes samples must be refused with the op and the user's line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp

from secc import pass_pipeline
from secc.errors import UserError
from secc.frontend.capture.capture import Capture, capture_model
from secc.frontend.capture.to_ir import capture_to_ir
from secc.frontend.dataset.input_symbols import describe_inputs
from secc.frontend.dataset.sampling import survey_dataset
from secc.ir.dialect.ops import graph_of
from secc.runtime.model.meta_build import build_meta_model
from secc.runtime.model.user_file import UserModel, load_model_file
from secc.runtime.plan.batch_sizes import pad_batch, read_symbol_sizes
from tests.passes.case_interpreter import Source, distributed_loss
from tests.passes.loss_examples import GROUPS, MODEL, OF_THE_WHOLE_BATCH, REFUSED

PASSES = "canonicalize,dce,normalize-loss,dce"
SPLIT = (slice(0, 3), slice(3, 5), slice(5, 7))


def captured(tmp_path: Path, losses: list[str]) -> tuple[UserModel, Capture, ModuleOp]:
    lines = (
        ["loss = 0"]
        + [f"loss = loss + {1 + i / 2} * ({text})" for i, text in enumerate(losses)]
        + ["return loss"]
    )
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("{body}", "\n".join("        " + line for line in lines)))
    user = load_model_file(path)
    drawn = survey_dataset(user, 24)
    found = capture_model(user, build_meta_model(user), drawn, describe_inputs(user, drawn))
    return user, found, capture_to_ir(found)


@pytest.mark.parametrize("name", GROUPS)
def test_micro_batches_give_the_loss_and_gradients_of_the_whole_batch(name: str, tmp_path: Path) -> None:
    user, found, module = captured(tmp_path, GROUPS[name])
    pass_pipeline.run_passes(module, pass_pipeline.parse_pipeline(PASSES))
    (case,) = graph_of(module).cases
    torch.manual_seed(0)
    model, dataset = user.build_model(), user.dataset()
    samples = [dataset[i] for i in range(7)]
    inputs = found.inputs
    whole = read_symbol_sizes(user.collate(samples), inputs.symbols, len(samples))

    def source(part: list[Any], padded: bool) -> Source:
        batch = user.collate(part)
        batch = pad_batch(batch, inputs.inputs, {"S": whole["S"]}) if padded else batch
        return Source(batch, model, found.constants, read_symbol_sizes(batch, inputs.symbols, len(part)))

    micro_batches = [source(samples[s], padded=True) for s in SPLIT]
    loss = distributed_loss(case, micro_batches, [source([s], padded=False) for s in samples], whole)
    same(loss, model(**user.collate(samples)), list(model.parameters()))


def same(loss: torch.Tensor, wanted: torch.Tensor, parameters: list[torch.nn.Parameter]) -> None:
    """Assert that loss and gradients agree in float32."""
    trained = [p for p in parameters if p.requires_grad]
    torch.testing.assert_close(loss.float(), wanted, rtol=1e-6, atol=1e-6)
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    for gradient, reference in zip(
        found, torch.autograd.grad(wanted, trained, allow_unused=True), strict=True
    ):
        assert (gradient is None) == (reference is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", OF_THE_WHOLE_BATCH)
def test_a_loss_that_reads_a_number_of_the_batch_takes_all_samples(loss: str, tmp_path: Path) -> None:
    _, found, module = captured(tmp_path, [loss])
    pass_pipeline.run_passes(module, pass_pipeline.parse_pipeline(PASSES))
    (block,) = (path for path in found.blocks if path.startswith("line"))
    (note,) = (note for note in found.notes if note.path == block)
    assert note.where.startswith("model.py:21") and note.remedy


def test_a_softmax_of_inputs_over_samples_is_answered_with_shares_of_a_sum(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="works along a dim that carries samples") as refused:
        _, _, module = captured(tmp_path, ["(share.softmax(0) * y.mean((1, 2))).sum()"])
        pass_pipeline.run_passes(module, pass_pipeline.parse_pipeline(PASSES))
    assert "e / e.sum(0)" in refused.value.remedy
    _, _, module = captured(tmp_path, ["(share.exp() / share.exp().sum(0) * y.mean((1, 2))).sum()"])
    pass_pipeline.run_passes(module, pass_pipeline.parse_pipeline(PASSES))


@pytest.mark.parametrize("loss", REFUSED)
def test_a_loss_that_mixes_samples_is_refused_with_op_and_line(loss: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        _, _, module = captured(tmp_path, [loss])
        pass_pipeline.run_passes(module, pass_pipeline.parse_pipeline(PASSES))
    assert REFUSED[loss] in refused.value.message
    assert refused.value.where.startswith("model.py:21")
    assert refused.value.remedy
