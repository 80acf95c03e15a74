"""What statements between modules do for one number of samples only, which no recording has, is compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError

MODEL = """
import torch
from torch import nn

LAST, WEIGHTS = 6, {6: 2.0}


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x, y):
        h = self.hidden(x).tanh()
        weight = 1.0
        LINE
        return weight * nn.functional.cross_entropy(self.head(h), y)


def model():
    return Weighted()


def dataset():
    g = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(8, generator=g), "y": torch.tensor(i % 2)} for i in range(38)]
"""


def check_line(folder: Path, line: str) -> None:
    path = folder / "weighted.py"
    path.write_text(MODEL.replace("LINE", line))
    check_exactness(compile_model(path, CompileOptions(cluster="local:2", global_batch=8)), required=True)


@pytest.mark.parametrize(
    "line",
    [
        "if x.shape[0] == 6: weight = 2.0",
        "if LAST == len(x): weight = 2.0",
        "if len(x) in (6, 7): weight = 2.0",  # (B + 2) // 4 of the recorded sizes, and not of 8
        "if x.size(0) % 7 == 6: weight = 2.0",
        "weight = WEIGHTS.get(len(h), 1.0)",
    ],
)
def test_what_one_number_of_samples_changes_is_refused(line: str, tmp_path: Path) -> None:
    message = "samples take another way than few of them|does not compute what plain PyTorch computes"
    with pytest.raises(UserError, match=message) as refused:
        check_line(tmp_path, line)
    assert "weighted.py" in refused.value.where


def test_numbers_that_are_compared_with_other_sizes_are_accepted(tmp_path: Path) -> None:
    check_line(tmp_path, "if x.shape[1] == 6 or h.shape[-1] == 8: weight = 2.0")
