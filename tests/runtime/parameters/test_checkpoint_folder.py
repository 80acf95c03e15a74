"""Folders of checkpoints stay whole whenever a save is killed, and damaged files are refused by name."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from secc.cli import main
from secc.runtime.errors import UserError
from secc.runtime.parameters.checkpoint import load_full_state_dict, make_manifest
from secc.runtime.parameters.checkpoint_folder import (
    MANIFEST_FILE,
    _digest_fields,  # pyright: ignore[reportPrivateUsage]
    check_folder_is_free,
    find_checkpoint,
    remove_old_checkpoints,
)
from secc.runtime.parameters.checkpoint_writer import SaveFailed, save_checkpoint
from secc.runtime.training.options import parse_options

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SYSTEM_CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync")


class Killed(BaseException):
    """Ends a save as a signal does."""


def save(directory: Path, step: int, value: float, keep: int | None = None, run: str | None = None) -> Path:
    """Saves a model with all weights `value`."""
    model = torch.nn.Linear(4, 2)
    torch.nn.init.constant_(model.weight, value)
    torch.nn.init.constant_(model.bias, value)
    state = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    return save_checkpoint(directory, state, make_manifest(model, step, 0, False, 1, run), keep)


def saved_value(directory: Path) -> float:
    values = torch.cat([t.flatten() for t in load_full_state_dict(directory).values()]).unique()
    assert len(values) == 1, "two saves are mixed"
    return float(values)


def patch_system_calls(monkeypatch: pytest.MonkeyPatch, before: Callable[[str, object], None]) -> None:
    def patch(name: str, call: Callable[..., object]) -> None:
        def patched(*args: Any, **named: Any) -> object:
            before(name, args[0])
            return call(*args, **named)

        monkeypatch.setattr(os, name, patched)

    for name in SYSTEM_CALLS:
        patch(name, getattr(os, name))


@pytest.mark.parametrize("step", [5, 10], ids=["another step", "a step that exists"])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[float] = set()
    for kill_at in range(100):
        directory, left = tmp_path / str(kill_at), kill_at
        save(directory, 10 if step == 10 else 4, 1.0)

        def count_down(_name: str, _path: object) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed

        with monkeypatch.context() as patch:
            patch_system_calls(patch, count_down)
            try:
                save(directory, step, 2.0)
                finished = True
            except (Killed, SaveFailed):
                finished = False
        seen.add(saved_value(directory))
        if step == 10:
            assert find_checkpoint(directory / "step_00000010").manifest.step == 10
        save(directory, 11, 3.0)
        assert saved_value(directory) == 3.0
        assert not [p.name for p in directory.glob("step_*.*")], "leftovers"
        if finished:
            break
    assert finished and kill_at > 8 and seen == {1.0, 2.0}


@pytest.mark.parametrize("limit", [1000, 8000], ids=["before a tensor", "inside a tensor"])
def test_a_disk_that_gets_full_is_named_as_the_cause(limit: int, tmp_path: Path) -> None:
    """Inside a tensor torch raises that its archive is incomplete, and hides the error of the file."""
    model, limits = torch.nn.Linear(64, 64), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(SaveFailed, match="File too large"):
            save_checkpoint(tmp_path, model.state_dict(), make_manifest(model, 1, 0, False, 1, None))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_all_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []

    def note(name: str, target: object) -> None:
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
        events.append((name, Path(path).name))

    with monkeypatch.context() as patch:
        patch_system_calls(patch, note)
        final = save(tmp_path, 5, 1.0)
    renamed = events.index(("rename", "step_00000005.incomplete"))
    synced = {name for call, name in events[:renamed] if call == "fsync"}
    assert synced >= {p.name for p in final.iterdir()} | {"step_00000005.incomplete"}
    rest = [e for e in events[renamed:] if e[0] in ("rename", "replace", "fsync")]
    assert rest == [
        ("rename", "step_00000005.incomplete"),
        ("fsync", tmp_path.name),
        ("fsync", ".latest.tmp"),
        ("replace", ".latest.tmp"),
        ("fsync", tmp_path.name),
    ]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def take_from_another(path: Path) -> None:
    shutil.copy(path.parent.parent / "step_00000005" / path.name, path)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", MANIFEST_FILE])
@pytest.mark.parametrize("damage", [truncate, zero, flip_a_bit, take_from_another, Path.unlink])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(
    damage: Callable[[Path], None], file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 5, 1.0)
    last = save(tmp_path, 10, 2.0)
    save(tmp_path / "other", 10, 3.0)
    before = (last / file).read_bytes()
    damage(last / file)
    if damage is take_from_another and file != "__0_0.distcp" and (last / file).read_bytes() == before:
        return  # the same contents
    if damage is take_from_another and file == MANIFEST_FILE:
        file = "__0_0.distcp"  # of another checkpoint than the manifest
    export = ["export", str(last), "-o", str(tmp_path / "weights.safetensors")]
    with pytest.raises(SystemExit, match="2"):
        main(export)
    message = "".join(capsys.readouterr().err.split())
    assert str(last if file == MANIFEST_FILE and damage is Path.unlink else last / file) in message
    found = find_checkpoint(tmp_path)
    assert found.path.name == "step_00000005" and saved_value(tmp_path) == 1.0
    (note,) = found.notes()
    assert note.startswith(f"note: {last}") and "step_00000005" in note


def test_a_file_that_was_not_written_is_refused(tmp_path: Path) -> None:
    last = save(tmp_path, 5, 1.0)
    shutil.copy(last / "__0_0.distcp", last / "__1_0.distcp")
    with pytest.raises(UserError, match=r"__1_0\.distcp: .*not one of this checkpoint's"):
        find_checkpoint(last)


def test_no_whole_checkpoint_is_an_error_that_names_the_newest(tmp_path: Path) -> None:
    for step in (5, 10):
        truncate(save(tmp_path, step, 1.0) / "__0_0.distcp")
    with pytest.raises(UserError, match=r"step_00000010.*no other checkpoint is whole"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("latest", [None, "", "step_00000099\n", "\0\udcff", "step_00000005\n"])
def test_a_broken_latest_falls_back_to_the_newest_checkpoint(latest: str | None, tmp_path: Path) -> None:
    for step in (5, 10):
        save(tmp_path, step, float(step))
    (tmp_path / "latest").unlink()
    if latest is not None:
        (tmp_path / "latest").write_bytes(latest.encode(errors="surrogateescape"))
    assert find_checkpoint(tmp_path).manifest.step == (5 if latest == "step_00000005\n" else 10)


def test_checkpoints_without_checksums_still_load_with_a_note(tmp_path: Path) -> None:
    last = save(tmp_path, 5, 1.0)
    fields = json.loads((last / MANIFEST_FILE).read_text())
    kept = ("step", "seed", "shuffle", "global_batch", "names", "tied")
    (last / MANIFEST_FILE).write_text(json.dumps({key: fields[key] for key in kept}))
    assert saved_value(tmp_path) == 1.0
    (note,) = find_checkpoint(tmp_path).notes()
    assert "not checked" in note


def test_a_checkpoint_of_a_later_version_is_refused_and_none_before_it_is_taken(tmp_path: Path) -> None:
    save(tmp_path, 5, 1.0)
    last = save(tmp_path, 10, 2.0) / MANIFEST_FILE
    fields = json.loads(last.read_text()) | {"compression": "zstd"}
    del fields["digest"]
    last.write_text(json.dumps(fields | {"digest": _digest_fields(fields)}))
    with pytest.raises(
        UserError, match=r"a later version of secc has written .* it has 'compression'"
    ) as error:
        find_checkpoint(tmp_path)
    assert error.value.where == str(last) and "resume with that version" in error.value.remedy


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    for step in (2, 4, 6, 20):
        save(tmp_path, step, float(step))
    save(tmp_path, 8, 8.0, keep=3)  # the run has gone back behind step 20
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latest",
        "step_00000004",
        "step_00000006",
        "step_00000008",
    ]
    assert saved_value(tmp_path) == 8.0


def test_a_folder_takes_the_checkpoints_of_one_run(tmp_path: Path) -> None:
    save(tmp_path / "one", 5, 1.0, run="a")
    save(tmp_path / "branch", 10, 1.0, run="a")
    save(tmp_path / "other", 5, 1.0, run="b")
    check_folder_is_free(tmp_path / "missing", None)
    check_folder_is_free(tmp_path / "one", find_checkpoint(tmp_path / "one"))
    check_folder_is_free(tmp_path / "one", find_checkpoint(tmp_path / "branch"))
    for resumed in (None, find_checkpoint(tmp_path / "other")):
        with pytest.raises(UserError, match="holds checkpoints of another run, step_00000005"):
            check_folder_is_free(tmp_path / "one", resumed)


def test_every_mth_checkpoint_stays_for_good(tmp_path: Path) -> None:
    for step in range(5, 55, 5):
        save(tmp_path, step, float(step))
    remove_old_checkpoints(tmp_path, 2, keep_every=20)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [
        f"step_{step:08d}" for step in (20, 40, 45, 50)
    ]
    with pytest.raises(UserError, match="--keep-every needs --keep N"):
        parse_options(["--save", "saved", "--keep-every", "20"])
