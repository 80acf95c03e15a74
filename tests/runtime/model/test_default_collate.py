"""The default collate: what is stacked, padded and concatenated; and the sizes of batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.report.html_page import report_page
from secc.runtime.errors import UserError
from secc.runtime.model.default_collate import DefaultCollate, default_collate, find_joined_key
from secc.runtime.model.user_file import load_model_file
from secc.runtime.plan.batch_sizes import check_batch_shapes, combine_sizes, pad_batch, read_symbol_sizes
from secc.runtime.plan.schema import Input, Symbol
from tools.compare_training import (
    TrainingResult,
    find_differences,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)

PROCESSED_IMAGES = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 4), nn.Linear(4, 2)
    def forward(self, pixel_values, labels):
        logits = self.head(self.conv(pixel_values).mean((2, 3)))
        return nn.functional.cross_entropy(logits, labels)
class Samples(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return {"pixel_values": torch.randn(1, 3, 8, 8, generator=g), "labels": i % 2}
def model(): return Model()
def dataset(): return Samples()
"""
TEXT = [{"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in (2, 5, 3)]


def test_sequences_are_padded_and_masked():
    batch = default_collate(TEXT, ["input_ids", "attention_mask"])
    assert batch["input_ids"].tolist() == [[0, 1, 0, 0, 0], [0, 1, 2, 3, 4], [0, 1, 2, 0, 0]]
    assert batch["labels"][0].tolist() == [0, 1, -100, -100, -100]
    assert batch["attention_mask"].sum(1).tolist() == [2, 5, 3]


def test_a_mask_is_added_if_forward_takes_one_and_samples_have_none():
    assert "attention_mask" in default_collate(TEXT[:1], ["attention_mask"])
    assert "attention_mask" not in default_collate(TEXT, ["input_ids"])
    own = [{**s, "attention_mask": torch.full_like(s["labels"], 7)} for s in TEXT]
    assert default_collate(own, ["attention_mask"])["attention_mask"].unique().tolist() == [0, 7]


def test_all_samples_decide_whether_images_are_stacked_or_concatenated():
    ragged = [{"x": torch.zeros(n, 3, 4, 4)} for n in (1, 2, 1)]
    collate = DefaultCollate.fit(ragged, [])
    assert collate(ragged)["x"].shape == (4, 3, 4, 4)
    assert collate(ragged[:1] * 2)["x"].shape == (2, 3, 4, 4)  # equal by chance: as in the whole set
    assert default_collate([{"x": torch.zeros(3, 4, 4)}] * 2, [])["x"].shape == (2, 3, 4, 4)
    assert default_collate([{"x": torch.zeros(3, 4, 4)}, {}], [])["x"].shape == (1, 3, 4, 4)
    assert default_collate([{"x": torch.zeros(1, 3, 4, 4)}, {}], [])["x"].shape == (1, 3, 4, 4)


def test_single_images_of_processors_are_concatenated():
    """Image processors return [1, channels, height, width], also where every sample has one image."""
    samples = [{"x": torch.full((1, 3, 4, 4), float(i))} for i in range(3)]
    fitted = DefaultCollate.fit(samples, [])
    planned = DefaultCollate.from_inputs([Input("x", "float32", ("n_x", "3", "4", "4"))])
    for collate in (fitted, planned):
        assert collate(samples)["x"][:, 0, 0, 0].tolist() == [0.0, 1.0, 2.0]
        assert collate(samples[:1])["x"].shape == (1, 3, 4, 4)
    assert default_collate([{"x": torch.zeros(2, 3, 4, 4)}] * 3, [])["x"].shape == (3, 2, 3, 4, 4)  # frames


def test_rules_follow_from_a_plans_inputs():
    samples = [
        {"input_ids": [1, 2], "x": torch.ones(1, 3, 2, 2), "y": 0.5},
        {"input_ids": [3]},
        {"input_ids": [4]},
    ]
    fitted = DefaultCollate.fit(samples, ["attention_mask"])
    shapes = {
        "input_ids": ("B", "S"),
        "x": ("n_x", "3", "2", "2"),
        "y": ("n_y",),
        "attention_mask": ("B", "S"),
    }
    planned = DefaultCollate.from_inputs([Input(k, "", dims) for k, dims in shapes.items()])
    assert {k: v.tolist() for k, v in fitted(samples[:1]).items()} == {
        k: v.tolist() for k, v in planned(samples[:1]).items()
    }


def test_numbers_arrays_and_texts():
    numpy = pytest.importorskip("numpy")
    samples = [
        {"i": 1, "f": 0.5, "a": numpy.arange(2), "t": "one", "e": []},
        {"i": 2, "f": 1, "a": [5], "t": "two", "e": [3]},
    ]
    batch = default_collate(samples, [])
    assert (
        batch["i"].tolist() == [1, 2] and batch["f"].tolist() == [0.5, 1.0] and batch["t"] == ["one", "two"]
    )
    assert batch["a"].tolist() == [[0, 1], [5, 0]]
    assert batch["e"].tolist() == [[0], [3]] and batch["e"].dtype == torch.int64


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 4)}], r"'x' of shapes \[2, 3\], \[2, 4\]"),
        ([{"x": torch.zeros(2)}, {"x": torch.zeros(2, 4)}], "can be neither stacked nor concatenated"),
        ([{"x": object()}], "of type object"),
        ([{"x": None}], "of type NoneType"),
        ([{"x": [[1], [2, 3]]}], "cannot be made a tensor"),
    ],
)
def test_samples_without_a_rule_are_rejected(samples: list[dict[str, object]], message: str):
    with pytest.raises(UserError, match=message) as caught:
        default_collate(samples, [])
    assert caught.value.remedy


