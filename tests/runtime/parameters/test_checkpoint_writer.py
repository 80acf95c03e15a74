"""Checkpoints in the background hold what the step left, and a lost writer process loses one of them only."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from secc.runtime.host.memory import available_memory
from secc.runtime.parameters import sliced_tensor_store
from secc.runtime.parameters.checkpoint import load_full_state_dict, make_manifest
from secc.runtime.parameters.checkpoint_folder import find_checkpoint
from secc.runtime.parameters.checkpoint_writer import BackgroundWriter, CheckpointSaver
from tests.runtime.captioner_plans import UNEVEN, write_plan
from tests.runtime.parameters.test_checkpoint import assert_same_contents
from tests.runtime.train_captioner import train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def writer() -> Iterator[BackgroundWriter]:
    made = BackgroundWriter()
    yield made
    made.close()


def start_save(
    saver: CheckpointSaver, directory: Path, step: int, size: int = 4, in_background: bool = True
) -> torch.nn.Module:
    """Starts to save a model with weights of the value `step`, and then changes them."""
    model = torch.nn.Linear(size, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
        state: dict[str, Any] = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
        state |= {"scheduler/0": {"last_epoch": step}, "optimizer/weight/step": torch.tensor(float(step))}
        manifest = make_manifest(model, step, 0, False, 1)
        saver.start_save(directory, state, manifest, keep=2, in_background=in_background)
        for parameter in model.parameters():
            parameter.fill_(-1)
    return model


def kill_writer(writer: BackgroundWriter) -> None:
    (process,) = writer._pool._processes.values()
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def test_what_is_written_is_the_copy(tmp_path: Path, writer: BackgroundWriter) -> None:
    saver = CheckpointSaver(writer)
    for step, size in ((1, 4), (2, 50_000), (3, 6)):  # the shared memory grows, and is used again
        start_save(saver, tmp_path, step, size)
        finished = saver.finish_save()
        assert finished is not None and not finished.failure
        assert all((t == step).all() for t in load_full_state_dict(finished.path).values())
        target: dict[str, Any] = {"scheduler/0": None, "optimizer/weight/step": torch.tensor(0.0)}
        sliced_tensor_store.read_entries(finished.path, target, alone=True)
        assert target == {"scheduler/0": {"last_epoch": step}, "optimizer/weight/step": torch.tensor(step)}
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_00000002", "step_00000003"]


def test_the_stages_of_a_save_end_without_waiting(tmp_path: Path, writer: BackgroundWriter) -> None:
    saver = CheckpointSaver(writer)
    assert not saver.is_stage_done()
    start_save(saver, tmp_path, 1)
    finished = None
    while finished is None:
        if saver.is_stage_done():
            finished = saver.end_stage()
    assert find_checkpoint(tmp_path).manifest.step == 1 and not saver.is_stage_done()


def test_a_lost_writer_costs_one_checkpoint(tmp_path: Path, writer: BackgroundWriter) -> None:
    saver = CheckpointSaver(writer)
    start_save(saver, tmp_path, 1)
    saver.finish_save()
    kill_writer(writer)
    start_save(saver, tmp_path, 2)
    finished = saver.finish_save()
    assert (
        finished is not None and "secc-writer" in finished.failure and "within the step" in finished.failure
    )
    assert find_checkpoint(tmp_path).manifest.step == 1 and not list(tmp_path.glob("*.incomplete"))
    start_save(saver, tmp_path, 3)
    assert saver.is_stage_done()
    finished = saver.finish_save()
    assert finished is not None and not finished.failure
    assert find_checkpoint(tmp_path).manifest.step == 3


def test_a_full_disk_is_a_failure_with_its_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    writer = BackgroundWriter()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    saver = CheckpointSaver(writer)
    start_save(saver, tmp_path, 1, 5000)
    finished = saver.finish_save()
    writer.close()
    assert finished is not None and "File too large" in finished.failure
    assert not list(tmp_path.glob("step_*"))


@pytest.mark.parametrize("in_background", [True, False])
def test_a_folder_in_the_place_of_latest_is_named(
    tmp_path: Path, writer: BackgroundWriter, in_background: bool
) -> None:
    (tmp_path / "latest").mkdir()
    saver = CheckpointSaver(writer)
    start_save(saver, tmp_path, 1, in_background=in_background)
    finished = saver.finish_save()
    assert finished is not None and finished.failure == f"Is a directory: {tmp_path}/latest"
    assert finished.remedy == "remove that folder"
    (tmp_path / "latest").rmdir()
    start_save(saver, tmp_path, 2)
    finished = saver.finish_save()
    assert finished is not None and not finished.failure
    assert find_checkpoint(tmp_path).manifest.step == 2


def test_a_save_within_the_step_needs_no_writer(tmp_path: Path, writer: BackgroundWriter) -> None:
    saver = CheckpointSaver(writer)
    start_save(saver, tmp_path, 1, in_background=False)
    kill_writer(writer)
    finished = saver.finish_save()
    assert finished is not None and not finished.failure
    assert find_checkpoint(tmp_path).manifest.step == 1


def test_too_little_memory_for_a_copy_saves_within_the_step(
    tmp_path: Path,
    writer: BackgroundWriter,
    capfd: pytest.CaptureFixture[str],
) -> None:
    writer.has_room = lambda state: False
    saver = CheckpointSaver(writer)
    start_save(saver, tmp_path, 1)
    saver.finish_save()
    assert find_checkpoint(tmp_path).manifest.step == 1
    assert "too little memory for a copy" in capfd.readouterr().err


def test_available_memory_is_the_least_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 8 kB\n")
    assert available_memory(tmp_path, tmp_path) == 8192
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert available_memory(tmp_path, tmp_path) == 8192
    (tmp_path / "memory.max").write_text("5000\n")
    assert available_memory(tmp_path, tmp_path) == 4900


@pytest.mark.gloo
def test_checkpoints_of_ranks_are_the_same_in_the_background(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan", UNEVEN)
    for option in ("--save-async", "--no-save-async"):
        saved, logs = tmp_path / option, tmp_path / f"logs{option}"
        arguments = ["--save", str(saved), "--save-every", "1", "--log-dir", str(logs), "--shuffle"]
        train(tmp_path / "plan", UNEVEN, 3, option, *arguments)
    for step in (1, 2, 3):
        assert_same_contents(
            *(tmp_path / o / f"step_{step:08d}" for o in ("--save-async", "--no-save-async"))
        )
