"""Mutated files are taken or refused in a message that names them, and a few that were hard on readers."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from secc.cluster.cluster_file import read_cluster_file
from secc.cost.model.measured_costs import read_measured_costs
from secc.errors import UserError
from secc.ir.text_io.module_text import parse_module, read_module
from secc.runtime.model.safetensors_reader import list_stored_tensors
from tools.mutate_files import COSTS, file_formats, mutate, run_mutations


def test_mutated_files_are_taken_or_refused(root: Path) -> None:
    plan_json = (root / "tests/codegen/golden/plan.json.golden").read_bytes()
    ir = (root / "tests/codegen/llava.mlir").read_bytes()
    outcomes, faults = run_mutations(file_formats(plan_json, ir), 350)
    assert not faults
    assert all(counted["refused"] for counted in outcomes.values())


def test_a_seed_repeats_its_file() -> None:
    content = json.dumps(COSTS).encode()
    first, again = ([mutate(content, random.Random(seed)) for seed in range(2000)] for _ in range(2))
    assert first == again


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_text_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "huge.mlir").open("wb") as file:
        file.truncate(1 << 34)
    with pytest.raises(UserError, match="it has more than 64 MiB"):
        read_module(tmp_path / "huge.mlir")


def test_a_text_that_does_not_end_is_refused_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(UserError, match="cannot read the IR") as error:
        parse_module('builtin.module attributes {x = "' + "a" * 100_000)
    assert time.monotonic() - started < 5 and len(str(error.value)) < 2000


def test_a_number_that_its_type_does_not_hold_is_refused() -> None:
    with pytest.raises(UserError, match="out of range for type i6"):
        parse_module("builtin.module attributes {x = 23040 : i6} {}", "wide.mlir")


BOMB = "a: &a [x, x]\n" + "".join(
    f"{c}: &{c} [*{b}, *{b}, *{b}]\n" for b, c in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [BOMB, "[" * 100_000, "nodes: " + "9" * 10_000, "nodes: 2020-13-45", "devices: 1e201", "\0", "- " * 9000],
)
def test_clusters_that_are_too_much(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read_cluster_file(write(tmp_path / "cluster.yaml", text))
    assert len(str(error.value)) < 1000 and str(tmp_path) in str(error.value)


def change_price(costs: dict[str, object], value: float) -> None:
    costs["blocks"]["0123456789abcdef"]["forward"]["values"][1] = value  # pyright: ignore


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e201, -1.0, "1", None])
def test_costs_without_a_meaning(value: float, tmp_path: Path) -> None:
    costs = json.loads(json.dumps(COSTS))
    read_measured_costs(write(tmp_path / "costs.json", json.dumps(costs)))
    change_price(costs, value)
    with pytest.raises(UserError, match=r"forward\.values\[1\]: expected a number"):
        read_measured_costs(write(tmp_path / "costs.json", json.dumps(costs)))


@pytest.mark.parametrize("name", ["../w.safetensors", "/etc/passwd", "..", "", 3, ["w"]])
def test_an_index_names_files_next_to_it(name: object, tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors.index.json", json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="not an index of safetensors files"):
        list_stored_tensors(tmp_path)
