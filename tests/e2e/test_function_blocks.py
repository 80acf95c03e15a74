"""Functions of the user's code that read values of blocks' results are blocks: those that give rows work in
micro-batches, those that compute the loss take all samples of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import InexactPlan, UserError
from secc.report.html_page import report_page
from tests.e2e.harness import find_differences
from tools.compare_training import train_distributed, train_in_one_process, write_recording_model

MODELS = Path(__file__).parent.parent / "models"
PSEUDO_LABELS = """
import torch
import torch.nn.functional as F
from torch import nn


def choose(scores):
    return torch.tensor([row.index(max(row)) for row in scores.tolist()])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 3)

    def forward(self, x):
        scores = self.head(self.layers(x))
        return F.cross_entropy(scores, choose(scores))


def model():
    return Model()


def dataset():
    return [{"x": torch.randn(4, generator=torch.Generator().manual_seed(i))} for i in range(48)]
"""


def test_a_loss_with_a_matching_takes_all_samples_of_a_step() -> None:
    options = CompileOptions(cluster="local:2", global_batch=12)
    plan = check_exactness(compile_model(MODELS / "matched_boxes.py", options), required=True).plan
    assert plan.model.functions == (":detection_loss",)
    assert [(s.blocks, s.whole_batch) for s in plan.sections] == [
        (("encoder", "classes", "boxes"), False),
        (("detection_loss",), True),
    ]
    notes = " ".join((*plan.checks["notes"], *plan.checks["logged"]))
    assert "detection_loss: this function is one block, because Python reads a value" in notes
    assert "detection_loss computes all samples of a step at once on one rank" in notes


def test_a_function_with_rows_works_in_micro_batches(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(PSEUDO_LABELS)
    options = CompileOptions(cluster="local:2", global_batch=12)
    plan = check_exactness(compile_model(tmp_path / "model.py", options), required=True).plan
    assert plan.model.functions == (":choose",) and not any(s.whole_batch for s in plan.sections)


def test_a_function_that_mixes_rows_is_not_exact(tmp_path: Path) -> None:
    mixing = PSEUDO_LABELS.replace("scores.tolist()", "(scores - scores.mean(0)).tolist()")
    (tmp_path / "model.py").write_text(mixing)
    with pytest.raises(InexactPlan):
        check_exactness(compile_model(tmp_path / "model.py", CompileOptions()), required=True)


def test_a_function_inside_another_is_part_of_its_statement(tmp_path: Path) -> None:
    inner = PSEUDO_LABELS.replace(
        "choose(scores))", "(lambda s: torch.tensor(s.argmax(1).tolist()))(scores))"
    )
    (tmp_path / "model.py").write_text(inner)
    plan = check_exactness(compile_model(tmp_path / "model.py", CompileOptions()), required=True).plan
    assert [(s.blocks, s.whole_batch) for s in plan.sections] == [
        (("layers", "head"), False),
        (("line_18",), True),
    ]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("name", ["matched_boxes", "pseudo_labels"])
def test_functions_train_as_in_plain_pytorch(name: str, tmp_path: Path) -> None:
    (tmp_path / "pseudo_labels.py").write_text(PSEUDO_LABELS)
    (tmp_path / "matched_boxes.py").write_text((MODELS / "matched_boxes.py").read_text())
    model = write_recording_model(name, tmp_path, tmp_path)
    options = CompileOptions(cluster="local:3", global_batch=12)
    compiled = check_exactness(compile_model(model, options), required=True)
    compiled.write_plan(tmp_path / "plan", report_page)
    reference = train_in_one_process(model, 12, 4, tmp_path / "plain")
    found = train_distributed(tmp_path / "plan", compiled.plan.world_size, 4, tmp_path / "run")
    assert list(find_differences(found, reference)) == []


EMPTY = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, passages, owner, label):
        x = self.words(passages)
        x = self.attention(x, x, x, passages < 0, need_weights=False)[0].mean(1)
        x = torch.zeros(len(label), 8).index_add(0, owner, x)
        return nn.functional.cross_entropy(self.head(x), label)


def model():
    return Model()


def dataset():
    return [(torch.arange(4 * (i % 3)).view(-1, 4), i % 3) for i in range(24)]


def collate(samples):
    owner = torch.cat([torch.full((len(rows),), i) for i, (rows, _) in enumerate(samples)])
    label = torch.tensor([label for _, label in samples])
    return {"passages": torch.cat([rows for rows, _ in samples]), "owner": owner, "label": label}
"""


def test_a_model_that_takes_no_sample_alone_is_refused(tmp_path: Path) -> None:
    normed = PSEUDO_LABELS.replace("nn.Linear(8, 8))", "nn.Linear(8, 8), nn.GroupNorm(8, 8))")
    (tmp_path / "model.py").write_text(normed)
    with pytest.raises(UserError, match="plain PyTorch too, on a batch of one sample") as refused:
        check_exactness(compile_model(tmp_path / "model.py", CompileOptions()), required=True)
    assert refused.value.where.startswith("model.py:") and "one sample" in refused.value.remedy


def test_samples_without_rows_that_plain_pytorch_cannot_compute_alone(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(EMPTY)
    with pytest.raises(UserError, match="plain PyTorch too, on a batch of one sample") as refused:
        check_exactness(compile_model(tmp_path / "model.py", CompileOptions()), required=True)
    assert "no entries of passages" in refused.value.remedy and "None" in refused.value.remedy
