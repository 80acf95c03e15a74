"""Ranks hash a checkpoint together: each file is read once, and all ranks come to the same verdict."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from secc.runtime.errors import UserError
from secc.runtime.parameters import checkpoint_folder
from secc.runtime.parameters.checkpoint_folder import (
    CheckpointManifest,
    FileDigest,
    FoundCheckpoint,
    digest_file,
    find_checkpoint,
    publish_checkpoint,
    scratch_path,
    start_checkpoint,
    write_manifest,
)
from secc.runtime.parameters.shared_digests import SharedDigests

SIZES = {"__0_0.distcp": 700, "__1_0.distcp": 400, "__2_0.distcp": 300, ".metadata": 50}


def write_checkpoint(directory: Path, step: int) -> Path:
    start_checkpoint(directory, step)
    for name, size in SIZES.items():
        (scratch_path(directory, step) / name).write_bytes(bytes([step]) * size)
    files = {name: digest_file(scratch_path(directory, step) / name) for name in SIZES}
    write_manifest(directory, CheckpointManifest(step, 0, False, 1, (), {}, files))
    return publish_checkpoint(directory, step)


def find_on_ranks(
    directory: Path, world_size: int, directory_of_last: Path | None = None
) -> list[FoundCheckpoint | UserError]:
    """Returns what each rank finds in `directory`, the last one elsewhere."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    directories = [directory] * (world_size - 1) + [directory_of_last or directory]

    def find(rank: int) -> FoundCheckpoint | UserError:
        try:
            return find_checkpoint(directories[rank], SharedDigests(store, rank, world_size).hash_files)
        except UserError as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(find, range(world_size)))


@pytest.mark.parametrize("world_size", [2, 6])
def test_each_file_is_read_by_one_rank(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, 4)
    read: list[str] = []

    def note(path: Path, sync: bool = False) -> FileDigest:
        read.append(path.name)
        return digest_file(path, sync)

    monkeypatch.setattr(checkpoint_folder, "digest_file", note)
    found = find_on_ranks(tmp_path, world_size)
    assert [f.manifest.step for f in found if isinstance(f, FoundCheckpoint)] == [4] * world_size
    assert sorted(read) == sorted(SIZES)


def test_all_ranks_take_the_checkpoint_before_a_damaged_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 4)
    damaged = write_checkpoint(tmp_path, 5) / "__2_0.distcp"
    damaged.write_bytes(b"x" * SIZES[damaged.name])
    found = find_on_ranks(tmp_path, 3)
    assert {f.manifest.step for f in found if isinstance(f, FoundCheckpoint)} == {4}
    assert len({str(f.damaged) for f in found if isinstance(f, FoundCheckpoint)}) == 1
    errors = {str(e) for e in find_on_ranks(damaged.parent, 3)}
    assert len(errors) == 1 and f"{damaged}: damaged checkpoint: SHA-256" in errors.pop()


def test_ranks_that_see_other_checkpoints_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """A run saves one while ranks of another process look for the newest."""
    for step in (4, 5):
        write_checkpoint(tmp_path / "later", step)
    write_checkpoint(tmp_path / "before", 4)
    errors = find_on_ranks(tmp_path / "before", 3, tmp_path / "later")
    assert all("its checkpoints change: rank " in str(error) for error in errors)
