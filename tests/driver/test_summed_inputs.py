"""Numbers that collate counts over its samples (`num_items_in_batch`) divide a loss as sums in forward do."""

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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, tokens, count, scale):
        logits = self.head(self.embed(tokens))[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten(), ignore_index=0, reduction="sum")
        return {loss}


def model():
    return Net()


def dataset():
    g = torch.Generator().manual_seed(0)
    return [{{"tokens": torch.randint(1, 20, (5 + i % 4,), generator=g)}} for i in range(24)]


def collate(samples):
    tokens = nn.utils.rnn.pad_sequence([s["tokens"] for s in samples], batch_first=True)
    return {{"tokens": tokens, "count": {count}, "scale": torch.tensor(2.0)}}
"""


def check(folder: Path, loss: str, count: str) -> tuple[frozenset[str], str]:
    """The inputs that add up over samples, and the coefficients of the loss."""
    (folder / "net.py").write_text(MODEL.format(loss=loss, count=count))
    made = compile_model(folder / "net.py", CompileOptions(cluster="local:2", global_batch=8))
    checked = check_exactness(made, required=True)
    return checked.inputs.summed, " ".join(term.coefficient for term in checked.plan.terms)


def test_a_number_of_labels_that_collate_counts_is_a_sum_over_the_batch(tmp_path: Path) -> None:
    summed, coefficient = check(tmp_path, "loss / count * scale", "(tokens[:, 1:] != 0).sum()")
    assert summed == {"count"} and "leaves[" in coefficient


def test_a_sum_of_floats_may_be_clamped_before_it_divides(tmp_path: Path) -> None:
    summed, _ = check(tmp_path, "loss / count.clamp(min=1.0)", "(tokens != 0).float().sum() * 0.1")
    assert summed == {"count"}


def test_a_summed_input_times_a_sum_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the loss is not separable|does not compute"):
        check(tmp_path, "loss * loss / count", "(tokens[:, 1:] != 0).sum()")


def test_a_width_as_a_tensor_is_no_sum(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        check(tmp_path, "loss / count", "torch.tensor(tokens.shape[1])")