SYMBOLS = (
    Symbol("B", "rows", "input_ids", 0),
    Symbol("S", "width", "input_ids", 1),
    Symbol("n_x", "rows", "x", 0),
)
INPUTS = (
    Input("input_ids", "int64", ("B", "S"), pads=((1, "left", 0.0),)),
    Input("mask", "bool", ("B", "1", "S", "S + 1"), pads=((2, "right", 1.0), (3, "right", 0.0))),
)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=6), st.data())
def test_sizes_of_a_batch_combine_its_samples_sizes(sizes: list[tuple[int, int]], data: st.DataObject):
    samples = [{"input_ids": torch.ones(s)} | ({"x": torch.zeros(n, 2)} if n else {}) for s, n in sizes]
    collate = DefaultCollate({"input_ids": 2, "x": 2}, mask=False)
    parts = [read_symbol_sizes(collate([s]), SYMBOLS) for s in samples]
    cut = data.draw(st.integers(0, len(parts)))
    halves = [combine_sizes(parts[:cut], SYMBOLS), combine_sizes(parts[cut:], SYMBOLS)]
    assert (
        combine_sizes(parts, SYMBOLS)
        == read_symbol_sizes(collate(samples), SYMBOLS)
        == combine_sizes(halves, SYMBOLS)
    )


def test_a_symbol_without_a_key_counts_samples():
    assert read_symbol_sizes({}, (Symbol("B", "rows", "", 0),)) == {"B": 1}


