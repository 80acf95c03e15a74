"""Long samples with pictures, which are never cropped, are padded in small batches to see whether that
changes the loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secc.frontend.dataset import padding_policy
from secc.frontend.dataset.input_symbols import describe_inputs
from secc.frontend.dataset.padding_policy import PaddingPolicy, WidthsReason, choose_padding_policy
from secc.frontend.dataset.sampling import survey_dataset
from secc.runtime.model.user_file import UserModel, load_model_file
from secc.runtime.training import eager_watch

MODEL = """
import torch
from torch import nn

SHAPES = []

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.seen, self.head = nn.Embedding(30, 4), nn.Linear(5, 4), nn.Linear(4, 30)

    def forward(self, input_ids, labels, picture):
        SHAPES.append(tuple(input_ids.shape))
        x = self.text(input_ids).cumsum(1) / 1000
        x = torch.cat([x[:, :1] + self.seen(picture).sum(0), x[:, 1:]], 1)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) EXTRA

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        words = torch.full((LEAST + 100 * i,), 1 + i)
        return dict(input_ids=words, labels=words, picture=torch.ones(1 + i % 3, 5))

def model():
    return Model()

def dataset():
    return Data()
"""


@pytest.fixture(autouse=True)
def draw_the_same_weights() -> None:
    """As a compilation does: few weights hide an effect of one in a thousand."""
    torch.manual_seed(0)


def choose_widths(path: Path, builds: bool = True) -> tuple[UserModel, PaddingPolicy]:
    """Loads a model file and chooses its widths. builds: whether its model is small enough to be built."""
    user = load_model_file(path)
    survey = survey_dataset(user)
    model = user.build_model() if builds else None
    return user, choose_padding_policy(user, survey, describe_inputs(user, survey), model)


@pytest.mark.parametrize(
    ("extra", "widths"), [("", "own"), ("+ x.mean()", "global")], ids=["ignored", "in a mean"]
)
@pytest.mark.parametrize(("least", "runs"), [(20, 5 * 2), (4000, 3)])
def test_few_batches_of_long_samples_are_padded(
    least: int, runs: int, extra: str, widths: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("EXTRA", extra).replace("LEAST", str(least)))
    user, found = choose_widths(path)
    assert found.widths == widths
    shapes: list[tuple[int, int]] = user.module.SHAPES
    assert len(set(shapes)) > 1
    assert all(rows * width**2 <= 2**26 for rows, width in shapes)
    if widths == "own":
        assert len(shapes) == runs  # batches as they are and padded; one long batch padded twice


@pytest.mark.parametrize(
    ("extra", "widths"), [("", "own"), ("+ x.mean()", "global")], ids=["ignored", "in a mean"]
)
def test_light_samples_are_padded_where_scores_are_large(
    extra: str, widths: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("EXTRA", extra).replace("LEAST", "20"))
    monkeypatch.setattr(padding_policy, "_MAX_ENTRIES", 30 * 100)  # the scores of 100 tokens
    user, found = choose_widths(path)
    assert found.widths == widths
    shapes: list[tuple[int, int]] = user.module.SHAPES
    assert len(set(shapes)) > 1 and all(width <= 120 + 3 for _, width in shapes)
    if widths == "own":
        assert len(shapes) == 4 and shapes[3][1] >= 2 * shapes[2][1]  # padded a little, and far


def test_padding_that_only_rounds_a_gradient_otherwise_is_not_seen(tmp_path: Path) -> None:
    """`bias` shifts all logits of a word alike, so its gradient is zero but for what rounding leaves."""
    path = tmp_path / "model.py"
    path.write_text(
        MODEL.replace("EXTRA", "")
        .replace("LEAST", "20")
        .replace("self.text, ", "self.bias = nn.Parameter(torch.zeros(()))\n        self.text, ")
        .replace("self.head(x).flatten", "(self.head(x) + 1000 * self.bias).flatten")
    )
    _, found = choose_widths(path)
    assert found.widths == "own"


def test_padding_that_rounding_to_16_bits_hides_is_seen(tmp_path: Path) -> None:
    hidden = "+ (1 + x.detach().mean() / 1000).bfloat16().float()"
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("EXTRA", hidden).replace("LEAST", "20"))
    _, found = choose_widths(path)
    assert found == PaddingPolicy("global", WidthsReason.AFFECTED)


def test_a_forward_that_asserts_its_width_is_not_padded_to_others(tmp_path: Path) -> None:
    path, check = tmp_path / "model.py", "assert len(input_ids[0]) % 4 == 0\n        SHAPES"
    path.write_text(
        MODEL.replace("EXTRA", "").replace("LEAST", "20").replace("SHAPES.append", f"{check}.append")
    )
    _, found = choose_widths(path)
    assert found == PaddingPolicy("global", WidthsReason.AFFECTED)


SMALL = """
def small_model():
    return Model()

def small_dataset():
    class Short(Data):
        def __getitem__(self, i):
            words = torch.full((5 + i,), 1 + i)
            return dict(input_ids=words, labels=words, picture=torch.ones(1 + i % 3, 5))

    return Short()
"""


@pytest.mark.parametrize(
    ("extra", "widths"), [("", "own"), ("+ x.mean()", "global")], ids=["ignored", "in a mean"]
)
def test_a_small_model_is_padded_on_small_samples(extra: str, widths: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("EXTRA", extra).replace("LEAST", "4000") + SMALL)
    user, found = choose_widths(path, builds=False)
    assert (found.widths == widths, found.reason is WidthsReason.SHOWN_SMALL) == (True, widths == "own")
    assert all(width <= 4 * 16 for _, width in user.module.SHAPES)


@pytest.mark.parametrize(
    ("extra", "widths"), [("", "own"), ("+ x.mean()", "global")], ids=["ignored", "in a mean"]
)
def test_batches_that_take_too_much_memory_give_way_to_a_short_sample(
    extra: str, widths: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("EXTRA", extra).replace("LEAST", "20"))
    monkeypatch.setattr(eager_watch, "_LARGE", 1)
    monkeypatch.setattr(eager_watch, "available_memory", lambda: 4 * (1200 * 30 * 4))  # scores of 1,200 words
    _, found = choose_widths(path)
    assert found.widths == widths and found.reason in (WidthsReason.SHOWN, WidthsReason.AFFECTED)
