"""Code that decides by a value of all samples is compared where samples lie on both sides of its bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from secc.driver.batch_wide_values import CouplingKink, KinkSearch
from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import InexactPlan
from secc.runtime.model.user_file import load_model_file
from tests.models import bounded_tower

MODEL = Path(bounded_tower.__file__).read_text()
BRANCH = "        if h.norm() > LIMIT:\n            h = h * 0.5\n"
GLUE = "        return F.cross_entropy(out"


def check(folder: Path, text: str, whole_batch: tuple[str, ...] = (), global_batch: int = 8) -> CompiledPlan:
    (folder / "model.py").write_text(text)
    options = CompileOptions(cluster="local:2", global_batch=global_batch, whole_batch=whole_batch)
    return check_exactness(compile_model(folder / "model.py", options), required=True)


def with_layer_code(*lines: str) -> str:
    assert BRANCH in MODEL
    return MODEL.replace(BRANCH, "".join(f"        {line}\n" for line in lines))


COUPLED = {
    "a branch": ["if h.abs().max() > LIMIT:", "    h = h / h.abs().max()"],
    "a number": ["if h.norm().item() > LIMIT:", "    h = h * 0.5"],
    "an array": ["if abs(h.detach().numpy()).max() > LIMIT:", "    h = h * 0.5"],
    "a list": ["if max(h.detach().flatten().tolist()) > LIMIT:", "    h = h * 0.5"],
    "any entry": ["if (h.abs() > LIMIT).any():", "    h = h.tanh()"],
    "a share of entries": ["if (h.abs() > 50).float().mean() > 0.1:", "    h = h.tanh()"],
    "torch.where": ["h = torch.where(h.mean() > LIMIT, h * 2, h)"],
    "clamp": ["h = h * (LIMIT / h.norm()).clamp(max=1.0)"],
    "min of numbers": ["h = h * min(1.0, LIMIT / float(h.detach().norm()))"],
    "minimum": ["h = h * torch.minimum(torch.ones(()), LIMIT / (h.norm() + 1e-6))"],
    "relu": ["h = h * (1 - F.relu(h.mean() - LIMIT))"],
    "buckets": ["h = h * (1 + torch.bucketize(h.detach().mean(), torch.tensor([5.0, 9.0])))"],
    "floor": ["h = h * (1 + torch.floor(h.detach().abs().mean() / LIMIT))"],
    "int": ["h = h * (1 + int(h.detach().abs().mean() / LIMIT))"],
    "a count": ["if int((h > 0).sum()) > 100_000:", "    h = h * 0.5"],
}


def find_kink(folder: Path, text: str) -> CouplingKink | None:
    """Searches in the tower of a model file. Its loss is a sum over samples, so single samples stand in for
    the micro-batches of a plan."""
    (folder / "model.py").write_text(text)
    user = load_model_file(folder / "model.py")
    model = user.build_model()
    samples = [sample for sample in bounded_tower.dataset() if len(sample["x"]) == 6]  # without padding

    def run_forward(some: Sequence[Mapping[str, Any]]) -> float:
        with torch.no_grad():
            return float(model.get_submodule("tower")(user.collate(list(some))["x"]).square().sum())

    def is_exact(size: int) -> bool:
        parts = sum(run_forward(samples[i : i + size]) for i in range(0, len(samples), size))
        return abs(parts - run_forward(samples)) < 1e-4 * abs(parts)

    assert is_exact(1)
    return KinkSearch(model, ["tower"], samples, run_forward, is_exact).find_coupling_kink()


@pytest.mark.parametrize("lines", COUPLED.values(), ids=COUPLED)
def test_a_bound_that_no_compared_sample_reaches_is_found(tmp_path: Path, lines: list[str]) -> None:
    text = with_layer_code(*lines)
    found = find_kink(tmp_path, text)
    assert found is not None
    assert found.where == f"model.py:{text.splitlines().index(f'        {lines[0]}') + 1}"
    assert found.blocks == ["tower"]


@pytest.mark.parametrize("kind", ["a branch", "min of numbers", "floor"])
def test_a_plan_that_such_a_bound_makes_inexact_is_refused(tmp_path: Path, kind: str) -> None:
    lines = COUPLED[kind]
    text = with_layer_code(*lines)
    with pytest.raises(InexactPlan, match="all compared samples lie on one side of it") as refused:
        check(tmp_path, text)
    line = text.splitlines().index(f"        {lines[0]}") + 1
    assert refused.value.where == f"model.py:{line}"
    assert "--whole-batch tower" in refused.value.remedy


def test_the_named_remedy_is_exact(tmp_path: Path) -> None:
    checked = check(tmp_path, MODEL, whole_batch=("tower",))
    assert all(p["exact"] for p in checked.plan.checks["patterns"])


BY_ROW = {
    "torch.where": ["n = h.norm(dim=-1, keepdim=True)", "h = torch.where(n > 100, h / n, h)"],
    "clamp": ["h = F.normalize(h, dim=-1).clamp(-10, 10)"],
    "a loop over samples": ["h = torch.stack([r * 0.5 if r.norm() > LIMIT else r for r in h])"],
    "numbers of samples": [
        "scales = [0.5 if n > LIMIT else 1.0 for n in h.detach().norm(dim=(1, 2)).tolist()]",
        "h = h * torch.tensor(scales)[:, None, None]",
    ],
    "a check": ["assert h.norm() < 1e6, 'diverged'"],
    "a shortcut": ["if (h.abs() > LIMIT).any():", "    h = h.clamp(-LIMIT, LIMIT)"],
}


@pytest.mark.parametrize("lines", BY_ROW.values(), ids=BY_ROW)
def test_what_decides_by_sample_or_changes_nothing_is_not_found(tmp_path: Path, lines: list[str]) -> None:
    assert find_kink(tmp_path, with_layer_code(*lines)) is None


def test_a_plan_of_what_decides_by_sample_is_exact(tmp_path: Path) -> None:
    checked = check(tmp_path, with_layer_code(*BY_ROW["torch.where"], *BY_ROW["a loop over samples"]))
    assert all(p["exact"] for p in checked.plan.checks["patterns"])


def test_a_sum_over_the_batch_that_python_compares_between_blocks_is_refused(tmp_path: Path) -> None:
    lines = "        if (y != -100).sum() > 500:\n            out = out * 0.5\n"
    text = with_layer_code("pass").replace(GLUE, lines + GLUE)
    with pytest.raises(InexactPlan, match="no micro-batch reaches the number") as refused:
        check(tmp_path, text, global_batch=200)
    assert refused.value.where.startswith("model.py:")


# Of a maximum, a run refuses the micro-batch that reaches the number.
@pytest.mark.parametrize(
    "lines",
    [
        "        if (y != -100).sum() > 0:\n            out = out * 0.5\n",
        "        if (y != -100).sum() > 500:\n            out = out * 0.5\n",  # eight samples do not
        "        if y.max() > 100:\n            out = out * 0.5\n",
        "        out = out * (0.5 + (y != -100).any(1).float()[:, None, None])\n",
    ],
)
def test_what_no_batch_decides_otherwise_than_its_samples_is_exact(tmp_path: Path, lines: str) -> None:
    checked = check(tmp_path, with_layer_code("pass").replace(GLUE, lines + GLUE))
    assert all(p["exact"] for p in checked.plan.checks["patterns"])


def test_the_weight_that_a_message_names_is_exact(tmp_path: Path) -> None:
    text = with_layer_code("pass").replace(
        "return F.cross_entropy(out.transpose(1, 2), y)",
        "return (1 - 0.5 * ((y != -100).sum() > 20).float()) * F.cross_entropy(out.transpose(1, 2), y)",
    )
    checked = check(tmp_path, text)
    assert all(p["exact"] for p in checked.plan.checks["patterns"])
