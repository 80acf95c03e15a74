"""A folder of checkpoints on disk: written durably, described by manifests, checked before anything is read.

    DIR/step_00000005/              a checkpoint: data files and checkpoint.json, its manifest
    DIR/step_00000005.incomplete/   one that is being written
    DIR/step_00000005.new/, .old/   the two whole ones of a step that is saved again, until they have swapped
    DIR/step_00000005.removed/      one that is being deleted
    DIR/latest                      the name of the newest complete checkpoint

Files and folders are synced before the rename that publishes them, so neither a killed process nor a lost
machine leaves a folder without the checkpoint that was there. A manifest has the size and SHA-256 of every
other file, and a digest of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

from secc.runtime.errors import UserError
from secc.runtime.host.regular_files import open_regular_file, read_regular_file

LATEST_FILE = "latest"
MANIFEST_FILE = "checkpoint.json"
_MAX_MANIFEST_BYTES = 1 << 28
_INCOMPLETE, _NEW, _OLD, _REMOVED = ".incomplete", ".new", ".old", ".removed"
_CHECKPOINT_NAME = re.compile(r"step_(\d{8,})(\.new|\.old)?")
_NO_CHECKPOINT_REMEDY = "give a directory that a run with --save has written"
_DAMAGE_REMEDY = "take another checkpoint of the run; a directory of checkpoints names the newest whole one"


class CheckpointRefused(UserError):
    """A checkpoint that cannot be taken although it is not damaged: none before it is taken in its place."""


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and SHA-256 of a file, in hexadecimal digits."""

    size: int
    sha256: str


@dataclass(frozen=True)
class CheckpointManifest:
    """Metadata of a checkpoint. `names` are the keys of the state dict in its order; `tied` maps a name to
    the name that its tensor is stored under; `files` are the data files by name; `run` is the same for all
    checkpoints of a run; `plan` is the directory of the plan that wrote the checkpoint; `settings` are those
    that a resumed run is compared with; `data` says where the run is in streams and mixtures, None for a
    map-style dataset. Older checkpoints lack some of the last five."""

    step: int
    seed: int
    shuffle: bool
    global_batch: int
    names: tuple[str, ...]
    tied: dict[str, str]
    files: dict[str, FileDigest] | None = None
    run: str | None = None
    plan: str | None = None
    settings: dict[str, str] | None = None
    data: dict[str, Any] | None = None


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint to read. `damaged` says what is wrong with those that would have been taken before it.
    `copies`: the folder with links to copies of its files, if they are read instead."""

    path: Path
    manifest: CheckpointManifest
    damaged: tuple[UserError, ...] = ()
    copies: Path | None = None

    @property
    def files(self) -> Path:
        """The folder that its files are read from."""
        return self.copies or self.path

    def notes(self) -> Iterator[str]:
        """Yields what a user should know about the choice, a line each."""
        for error in self.damaged:
            yield f"note: {error.where}: {error.message}; taking {self.path.name} instead"
        if self.copies is not None:
            yield f"reading copies of {self.path.name} in memory"
        if self.manifest.files is None:
            yield f"note: {self.path}: written before checkpoints had checksums, so its files are not checked"


def start_checkpoint(directory: Path, step: int) -> None:
    """Makes the empty folder that a checkpoint is written into, and tidies what killed runs left behind."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(directory.glob("step_*.*")):
        whole = path.with_suffix("")
        if path.suffix in (_NEW, _OLD) and not whole.exists():
            os.rename(path, whole)
        elif path.suffix in (_INCOMPLETE, _NEW, _OLD, _REMOVED):
            shutil.rmtree(path)
    scratch_path(directory, step).mkdir()


def scratch_path(directory: Path, step: int) -> Path:
    """Returns the folder that a checkpoint is written into."""
    return directory / f"step_{step:08d}{_INCOMPLETE}"


def write_manifest(directory: Path, manifest: CheckpointManifest) -> Path:
    """Writes the manifest of a checkpoint that is not published yet. Returns its path."""
    path = scratch_path(directory, manifest.step) / MANIFEST_FILE
    _write_synced(path, _encode_manifest(manifest))
    return path


def publish_checkpoint(directory: Path, step: int) -> Path:
    """Gives the written checkpoint, which has its manifest, its name, and points `latest` to it. Returns its
    path.

    At every moment the folder holds a whole checkpoint, even if the step was saved before.
    """
    scratch = scratch_path(directory, step)
    final, new, old = (scratch.with_suffix(suffix) for suffix in ("", _NEW, _OLD))
    _sync(scratch)
    if final.exists():
        os.rename(scratch, new)
        os.rename(final, old)
        os.rename(new, final)
        _sync(directory)
        shutil.rmtree(old)
    else:
        os.rename(scratch, final)
        _sync(directory)
    pointer = directory / f".{LATEST_FILE}.tmp"
    _write_synced(pointer, final.name + "\n")
    os.replace(pointer, directory / LATEST_FILE)
    _sync(directory)
    return final


