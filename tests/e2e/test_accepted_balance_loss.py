"""The balance loss of a mixture of experts is refused without a flag. `--accept balance-loss` computes it by
micro-batches and names it in the plan; `--balance-loss global` computes that of the global batch."""

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
from secc.report.html_page import report_page
from secc.runtime.plan.schema import is_statistic
from secc.runtime.training.eager_reference import LossAndGradients, compare_results, copy_gradients
from secc.runtime.training.one_rank_plan import OneRankPlan
from tests.e2e.harness import find_differences, train_distributed, train_in_one_process, write_recording_model

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


def test_the_global_batch_s_balance_loss_is_exact_in_micro_batches(path: Path) -> None:
    compiled = check_exactness(compile_model(path, CompileOptions(balance_loss="global")))
    assert "accepted" not in compiled.plan.checks
    statistics = [t for t in compiled.plan.terms if is_statistic(t.name)]
    entries = {t.entries for t in statistics}
    assert 4 in entries and entries <= {1, 4}  # numbers for each expert, and a count of tokens


@pytest.mark.parametrize(
    ("balance", "is_exact"),
    [
        # the importance loss of Shazeer et al. 2017: squares, with gradients in both factors
        ("(scores.softmax(-1).mean((0, 1)) ** 2).sum()", True),
        ("scores.softmax(-1).sum((0, 1)).var() / scores.softmax(-1).sum((0, 1)).mean() ** 2", True),
        # combines single tokens with a sum over all
        ("(scores.softmax(-1) * scores.softmax(-1).mean((0, 1))).sum()", False),
    ],
)
def test_any_function_of_sums_is_computed_of_the_global_batch(
    balance: str, is_exact: bool, tmp_path: Path
) -> None:
    source = (MODELS / "experts.py").read_text()
    known = "(shares * scores.softmax(-1).mean((0, 1))).sum()"
    assert known in source
    (tmp_path / "model.py").write_text(source.replace(known, balance))
    options = CompileOptions(balance_loss="global", widths="own")
    if is_exact:
        samples = (0, 2, 4, 6, 8)  # of one length, so that nothing is padded
        compiled = compile_model(tmp_path / "model.py", options)
        assert compiled.model is not None
        with tempfile.TemporaryDirectory() as directory:
            compiled.write_sections(Path(directory) / "plan")
            rank = OneRankPlan(compiled.plan, Path(directory) / "plan", compiled.user, compiled.model)
            batch = [compiled.user.dataset()[i] for i in samples]
            assert rank.compare_step(batch, 2, rank.run_reference(batch)).is_exact
    else:
        with pytest.raises(UserError, match="multiplies two sums") as refused:
            compile_model(tmp_path / "model.py", options)
        assert "--balance-loss micro-batch" in refused.value.remedy


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("ranks", "pins"),
    [
        (2, ("model.dp=2", "model.micro_batch=1", "model.recompute=full")),
        *(
            pytest.param(ranks, pins, marks=pytest.mark.slow)
            for ranks, pins in (
                (4, ("model.dp=2", "model.pp=2", "model.micro_batch=1", "model.sharding=zero1")),
                (2, ("model.dp=2", "model.sharding=zero3", "model.micro_batch=1")),
            )
        ),
    ],
)
def test_ranks_train_with_the_global_batch_s_balance_loss(
    ranks: int, pins: tuple[str, ...], tmp_path: Path
) -> None:
    """5 samples on several replicas, against plain PyTorch with the whole batch."""
    path = write_recording_model("experts", tmp_path, MODELS)
    options = CompileOptions(cluster=f"local:{ranks}", global_batch=5, set=pins, balance_loss="global")
    compile_model(path, options).write_plan(tmp_path / "plan", report_page)
    expected = train_in_one_process(path, 5, 3, tmp_path / "one")
    found = train_distributed(tmp_path / "plan", ranks, 3, tmp_path / "run")
    assert list(find_differences(found, expected)) == []


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "pins"),
    [
        (2, ("model.dp=2", "model.ep=2", "model.micro_batch=1")),
        (4, ("model.tp=2", "model.ep=4", "model.dp=2", "model.micro_batch=2")),
        (2, ("model.cp=2", "model.micro_batch=2")),
        (2, ("model.dp=2", "model.ep=2", "model.micro_batch=1", "model.recompute=full")),
        # Stages cut the layers inside which routers' scores are collected.
        (2, ("model.pp=2", "model.micro_batch=2")),
        (4, ("model.pp=2", "model.dp=2", "model.ep=2", "model.micro_batch=1")),
    ],
)
def test_mixtral_trains_with_the_global_batch_s_balance_loss(
    ranks: int, pins: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "balanced_mixtral.py").write_text(MIXTRAL)  # the name of no other module in this process
    path = write_recording_model("balanced_mixtral", tmp_path, tmp_path)
    options = CompileOptions(cluster=f"local:{ranks}", global_batch=6, set=pins, balance_loss="global")
    compile_model(path, options).write_plan(tmp_path / "plan", report_page)
    expected = train_in_one_process(path, 6, 3, tmp_path / "one")
    found = train_distributed(tmp_path / "plan", ranks, 3, tmp_path / "run")
    assert list(find_differences(found, expected)) == []


def test_an_unknown_way_of_computing_balance_losses_is_refused() -> None:
    with pytest.raises(UserError, match="unknown way of computing balance losses 'exact'") as refused:
        compile_model(MODELS / "experts.py", CompileOptions(balance_loss="exact"))
    assert "micro-batch or global" in refused.value.remedy


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
