"""Pipes, devices and folders in the place of files are refused at once."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from secc.cluster.cluster_file import read_cluster_file
from secc.cost.model.measured_costs import read_measured_costs
from secc.driver.what_if import load_before_allocate
from secc.errors import UserError
from secc.ir.text_io.module_text import read_module
from secc.runtime.host.regular_files import read_regular_file
from secc.runtime.monitoring.json_lines import read_lines
from secc.runtime.parameters.checkpoint_folder import find_checkpoint, read_manifest
from secc.runtime.parameters.checkpoint_metadata import read_metadata
from secc.runtime.plan.json_shapes import plain_data
from secc.runtime.plan.plan_file import load_plan


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


PLACES: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "socket": make_socket,
    "loop": lambda path: path.symlink_to(path.name),
}
READERS: dict[str, Callable[[Path], object]] = {
    "plan.json": lambda path: load_plan(path.parent),
    "cluster.yaml": read_cluster_file,
    "costs.json": read_measured_costs,
    "ir.mlir": read_module,
    "times.jsonl": lambda path: list(read_lines(path, plain_data, "")),
    "checkpoint.json": lambda path: read_manifest(path.parent),
    ".metadata": lambda path: read_metadata(path.parent),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", READERS)
def test_only_regular_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    PLACES[place](Path(name))
    with pytest.raises(UserError) as error:
        READERS[name](tmp_path / name)
    assert error.value.where.startswith(str(tmp_path))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("place", PLACES)
def test_a_latest_that_is_no_file_is_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    PLACES[place](Path("latest"))
    with pytest.raises(UserError, match="no checkpoint found"):
        find_checkpoint(tmp_path)


def test_sizes_are_limited(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(json.dumps([1]))
    assert read_regular_file(tmp_path / "file", 3) == b"[1]"
    with pytest.raises(OSError, match="more than 0 MiB"):
        read_regular_file(tmp_path / "file", 2)


@pytest.mark.parametrize("header", ["", "// secc opt -p 'dce'\n", "// secc opt -p 'what{'\n"])
def test_an_ir_without_its_pipeline_is_refused(tmp_path: Path, header: str) -> None:
    (tmp_path / "ir").mkdir()
    for number, name in enumerate(("coarsen", "allocate", "lower")):
        (tmp_path / "ir" / f"{number:02}-{name}.mlir").write_text(f"{header}builtin.module {{}}\n")
    with pytest.raises(UserError, match="pipeline"):
        load_before_allocate(tmp_path)
