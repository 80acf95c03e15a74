"""Private folders: those of killed processes are removed, those of living ones stay."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from secc.runtime.host.private_folder import hold_private_folder


def test_the_next_start_removes_what_a_killed_process_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "secc-run-other").mkdir()  # without a file that names its owner
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        with hold_private_folder() as held:
            (held / "store_0").touch()
            os.write(write, held.name.encode())
            signal.pause()
    abandoned = tmp_path / os.read(read, 100).decode()
    with hold_private_folder() as own:
        assert abandoned.exists() and own.stat().st_mode & 0o777 == 0o700
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert (abandoned / "store_0").exists()
    with hold_private_folder():
        assert not abandoned.exists()
    assert [p.name for p in tmp_path.iterdir()] == ["secc-run-other"]
