"""Paths through forward that few samples take: drawn samples show them while a plan is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.sound, self.head = nn.Embedding(50, 8), nn.Linear(3, 8), nn.Linear(8, 50)

    def forward(self, ids, sound=None, rows=None):
        x = self.embed(ids)
        if sound is not None:
            x = x.index_add(0, rows, self.sound(sound)[:, None].expand(-1, x.shape[1], -1))
        scores = self.head(x)
        loss = F.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
        if CONDITION:
            RARE
        return loss


def model():
    return Model()


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        sample = {"ids": torch.randint(1, 47, (4 + i % 9,), generator=g)}
        if i % 5 == 2:
            sample["sound"] = torch.randn(3, generator=g)
        if i == 30:
            sample["ids"][2] = 47
        return sample


def dataset():
    return Data()


def collate(samples):
    batch = {"ids": nn.utils.rnn.pad_sequence([s["ids"] for s in samples], batch_first=True)}
    rows = [i for i, s in enumerate(samples) if "sound" in s]
    if rows:
        batch |= {"sound": torch.stack([samples[i]["sound"] for i in rows]), "rows": torch.tensor(rows)}
    return batch
"""


RARE_TERM = "loss = loss + scores[ids == 47].pow(2).sum() / (ids != 0).sum()"


def check(rare: str, tmp_path: Path, condition: str = "(ids == 47).any()") -> CompiledPlan:
    (tmp_path / "model.py").write_text(MODEL.replace("RARE", rare).replace("CONDITION", condition))
    options = CompileOptions(cluster="local:2", global_batch=12)
    return check_exactness(compile_model(tmp_path / "model.py", options), required=True)


def test_a_path_that_one_drawn_sample_takes_is_a_case_of_every_pattern(tmp_path: Path) -> None:
    made = check(RARE_TERM, tmp_path)
    assert all(p["exact"] for p in made.plan.checks["patterns"])
    conditions = [
        (case.pattern, guard.meta["read"][1])
        for case in made.captured_model.capture.cases
        for guard in case.generic.guards
    ]
    with_sound = frozenset({"sound", "rows"})
    assert set(conditions) == {(p, v) for p in (frozenset[str](), with_sound) for v in (False, True)}


def test_a_rare_path_that_couples_samples_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="depends on what Python reads from a micro-batch") as error:
        check("loss = loss * 2", tmp_path)
    assert error.value.where == "model.py:17"


def test_a_rare_path_that_reads_a_result_takes_the_whole_batch(tmp_path: Path) -> None:
    made = check("loss = loss * scores.max().item()", tmp_path)
    assert any(s.whole_batch for s in made.plan.sections)
    assert all(p["exact"] and p["samples"] == 8 for p in made.plan.checks["patterns"])  # with the rare one


def test_a_condition_on_one_of_the_results_of_an_op_is_tried_on_every_sample(tmp_path: Path) -> None:
    made = check(RARE_TERM, tmp_path, condition="torch.max(ids, 1)[0].max() == 47")
    assert all(p["exact"] for p in made.plan.checks["patterns"])
