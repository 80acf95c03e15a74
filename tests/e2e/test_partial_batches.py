"""Runs with a partial last batch and with samples left out equal plain PyTorch on the remaining samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secc.runtime.errors import UserError
from secc.runtime.model.user_file import UserModel, load_model_file
from secc.runtime.training.eager_reference import LOSS_TOLERANCE
from tests.e2e.harness import compile_and_write, read_metrics, run_plan_ranks

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, input_ids, labels):
        states = self.mix(self.embed(input_ids)).tanh()
        return F.cross_entropy(self.head(states).flatten(0, 1), labels.flatten())


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, i):
        if i == 5:
            raise OSError("no such file")
        ids = torch.randint(1, 20, (3 + i % 4,))  # another text in every epoch
        return {"input_ids": ids, "labels": ids}


def model():
    return Model()


def dataset():
    return Data()


def sizes(i):
    return {"input_ids": 3 + i % 4}


def optimizer(params):
    return torch.optim.SGD(params, lr=0.5)
"""
GLOBAL_BATCH, EPOCHS, RANKS = 4, 2, 3


def plain(user: UserModel) -> list[float]:
    """The losses of plain PyTorch; samples that do not load are left out of their batch."""
    torch.manual_seed(0)
    model = user.build_model()
    optimizer, losses = user.build_optimizer(list(model.named_parameters())), list[float]()
    for start in range(0, EPOCHS * 7, GLOBAL_BATCH):
        samples = []
        for n in range(start, min(start + GLOBAL_BATCH, EPOCHS * 7)):
            try:
                samples.append(user.load_sample(n % 7, 0, n // 7))
            except UserError:
                continue
        optimizer.zero_grad()
        loss = model(**user.collate(samples))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.gloo
def test_partial_batches_and_missing_samples_are_exact(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    pins = ("model.dp=3", "model.micro_batch=1")
    plan = tmp_path / "plan"
    compile_and_write(
        tmp_path / "model.py",
        plan,
        cluster="local:3",
        global_batch=GLOBAL_BATCH,
        set=pins,
        skip_bad_samples=True,
    )
    run_plan_ranks(
        plan,
        RANKS,
        ["--epochs", str(EPOCHS), "--skip-bad-samples", "--log-dir", str(tmp_path), "--workers", "2"],
    )
    found, user = read_metrics(tmp_path), load_model_file(tmp_path / "model.py")
    user.fit_default_collate([user.load_sample(i) for i in (0, 1, 2)])
    assert [(m["samples"], m["skipped"]) for m in found] == [(4, 0), (3, 1), (4, 0), (1, 1)]
    assert [m["loss"] for m in found] == pytest.approx(plain(user), rel=10 * LOSS_TOLERANCE)
