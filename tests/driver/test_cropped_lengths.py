"""Samples that captures shorten, although another input holds their length."""

from __future__ import annotations

from pathlib import Path

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness

MODEL = """
import torch
from torch import nn


class Last(nn.Module):
    def forward(self, hidden, lengths):
        return hidden[torch.arange(len(lengths)), lengths - 1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.last, self.head = nn.Embedding(9, 4), Last(), nn.Linear(4, 1)

    def forward(self, ids, lengths):
        return self.head(self.last(self.embed(ids), lengths)).square().mean()


def model():
    torch.manual_seed(0)
    return Net()


def dataset():
    return [{"ids": torch.arange(1, 7 + i % 2), "lengths": torch.tensor(6 + i % 2)} for i in range(12)]
"""


def test_a_length_that_contradicts_shortened_samples_is_no_fault_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    options = CompileOptions(cluster="local:1", global_batch=4)
    compiled = check_exactness(compile_model(tmp_path / "model.py", options))
    assert compiled.survey.has_crops
    assert all(p["exact"] for p in compiled.plan.checks["patterns"])  # pyright: ignore


STACKING = """

def collate(samples):
    return {key: torch.stack([s[key] for s in samples]) for key in samples[0]}


def dataset():
    return [{"ids": torch.arange(1, 7) + i % 3, "lengths": torch.tensor(6)} for i in range(12)]
"""


def test_a_collate_that_stacks_vectors_of_one_length_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL + STACKING)
    options = CompileOptions(cluster="local:1", global_batch=4)
    compiled = check_exactness(compile_model(tmp_path / "model.py", options))
    assert not compiled.survey.has_crops
    assert all(p["exact"] for p in compiled.plan.checks["patterns"])  # pyright: ignore


PLACED = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.see, self.head = nn.Embedding(20, 8), nn.Linear(6, 8), nn.Linear(8, 20)

    def forward(self, ids, pictures=None):
        x = self.embed(ids)
        if pictures is not None:
            x = x.masked_scatter((ids == 19)[..., None], self.see(pictures).reshape(-1, 8))
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)


def model():
    torch.manual_seed(0)
    return Net()


def dataset():
    made = []
    for i in range(24):
        g = torch.Generator().manual_seed(i)
        words = torch.randint(1, 19, (5 + i % 4,), generator=g)
        if i % 3 == 0:  # of two lengths only, so they are shortened; pictures stand at the end
            ids = F.pad(words[: 4 + i % 2], (0, 4), value=19)
            made.append({"ids": ids, "pictures": torch.randn(4, 6, generator=g)})
        else:
            made.append({"ids": words})
    return made


def collate(samples):
    batch = {"ids": nn.utils.rnn.pad_sequence([s["ids"] for s in samples], batch_first=True)}
    pictures = [s["pictures"] for s in samples if "pictures" in s]
    return batch | ({"pictures": torch.stack(pictures)} if pictures else {})
"""


def test_shortened_samples_without_places_for_their_rows_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(PLACED)
    made = compile_model(tmp_path / "model.py", CompileOptions(cluster="local:2", global_batch=8))
    assert made.survey.has_crops
    assert all(p["exact"] for p in check_exactness(made).plan.checks["patterns"])  # pyright: ignore
