"""Writes a plan directory: all of it or nothing, and never over something that is not a plan."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from secc.errors import UserError

_EXECUTABLE = {"launch.sh", "slurm.sbatch"}


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


def write_plan_files(directory: Path, files: Mapping[str, str | bytes]) -> None:
    """Writes `files` (paths relative to `directory`), replacing a plan that is there. Raises UserError if
    that cannot be done."""
    check_output(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        staged.chmod(0o755)
        try:
            for name, content in files.items():
                _write_file(staged / name, content)
            if directory.exists():
                shutil.rmtree(directory)
            staged.rename(directory)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"cannot write the plan: {error.strerror}", str(error.filename or directory), "choose another -o"
        ) from None


def _write_file(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        path.write_text(content)
    else:
        path.write_bytes(content)
    if path.name in _EXECUTABLE:
        path.chmod(0o755)


def _existing_parent(directory: Path) -> Path:
    return next(p for p in (directory.resolve(), *directory.resolve().parents) if p.is_dir())
