"""Copies of a checkpoint in the launcher's memory stand in for files that storage has lost, if whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from secc.runtime.parameters.checkpoint import load_full_state_dict, make_manifest
from secc.runtime.parameters.checkpoint_copies import COPIES_VARIABLE, CopyKeeper, link_copies
from secc.runtime.parameters.checkpoint_folder import FoundCheckpoint, find_checkpoint
from secc.runtime.parameters.checkpoint_writer import CheckpointSaver

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyKeeper]:
    with CopyKeeper(tmp_path / "copies") as made:
        monkeypatch.setenv(COPIES_VARIABLE, str(made.path))
        yield made


def save(directory: Path, step: int) -> None:
    """Saves a model with all weights `step`, with copies."""
    state = {f"model/{name}": torch.full_like(t, step) for name, t in model().state_dict().items()}
    saver = CheckpointSaver()
    saver.start_save(directory, state, make_manifest(model(), step, 0, False, 1), 2, replicates=True)
    saver.finish_save()


def model() -> torch.nn.Module:
    return torch.nn.Linear(4, 2)


def find(directory: Path) -> tuple[FoundCheckpoint, float]:
    found = find_checkpoint(directory, copies=link_copies(directory))
    return found, float(load_full_state_dict(found)["weight"][0, 0])


@pytest.mark.usefixtures("keeper")
def test_copies_are_read_instead_of_lost_files(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    save(saved, 1)
    save(saved, 2)
    for lose in (
        lambda: None,
        lambda: next(saved.glob("*2/*.distcp")).unlink(),
        lambda: shutil.rmtree(saved),
    ):
        lose()
        found, value = find(saved)
        assert found.copies is not None and found.path == saved / "step_00000002" and value == 2
        assert "copies of step_00000002 in this host's memory" in "".join(found.notes())


@pytest.mark.usefixtures("keeper")
def test_damaged_copies_are_not_read(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    save(saved, 3)
    copies = link_copies(saved)
    assert copies is not None
    damaged = next(copies.glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.unlink()
    damaged.write_bytes(content)
    found = find_checkpoint(saved, copies=copies)
    assert found.copies is None and found.path == saved / "step_00000003"
    assert "SHA-256" in found.damaged[0].message


@pytest.mark.usefixtures("keeper")
def test_copies_of_an_older_step_than_the_latest_are_not_preferred(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    save(saved, 1)
    copies = link_copies(saved)
    assert copies is not None
    save(saved, 2)
    shutil.rmtree(saved / "step_00000001")
    assert find_checkpoint(saved, copies=copies).path.name == "step_00000002"


def test_only_the_newest_checkpoint_stays_in_memory(tmp_path: Path, keeper: CopyKeeper) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for step in (5, 6, 7, 7, 3):  # step 7 is saved again, and then the run goes back
        save(tmp_path / "saved", step)
        counts = {len(checkpoint.files) for checkpoint in keeper._kept.values()}
        assert counts == {3}  # data, index, manifest
        assert len(os.listdir("/proc/self/fd")) == before + 3
    copies = link_copies(tmp_path / "saved")
    assert copies is not None and copies.name == "step_00000003"
