"""`--accept balance-loss` computes a mixture of experts' balance loss by micro-batches and names it in the
plan; without the flag such a loss is refused."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from secc import pass_pipeline
from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from secc.runtime.training.eager_reference import LossAndGradients, compare_results, copy_gradients
from secc.runtime.training.one_rank_plan import OneRankPlan

MODELS = Path(__file__).parent.parent / "models"
MIXTRAL = """
import torch
from transformers import MixtralConfig, MixtralForCausalLM


def model():
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, **heads)
    moe = dict(num_local_experts=4, num_experts_per_tok=2)
    moe |= dict(output_router_logits=True, router_aux_loss_coef=0.1)
    return MixtralForCausalLM(MixtralConfig(**sizes, **moe, use_cache=False, max_position_embeddings=32))


def dataset():
    ids = [torch.arange(1, n) * (i + 3) % 32 for i, n in enumerate([7, 10] * 12)]
    return [dict(input_ids=i, labels=i.clone()) for i in ids]
"""


@pytest.fixture(params=["experts", pytest.param("mixtral", marks=pytest.mark.slow)])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A mixture of experts in plain PyTorch, and one of Hugging Face, whose scores are gathered by hooks
    inside of its layers."""
    if request.param == "experts":
        return MODELS / "experts.py"
    (tmp_path / "model.py").write_text(MIXTRAL)
    return tmp_path / "model.py"


def test_a_balance_loss_by_micro_batches_needs_accept(path: Path) -> None:
    with pytest.raises(UserError, match="multiplies two sums over samples") as refused:
        compile_model(path, CompileOptions())
    assert "--accept balance-loss computes it for each micro-batch alone" in refused.value.remedy

    compiled = check_exactness(compile_model(path, CompileOptions(accept=("balance-loss",))))
    accepted = compiled.plan.checks["accepted"]
    assert accepted and all(
        "is computed for each micro-batch alone, weighted by its samples" in a and ".py:" in a
        for a in accepted
    )
    assert "balance_loss" in {t.name for t in compiled.plan.terms}


def test_micro_batches_are_weighted_by_their_share_of_the_samples() -> None:
    compiled = compile_model(MODELS / "experts.py", CompileOptions(accept=("balance-loss",), widths="own"))
    assert compiled.model is not None
    model, user = compiled.model, compiled.user
    samples = [user.dataset()[i] for i in (0, 2, 4, 6, 8)]  # of one length, so that nothing is padded
    with tempfile.TemporaryDirectory() as directory:
        compiled.write_sections(Path(directory) / "plan")
        found = OneRankPlan(compiled.plan, Path(directory) / "plan", user, model).run_step(samples, 2)
    wanted = sum(
        len(part) / 5 * model(**user.collate(part)) for part in (samples[:2], samples[2:4], samples[4:])
    )
    assert isinstance(wanted, torch.Tensor)
    wanted.backward()
    assert compare_results(found, LossAndGradients(float(wanted.detach()), copy_gradients(model))).is_exact


def test_accepting_a_balance_loss_accepts_no_other_coupling(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        (MODELS / "experts.py")
        .read_text()
        .replace("+ 0.1 * balance", "")
        .replace("labels.flatten())", "labels.flatten()).sqrt()")
    )
    with pytest.raises(UserError, match=r"aten\.sqrt\.default is applied to a sum over samples") as refused:
        compile_model(path, CompileOptions(accept=("balance-loss",)))
    assert "--accept" not in refused.value.remedy


def test_an_unknown_approximation_is_refused() -> None:
    with pytest.raises(UserError, match="unknown approximation 'batch-norm'"):
        for step in pass_pipeline.parse_pipeline('normalize-loss{accept="batch-norm"}'):
            step.apply(None, None)  # type: ignore[arg-type, attr-defined]
