"""Locks of folders: one holder at a time, free when the holder is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from secc.runtime.errors import UserError
from secc.runtime.host import folder_lock
from secc.runtime.host.folder_lock import hold_lock


def take(folder: Path) -> None:
    with hold_lock(folder / ".lock", folder, "another run is here", "wait for it"):
        assert (folder / ".lock").exists()


def start_holder(folder: Path, after: Callable[[], None] = lambda: None) -> int:
    """Starts a process that holds the lock until it is killed; returns its id."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        with hold_lock(folder / ".lock", folder, "another run is here", "wait for it"):
            after()
            os.write(write, b"1")
            signal.pause()
        os._exit(0)
    os.read(read, 1)
    return process


def test_a_second_holder_is_refused_until_the_first_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "_WAIT_S", 0.1)
    process = start_holder(tmp_path)
    with pytest.raises(UserError, match=f"another run is here .process {process} on ") as error:
        take(tmp_path)
    assert error.value.where == str(tmp_path) and error.value.remedy == "wait for it"
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    take(tmp_path)
    assert not (tmp_path / ".lock").exists()


def test_a_removed_lock_file_is_no_lock(tmp_path: Path) -> None:
    process = start_holder(tmp_path, after=(tmp_path / ".lock").unlink)
    take(tmp_path)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def test_a_folder_without_locks_is_used_without(tmp_path: Path) -> None:
    with hold_lock(tmp_path / "missing" / ".lock", tmp_path, "", ""):
        pass


def test_a_lock_in_a_folder_that_cannot_be_written_any_more_ends_quietly(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    with hold_lock(folder / ".lock", folder, "", ""):
        folder.rename(tmp_path / "moved")
        folder.write_text("a file in its place")
    take(tmp_path / "moved")
