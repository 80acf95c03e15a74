"""What differs from process to process and reaches the loss is refused when a plan is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError

MODEL = """
import functools
import os
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

{above}


class Warped(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.line(x)) * {inside}


class Warping(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = Warped(), nn.Linear(6, 4)

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.body(x)), y) * {between}


def model():
    torch.manual_seed(0)
    return Warping()


class Rows:
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.rows = [
            {{"x": torch.randn(6, generator=g), "y": torch.randint(0, 4, (), generator=g)}} for _ in range(24)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {{**self.rows[i], "x": self.rows[i]["x"] * {loaded}}}


def dataset():
    return Rows()


def collate(samples):
    x = torch.stack([s["x"] for s in samples])
    return {{"x": x * {collated}, "y": torch.stack([s["y"] for s in samples])}}
"""

CACHED = "@functools.lru_cache\ndef factor():\n    return {}"
FIRST = """
SEEN = []


@functools.cache
def factor():
    return float(SEEN[0].std())


def divisor(x):
    SEEN.append(x)
    return factor()
"""


def check_model(folder: Path, above: str = "", **factors: str) -> None:
    path = folder / "warping.py"
    given = {"inside": "1", "between": "1", "loaded": "1", "collated": "1", **factors}
    path.write_text(MODEL.format(above=above, **given))
    check_exactness(compile_model(path, CompileOptions(cluster="local:2", global_batch=8)), required=True)


@pytest.mark.parametrize(
    ("value", "name", "place"),
    [
        ("1 + os.getpid() % 97", r"os\.getpid\(\)", "inside"),
        ("1 + os.getpid() % 97", r"os\.getpid\(\)", "collated"),
        ("1 + int(os.getenv('LOCAL_RANK', '0'))", r"os\.environ", "inside"),
        ("1 + hash('warp') % 997 / 997", "the hash of a text", "collated"),
        ("1 + np.random.rand()", "a random number", "inside"),
    ],
)
def test_a_cached_value_of_one_process_that_reaches_the_loss_is_refused(
    value: str, name: str, place: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"the loss depends on {name}.* from process to process") as refused:
        check_model(tmp_path, CACHED.format(value), **{place: "factor()"})
    assert "warping.py" in refused.value.where and "constant" in refused.value.remedy


@pytest.mark.parametrize(
    ("above", "inside"),
    [("", "(1 + int(os.environ.get('RANK', 0)))"), ("FACTOR = 1 + int(os.environ.get('RANK', 0))", "FACTOR")],
)
def test_a_rank_that_code_reads_without_a_cache_is_refused(above: str, inside: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"os\.environ, which differs from process to process") as refused:
        check_model(tmp_path, above, inside=inside)
    assert "warping.py:" in refused.value.where


def test_random_numbers_that_an_import_draws_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a random number that an import"):
        check_model(tmp_path, "FACTOR = 1 + random.random()", inside="FACTOR")


def test_a_value_of_one_process_in_a_file_that_the_model_file_imports_is_refused(tmp_path: Path) -> None:
    (tmp_path / "warp_factors.py").write_text(f"import functools, os\n{CACHED.format('1 + os.getpid()')}\n")
    with pytest.raises(UserError, match=r"os\.getpid\(\)") as refused:
        check_model(tmp_path, "import warp_factors", inside="warp_factors.factor()")
    assert "warp_factors.py:4" in refused.value.where


def test_items_of_a_dataset_that_differ_from_process_to_process_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"what dataset\(\) returns for a sample depends on os\.getpid\(\)"):
        check_model(tmp_path, CACHED.format("1 + os.getpid() % 97"), loaded="factor()")


@pytest.mark.parametrize(
    ("above", "factors"),
    [
        (CACHED.format("2.0"), {"inside": "factor()", "collated": "factor()"}),
        ("START = time.time(), os.getpid(), random.random()", {}),
        ("SIZE = int(os.environ.get('WARP_SIZE', 2))", {"inside": "SIZE", "loaded": "SIZE"}),
        ("", {"loaded": "random.random()"}),  # seeded for each sample
        ("", {"collated": "(1 + int(os.environ.get('RANK', 0)))"}),  # ranks are hidden there
        ("", {"inside": "(2 if torch.distributed.is_initialized() else 1)"}),  # and the group in a step
        ("", {"between": "(1 + int(os.environ.get('RANK', 0)))"}),  # the plan holds the value
    ],
)
def test_what_is_equal_in_all_processes_or_read_by_nothing_is_accepted(
    above: str, factors: dict[str, str], tmp_path: Path
) -> None:
    check_model(tmp_path, above, **factors)


@pytest.mark.parametrize("place", ["inside", "collated"])
def test_a_cache_that_keeps_a_value_of_the_first_batch_is_refused(place: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"keeps .* from one call to the next"):
        check_model(tmp_path, FIRST, **{place: "divisor(x)"})


def test_a_table_that_the_first_batch_fills_in_collate_is_refused(tmp_path: Path) -> None:
    above = "KEPT = {}"
    with pytest.raises(UserError, match=r"collate\(\) keeps the global KEPT\['std'\]") as refused:
        check_model(tmp_path, above, collated="KEPT.setdefault('std', x.std())")
    assert "warping.py:" in refused.value.where
