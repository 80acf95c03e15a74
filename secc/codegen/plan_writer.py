"""Writes a plan directory such that it holds a whole plan at every moment, the old one or the new one.

A plan is written into a folder next to the directory, and both are exchanged in one step of the file system.
Files of the old plan that the compiler wrote (`COMPILED_FILES` lists them) are deleted, all others move into
the new one: logs, checkpoints, notes. The next compilation removes what a killed one has left
next to the directory.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from secc.errors import UserError
from secc.runtime.host.folder_lock import hold_lock
from secc.runtime.plan.compiled_files import COMPILED_FILES, read_compiled_files

_EXECUTABLE = ("launch.sh", "slurm.sbatch")
_KEPT = ".before"  # the suffix of a file that stood where the compiler writes one
# What compilers wrote that made no list.
_UNLISTED_FILES = ("plan.json", "model.py.txt", "report.html", "trace.json", "run.py", *_EXECUTABLE)
_UNLISTED_FOLDERS = ("ir", "sections", "ranks", "imports")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux' renameat2
_reserved: set[Path] = set()  # directories that this process has locked


def check_output(directory: Path) -> None:
    """Refuses early, before minutes of work, an output that could not be written. Raises UserError."""
    if directory.is_file():
        raise UserError("the output is a file, not a directory", str(directory), "choose another -o")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / "plan.json").exists():
        raise UserError(
            "the output directory holds something that is not a plan",
            str(directory),
            "choose an empty or new directory for -o",
        )
    parent = _existing_parent(directory)
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write the plan: {error.strerror}",
            str(parent),
            "choose a directory that you may write to for -o",
        ) from None


@contextmanager
def reserve_output(directory: Path) -> Iterator[None]:
    """Checks an output, and keeps compilations of other processes out of it. May be nested. Raises
    UserError."""
    check_output(directory)
    target = directory.resolve()
    if target in _reserved:
        yield
        return
    holder, remedy = "another compilation writes into the directory", "wait for it, or choose another -o"
    with ExitStack() as stack:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            lock = target.with_name(f".{target.name}.lock")
            stack.enter_context(hold_lock(lock, directory, holder, remedy))
            _tidy_leftovers(target)
        except OSError as error:
            raise _write_error(error, directory) from None
        _reserved.add(target)
        stack.callback(_reserved.discard, target)
        yield


def write_plan_files(directory: Path, files: Mapping[str, str | bytes]) -> None:
    """Writes `files` (paths relative to `directory`), replacing a plan that is there. Raises UserError if
    that cannot be done; the old plan is whole then."""
    target = directory.resolve()
    contents = {name: c.encode() if isinstance(c, str) else c for name, c in files.items()}
    with reserve_output(directory):
        try:
            staged = Path(tempfile.mkdtemp(prefix=_staged_prefix(target), dir=target.parent))
            staged.chmod(0o755)
            try:
                # The list is the first file, so that it has all that a killed compilation wrote; plan.json
                # the last, so that a folder with it is whole.
                _write_file(staged / COMPILED_FILES, _list_files(contents))
                for name in sorted(contents, key="plan.json".__eq__):
                    _write_file(staged / name, contents[name])
                _publish(staged, target)
            finally:
                _tidy_leftovers(target)
        except OSError as error:
            raise _write_error(error, directory) from None


def replace_plan_file(directory: Path, name: str, content: str) -> None:
    """Replaces one file of the plan in `directory`, and its line in the list of compiled files. Raises
    UserError if that cannot be done; the old file is whole then."""
    with reserve_output(directory):
        try:
            listed = directory / COMPILED_FILES
            lines = listed.read_text(encoding="utf-8").splitlines() if listed.exists() else []
            kept = [line for line in lines if line.partition("  ")[2] != name]
            new = _list_files({name: content.encode()}).decode().rstrip("\n")
            replace_file(directory / name, content)
            if lines:
                replace_file(listed, "\n".join(sorted([*kept, new], key=lambda line: line[66:])) + "\n")
        except OSError as error:
            raise _write_error(error, directory) from None


def replace_file(path: Path, text: str) -> None:
    """Writes a file such that it is whole at every moment, the old one or the new one. What is no regular
    file, a device or a pipe, is written to and stays. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    descriptor, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(scratch, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise


def _publish(staged: Path, target: Path) -> None:
    """Makes `staged` the folder `target`, and `staged` the one that was there, if any."""
    if not target.exists():
        staged.rename(target)
    elif not _exchange(staged, target):
        aside = Path(tempfile.mkdtemp(prefix=_staged_prefix(target), dir=target.parent))
        target.rename(aside)
        staged.rename(target)
        aside.rename(staged)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two folders in one step; False where the system cannot."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    if swap(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(b))


def _move_files(source: Path, target: Path) -> None:
    """Moves what is in a folder to another one, but for compiled Python, then deletes the folder. A file with
    a name that the other folder has gets the suffix `_KEPT`. The list of compiled files goes last."""
    for path in sorted(source.iterdir()):
        there = target / path.name
        if path.name == COMPILED_FILES or not _holds_files(path):
            continue
        if path.is_dir() and not path.is_symlink() and there.is_dir():
            _move_files(path, there)
        else:
            path.rename(there.with_name(there.name + _KEPT) if os.path.lexists(there) else there)
    shutil.rmtree(source)


def _holds_files(path: Path) -> bool:
    """Whether a path is a file, or a folder with anything but empty folders and compiled Python in it."""
    if path.is_symlink() or not path.is_dir():
        return True
    return path.name != "__pycache__" and any(map(_holds_files, path.iterdir()))


def _compiled_paths(directory: Path) -> list[Path]:
    """The files of a plan that the compiler wrote."""
    names = read_compiled_files(directory)
    if names is None:
        folders = [directory / name for name in _UNLISTED_FOLDERS]
        names = [*_UNLISTED_FILES, *(str(path) for folder in folders for path in folder.rglob("*"))]
    paths = [directory / name for name in names]
    whole = directory.resolve()
    return [p for p in paths if p.parent.resolve().is_relative_to(whole) and (p.is_symlink() or p.is_file())]


def _tidy_leftovers(target: Path) -> None:
    """Deletes folders next to `target` that held a plan, or a part of one, but for files that no compiler
    wrote: these move to `target`. If a compilation was killed between moving the old plan away and the new
    one in, puts the new one in."""
    left = [path for path in target.parent.iterdir() if path.name.startswith(_staged_prefix(target))]
    left = [path for path in left if path.is_dir() and not path.is_symlink()]
    for path in sorted(left, key=lambda path: path.stat().st_mtime, reverse=True):
        if not target.exists() and (path / "plan.json").exists():
            path.rename(target)
            continue
        for compiled in _compiled_paths(path):
            compiled.unlink(missing_ok=True)
        if target.exists():
            _move_files(path, target)
        elif not any(_holds_files(inside) for inside in path.iterdir() if inside.name != COMPILED_FILES):
            shutil.rmtree(path)


def _staged_prefix(target: Path) -> str:
    return f".{target.name}.plan-"


def _list_files(contents: Mapping[str, bytes]) -> bytes:
    lines = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(contents.items())]
    return "".join(lines).encode()


def _write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if path.name in _EXECUTABLE:
        path.chmod(0o755)


def _write_error(error: OSError, directory: Path) -> UserError:
    return UserError(
        f"cannot write the plan: {error.strerror}", str(error.filename or directory), "choose another -o"
    )


def _existing_parent(directory: Path) -> Path:
    return next(p for p in (directory.resolve(), *directory.resolve().parents) if p.is_dir())