def remove_old_checkpoints(directory: Path, keep: int, keep_every: int | None = None) -> None:
    """Deletes all but the newest `keep` checkpoints and those of every `keep_every`-th step; those that a run
    has gone back behind are the oldest."""
    for path in _checkpoints_by_preference(directory)[keep:]:
        match = _CHECKPOINT_NAME.fullmatch(path.name)
        if keep_every is not None and match is not None and int(match[1]) % keep_every == 0:
            continue
        removed = path.with_suffix(_REMOVED)
        os.rename(path, removed)
        shutil.rmtree(removed)


def has_checkpoints(directory: Path) -> bool:
    """Tells whether a folder holds a checkpoint, whole or damaged."""
    return bool(_checkpoints_by_preference(directory))


def check_folder_is_free(directory: Path, resumed: FoundCheckpoint | None) -> None:
    """Raises UserError if a folder to save in holds checkpoints of another run than the resumed one."""
    if resumed is not None and resumed.path.parent.resolve() == directory.resolve():
        return
    for path in _checkpoints_by_preference(directory):
        run = resumed.manifest.run if resumed is not None else None
        if run is None or read_manifest(path).run != run:
            message = f"the directory holds checkpoints of another run, {path.name} for one"
            remedy = "continue that run with --resume auto, or give another --save"
            raise UserError(message, str(directory), remedy)


def digest_file(path: Path, sync: bool = False) -> FileDigest:
    """Reads a file for its size and SHA-256; with `sync`, its contents are on the disk afterwards."""
    with open_regular_file(path) as file:
        if sync:
            os.fsync(file.fileno())
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(file.tell(), sha256)


def hash_files(checkpoint: Path, files: Mapping[str, FileDigest]) -> dict[str, str]:
    """Returns the SHA-256 of each of these files of a checkpoint, and the cause in words for one that cannot
    be read."""
    found: dict[str, str] = {}
    for name in files:
        try:
            found[name] = digest_file(checkpoint / name).sha256
        except OSError as error:
            found[name] = error.strerror or str(error)
    return found


# Hashes files as `hash_files` does, perhaps together with others.
HashFiles = Callable[[Path, Mapping[str, FileDigest]], dict[str, str]]


def find_checkpoint(
    directory: Path, hashes: HashFiles = hash_files, copies: Path | None = None
) -> FoundCheckpoint:
    """Returns `directory` if it is a checkpoint, else the latest whole checkpoint in it; its files have been
    checked, hashed by `hashes`. `copies`: a folder of copies of one of its checkpoints, which are read
    instead if they are whole.

    Raises UserError if there is none, or if a file of the checkpoint `directory` is damaged, and
    CheckpointRefused.
    """
    if (directory / MANIFEST_FILE).exists():
        return FoundCheckpoint(directory, check_checkpoint(directory, hashes))
    damaged: list[UserError] = []
    for files in _with_copies(_checkpoints_by_preference(directory), copies, _read_latest(directory)):
        try:
            manifest = check_checkpoint(files, hashes)
            return FoundCheckpoint(
                directory / files.name, manifest, tuple(damaged), copies if files == copies else None
            )
        except CheckpointRefused:
            raise
        except UserError as error:
            damaged.append(error)
    if damaged:
        remedy = "restore one of the checkpoints, or give another --save to start from the beginning"
        raise UserError(f"{damaged[0].message}; no other checkpoint is whole", damaged[0].where, remedy)
    raise UserError("no checkpoint found", str(directory), _NO_CHECKPOINT_REMEDY)


def check_checkpoint(checkpoint: Path, hashes: HashFiles = hash_files) -> CheckpointManifest:
    """Returns the manifest of a checkpoint. Raises UserError for the first file that is missing or not
    the one that was written."""
    manifest = read_manifest(checkpoint)
    if manifest.files is None:
        return manifest
    for name, expected in manifest.files.items():
        try:
            size = (checkpoint / name).stat().st_size
        except OSError as error:
            message = f"damaged checkpoint: {error.strerror}"
            raise UserError(message, str(checkpoint / name), _DAMAGE_REMEDY) from None
        _compare_file(checkpoint / name, "bytes", expected.size, size)
    for path in sorted(checkpoint.glob("*.distcp")):
        if path.name not in manifest.files:
            message = "damaged checkpoint: the file is not one of this checkpoint's"
            raise UserError(message, str(path), _DAMAGE_REMEDY)
    found = hashes(checkpoint, manifest.files)
    for name, expected in manifest.files.items():
        _compare_file(checkpoint / name, "SHA-256", expected.sha256, found[name])
    return manifest


