"""Labels that a module returns, such as the codes of a tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Tokenizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.book = nn.Embedding(6, 4)

    def forward(self, x):
        codes = torch.cdist(x, self.book.weight[None]).argmin(-1)
        return CODES


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokenizer, self.first, self.head = Tokenizer(), nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, x, hidden):
        codes = self.tokenizer(x)[:, 1:].masked_fill(hidden[:, 1:], -100)
        return F.cross_entropy(self.head(self.first(x).tanh())[:, :-1].flatten(0, 1), codes.flatten())


def model():
    torch.manual_seed(0)
    return Net()


def dataset():
    g = torch.Generator().manual_seed(0)
    rows = [torch.randn(5, 4, generator=g) for _ in range(14)]
    return [{"x": x, "hidden": x[:, 0] > 1} for x in rows]
"""


def check(codes: str, folder: Path) -> None:
    (folder / "model.py").write_text(MODEL.replace("CODES", codes))
    check_exactness(compile_model(folder / "model.py", CompileOptions(cluster="local:1", global_batch=4)))


def test_codes_of_a_module_are_labels_of_an_exact_loss(tmp_path: Path) -> None:
    check("codes", tmp_path)


def test_a_module_that_ignores_labels_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the loss is off by inf"):
        check("codes.where(x[..., 1] < 1, -100)", tmp_path)
