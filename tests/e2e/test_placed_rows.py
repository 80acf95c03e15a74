"""Rows of images that go to the places of a mask, in the order of the batch: a sample with another number of
places than of rows would shift the rows of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from secc.runtime.data.sample_metadata import RecordCodec, find_placed_rows
from secc.runtime.sections.base import load_plan_module

MODEL = """
import torch
from torch import nn

IMAGE, ODD = 1, ODD_SAMPLES


class Merge(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)

    def forward(self, ids, seen):
        x = self.embed(ids)
        if seen is not None:
            PLACE_ROWS
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.merge, self.head = nn.Linear(6, 8), Merge(), nn.Linear(8, 30)

    def forward(self, ids, labels, images=None):
        x = self.merge(ids, images if images is None else self.tower(images))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def model():
    return Model()


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(2, 30, (6 + i % 5,), generator=g)
        ids[: i * 7 % 4] = IMAGE
        sample = {"ids": ids, "labels": ids.clone()}
        rows = i * 7 % 4 + ODD.get(i, 0)
        return sample | ({"images": torch.randn(rows, 6, generator=g)} if rows else {})


def dataset():
    return Samples()
"""
WAYS = (
    "x = x.masked_scatter((ids == IMAGE)[..., None].expand_as(x), seen)",
    "x = x.clone(); x[ids == IMAGE] = seen",
)


def write_model(tmp_path: Path, way: str, odd: dict[int, int]) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("PLACE_ROWS", way).replace("ODD_SAMPLES", repr(odd)))
    return path


@pytest.mark.parametrize("way", WAYS)
def test_a_later_sample_with_other_numbers_of_places_and_rows_is_refused(way: str, tmp_path: Path) -> None:
    # Together the two samples have as many places as rows, so plain PyTorch computes something for them.
    compiled = compile_model(
        write_model(tmp_path, way, {302: 1, 301: -1}), CompileOptions(cluster="local:2", global_batch=4)
    )
    compiled.write_sections(tmp_path / "plan")
    placed = find_placed_rows(load_plan_module(tmp_path / "plan" / "sections" / "terms.py"))
    codec = RecordCodec(compiled.plan, {}, placed_rows=placed)
    for sample, (places, rows) in {302: (2, 3), 301: (3, 2)}.items():
        batch = compiled.user.collate([compiled.user.dataset()[sample]])
        with pytest.raises(UserError, match=f"{places} places for the sample's {rows} rows") as error:
            codec.make_record(sample, batch)
        assert f"dataset()[{sample}]" in error.value.message and error.value.where == "model.py:16"
    codec.make_record(303, compiled.user.collate([compiled.user.dataset()[303]]))


def test_tokens_of_an_image_that_is_missing_are_refused(tmp_path: Path) -> None:
    # In a batch with images the tokens would get those of another sample.
    compiled = compile_model(
        write_model(tmp_path, WAYS[0], {303: -1}), CompileOptions(cluster="local:2", global_batch=4)
    )
    compiled.write_sections(tmp_path / "plan")
    placed = find_placed_rows(load_plan_module(tmp_path / "plan" / "sections" / "terms.py"))
    batch = compiled.user.collate([compiled.user.dataset()[303]])
    with pytest.raises(UserError, match="1 places for the sample's 0 rows"):
        RecordCodec(compiled.plan, {}, placed_rows=placed).make_record(303, batch)


def test_a_drawn_sample_with_other_numbers_is_named_at_compile_time(tmp_path: Path) -> None:
    path = write_model(tmp_path, WAYS[0], {6: 1})
    with pytest.raises(UserError, match=r"dataset\(\)\[6\].* 2 places for the sample's 3 rows"):
        check_exactness(compile_model(path, CompileOptions(cluster="local:2", global_batch=4)))


def test_rows_of_a_modality_that_no_sample_has_are_exact(tmp_path: Path) -> None:
    path = write_model(tmp_path, WAYS[0], {})
    absent = "mask = ids == 30\n        normed = nn.functional.layer_norm(x[mask], (8,))\n"
    absent += "        return x.masked_scatter(mask[..., None], normed)"
    path.write_text(path.read_text().replace("return x\n\n\nclass Model", absent + "\n\n\nclass Model"))
    check_exactness(compile_model(path, CompileOptions(cluster="local:2", global_batch=4)), required=True)