def _compare_file(path: Path, quantity: str, expected: object, found: object) -> None:
    """Raises UserError if the file's `quantity` is another than expected."""
    if found != expected:
        message = f"damaged checkpoint: {quantity} of the file: {expected} were written, {found} found"
        raise UserError(message, str(path), _DAMAGE_REMEDY)


def read_manifest(checkpoint: Path) -> CheckpointManifest:
    """Reads the manifest of a checkpoint. Raises UserError if it is missing or malformed, and
    CheckpointRefused if a later version of secc has written it."""
    path = checkpoint / MANIFEST_FILE
    try:
        return _decode_manifest(read_regular_file(path, _MAX_MANIFEST_BYTES).decode(), str(path))
    except OSError as error:
        message = f"not a checkpoint: {error.strerror}"
        raise UserError(message, str(checkpoint), _NO_CHECKPOINT_REMEDY) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        message = f"damaged checkpoint: the manifest cannot be read: {error}"
        raise UserError(message, str(path), _DAMAGE_REMEDY) from None


def _encode_manifest(manifest: CheckpointManifest) -> str:
    fields = asdict(manifest)
    return json.dumps(fields | {"digest": _digest_fields(fields)}, indent=1)


def _decode_manifest(text: str, where: str) -> CheckpointManifest:
    """Raises ValueError, TypeError, KeyError or AttributeError for text that is no manifest, and
    CheckpointRefused."""
    fields: dict[str, Any] = json.loads(text)
    digest = fields.pop("digest", None)
    if (digest is not None or "files" in fields) and digest != _digest_fields(fields):
        raise ValueError("its digest is of other contents")
    if unknown := fields.keys() - {field.name for field in dataclass_fields(CheckpointManifest)}:
        message = f"a later version of secc has written the checkpoint: it has {min(unknown)!a}"
        raise CheckpointRefused(message, where, "resume with that version of secc")
    files: dict[str, Any] | None = fields.pop("files", None)
    for name in files or ():
        if Path(name).name != name:
            raise ValueError(f"{name!r} is not a file name")
    fields["names"] = tuple(fields["names"])
    if not isinstance(fields.get("plan"), str | None):
        raise ValueError("its plan is no path")
    digests = None if files is None else {name: FileDigest(**file) for name, file in files.items()}
    return CheckpointManifest(**fields, files=digests)


def _digest_fields(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _checkpoints_by_preference(directory: Path) -> list[Path]:
    """Returns the checkpoints in a folder: the latest, those before it from the newest on, then those after
    it, which a run that went back to an earlier step has left.

    If `directory` itself was a checkpoint that is being replaced, returns the two that swap.
    """
    if not directory.is_dir():
        swapping = (directory.with_name(directory.name + suffix) for suffix in (_NEW, _OLD))
        return [path for path in swapping if path.is_dir()]
    found = [
        (int(match[1]), (_OLD, None, _NEW).index(match[2]), path)
        for path in directory.iterdir()
        if (match := _CHECKPOINT_NAME.fullmatch(path.name)) and path.is_dir()
    ]
    latest = _read_latest(directory)
    found.sort(key=lambda entry: (latest is None or entry[0] <= latest, *entry), reverse=True)
    return [path for _, _, path in found]


def _with_copies(checkpoints: list[Path], copies: Path | None, latest: int | None) -> list[Path]:
    """Returns the checkpoints with the copies of one of them before it, or first if storage has lost it."""
    if copies is None:
        return checkpoints
    at = next((i for i, path in enumerate(checkpoints) if path.name == copies.name), None)
    if at is None:
        match = _CHECKPOINT_NAME.fullmatch(copies.name)
        is_older = match is not None and latest is not None and int(match[1]) < latest
        at = len(checkpoints) if is_older else 0
    return [*checkpoints[:at], copies, *checkpoints[at:]]


def _read_latest(directory: Path) -> int | None:
    """Returns the step that `latest` names; None if it is missing or names none."""
    try:
        name = read_regular_file(directory / LATEST_FILE, _MAX_MANIFEST_BYTES).decode()
        match = _CHECKPOINT_NAME.fullmatch(name.strip())
    except (OSError, ValueError):
        return None
    return int(match[1]) if match else None


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Makes the entries of a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
