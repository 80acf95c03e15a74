"""An optional input that changes samples without it is named, with the line that uses it."""

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
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.row, self.picture, self.head = nn.Linear(4, 8), nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, row, label, picture=None):
        tokens = [self.row(row)[:, None]]
        if picture is not None:
            tokens.append(self.picture(picture)[:, None])
        return F.cross_entropy(self.head(torch.cat(tokens, 1).tanh().mean(1)), label)


def model():
    return Model()


def dataset():
    g = torch.Generator().manual_seed(0)
    made = [{"row": torch.randn(4, generator=g), "label": torch.tensor(i % 5)} for i in range(24)]
    for sample in made[::3]:
        sample["picture"] = torch.randn(6, generator=g)
    return made


def collate(samples):
    batch = {key: torch.stack([s[key] for s in samples]) for key in ("row", "label")}
    if any("picture" in s for s in samples):
        batch["picture"] = torch.stack([s.get("picture", torch.zeros(6)) for s in samples])
    return batch
"""

DRAWN_PARTS = """        parts = [self.row(row)]
        if picture is not None:
            parts.insert(0, self.picture(picture) * (picture != 0).any(1, keepdim=True))
        h = 0.0
        for x in parts:
            h = h + x * (torch.rand(len(x), 1) < 0.7)
        return F.cross_entropy(self.head(h), label)
"""


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (MODEL, r"samples without 'picture' are computed otherwise .*: head returns something else"),
        # Nothing but code between modules gets what has changed.
        (
            MODEL.replace(
                "self.head(torch.cat(tokens, 1).tanh().mean(1))", "torch.cat(tokens, 1).tanh().mean(1)"
            ),
            r"samples with and without 'picture' in one batch .* may compute samples without it otherwise",
        ),
    ],
    ids=["seen", "not seen"],
)
def test_an_input_that_changes_samples_without_it_is_named_with_its_line(
    model: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(model)
    made = compile_model(tmp_path / "model.py", CompileOptions(cluster="local:2", global_batch=12))
    with pytest.raises(UserError, match=says) as error:
        check_exactness(made, required=True)
    assert error.value.where == "model.py:15" and "torch.where" in error.value.remedy


def test_a_line_that_draws_more_often_with_an_optional_input_is_named(tmp_path: Path) -> None:
    """The row's numbers are the line's second ones in a batch with pictures, its first ones without."""
    body, _, rest = MODEL.partition("        tokens = ")
    model = body + DRAWN_PARTS + rest[rest.index("\n\n\ndef model") :]
    (tmp_path / "model.py").write_text(model)
    made = compile_model(tmp_path / "model.py", CompileOptions(cluster="local:2", global_batch=12))
    says = "draws random numbers more often if samples of a batch have 'picture'"
    with pytest.raises(UserError, match=says) as error:
        check_exactness(made, required=True)
    assert error.value.where == "model.py:18" and "for all inputs at once" in error.value.remedy
    remedied = model.replace("h = 0.0", "h, coins = 0.0, torch.rand(len(row), 2, 1)")
    remedied = remedied.replace("torch.rand(len(x), 1)", "coins[:, int(x is parts[-1])]")
    (tmp_path / "remedied.py").write_text(remedied)
    made = compile_model(tmp_path / "remedied.py", CompileOptions(cluster="local:2", global_batch=12))
    check_exactness(made, required=True)


EITHER = """
import torch
from torch import nn


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.hours, self.days = nn.Linear(4, 1), nn.Linear(8, 1)

    def forward(self, hours=None, days=None):
        total, count = 0.0, 0.0
        for series, net in ((hours, self.hours), (days, self.days)):
            if series is not None:
                seen = ~series.isnan().view(len(series), 2, -1)
                error = net(series.nan_to_num()).square() * seen[..., 0, None].any(1)
                total, count = total + error.sum(), count + seen.sum()
        return total / count


def model():
    torch.manual_seed(0)
    return Forecast()


def dataset():
    g = torch.Generator().manual_seed(0)
    made = [torch.randn(1, 4 + 4 * (i % 3 == 0), generator=g) for i in range(24)]
    for i, series in enumerate(made):
        series[0, i % 4] = float("nan")
    return [{"days" if i % 3 == 0 else "hours": series} for i, series in enumerate(made)]
"""


def test_a_divisor_may_be_counted_where_each_input_is_optional(tmp_path: Path) -> None:
    """So no input of each sample says how many samples there are."""
    (tmp_path / "model.py").write_text(EITHER)
    made = compile_model(tmp_path / "model.py", CompileOptions(cluster="local:2", global_batch=12))
    check_exactness(made, required=True)