def test_a_batch_is_padded_to_given_widths():
    batch = {
        "input_ids": torch.tensor([[1, 2]]),
        "mask": torch.zeros(1, 1, 2, 3, dtype=torch.bool),
        "other": 3,
    }
    padded = pad_batch(batch, INPUTS, {"S": 4})
    assert padded["input_ids"].tolist() == [[0, 0, 1, 2]] and padded["other"] == 3
    assert padded["mask"].shape == (1, 1, 4, 5)
    assert padded["mask"][0, 0].int().tolist() == [[0] * 5, [0] * 5, [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]
    check_batch_shapes(padded, INPUTS, {"B": 1, "S": 4})


def test_padding_without_a_value_and_unplanned_shapes_are_rejected():
    inputs = (Input("positions", "int64", ("B", "S")),)
    with pytest.raises(UserError, match="'positions': expected padding with one constant along dim 1"):
        pad_batch({"positions": torch.tensor([[0, 1]])}, inputs, {"S": 3})
    with pytest.raises(UserError, match=r"expected the shape \[B, S\] = \[1, 3\] of the plan, got \[1, 2\]"):
        check_batch_shapes({"positions": torch.tensor([[0, 1]])}, inputs, {"B": 1, "S": 3})


def test_a_model_of_processed_images_is_checked_without_a_collate(tmp_path: Path) -> None:
    """A convolution takes [samples, 3, H, W], and refuses what stacking would give it."""
    (tmp_path / "model.py").write_text(PROCESSED_IMAGES)
    compiled = compile_model(tmp_path / "model.py", CompileOptions(cluster="local:2", global_batch=8))
    (checked,) = check_exactness(compiled).plan.checks["patterns"]
    assert checked["exact"]


def test_shapes_of_a_batch_are_known_without_values(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(PROCESSED_IMAGES)
    user = load_model_file(path)
    samples = [user.load_sample(i) | {"ids": [1] * (2 + i), "name": "a"} for i in range(3)]
    batch, shapes = user.collate(samples), user.collate_shapes(samples)
    assert shapes.pop("name") == batch.pop("name")
    assert {k: (v.shape, v.dtype) for k, v in shapes.items()} == {
        k: (v.shape, v.dtype) for k, v in batch.items()
    }
    assert all(v.is_meta for v in shapes.values())


DICTS = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.side = nn.Embedding(20, 8), nn.Linear(8, 20), nn.Linear(3, 8)
    def forward(self, tokens, meta):
        x = self.embed(tokens) + self.side(meta["box"]["corners"])[:, None]
        rows = nn.functional.cross_entropy(self.head(x).transpose(1, 2), tokens, reduction="none").mean(1)
        return (rows * meta["weight"]).mean()
def model():
    torch.manual_seed(0)
    return Model()
def make_sample(i):
    g = torch.Generator().manual_seed(i)
    meta = {"box": {"corners": torch.randn(3, generator=g)}, "weight": torch.rand((), generator=g)}
    return {"tokens": torch.randint(0, 20, (6,), generator=g), "meta": meta}
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return map(make_sample, range(24))
def dataset():
    return DATASET
"""


def train_on_dicts(folder: Path, name: str, dataset: str) -> tuple[Path, TrainingResult]:
    """Trains a model file with dicts in its samples on ranks; returns the file and the result."""
    (folder / "own").mkdir()
    (folder / "own" / f"{name}.py").write_text(DICTS.replace("DATASET", dataset))
    path = write_recording_model(name, folder, folder / "own")
    compiled = check_exactness(compile_model(path, CompileOptions("local:2", 8)), required=True)
    compiled.write_plan(folder / "plan", report_page)
    return path, train_distributed(folder / "plan", compiled.plan.world_size, 2, folder / "run")


def test_dicts_in_samples_are_dicts_in_batches(tmp_path: Path) -> None:
    path, found = train_on_dicts(tmp_path, "numbered_dicts", "list(map(make_sample, range(24)))")
    assert list(find_differences(found, train_in_one_process(path, 8, 2, tmp_path / "one"))) == []


def test_samples_of_a_stream_may_hold_dicts(tmp_path: Path) -> None:
    _, found = train_on_dicts(tmp_path, "streamed_dicts", "Stream()")
    assert len(found.losses) == 2


def test_a_key_in_a_dict_that_plans_cannot_name_is_refused() -> None:
    with pytest.raises(UserError, match="a batch has the key 'a b'"):
        default_collate([{"meta": {"a b": torch.zeros(2)}}], ["meta"])


def test_keys_that_could_be_those_of_opened_dicts_are_found() -> None:
    assert find_joined_key({"box": {"size": 1, "corner": {"x": 2}}, 3: 4}) is None
    assert find_joined_key({"box.size": 1}) == "box.size"
    assert find_joined_key({"box": {"corner": {"x.y": 2}}}) == "x.y"
