"""Reads the list of files that the compiler wrote into a plan directory, and checks those that ranks run."""

from __future__ import annotations

import hashlib
from pathlib import Path

from secc.runtime.errors import UserError

COMPILED_FILES = "files.sha256"  # in the format of sha256sum


def read_compiled_files(directory: Path) -> dict[str, str] | None:
    """Returns the SHA-256 digest of each file that the compiler wrote, by its path in `directory`; None if
    the list is missing or not text."""
    try:
        lines = (directory / COMPILED_FILES).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def check_compiled_code(directory: Path) -> None:
    """Compares the Python files of a plan with the list of compiled files, before ranks run them. Raises
    UserError for one that is missing or has changed; without a list only for a missing run.py."""
    listed = read_compiled_files(directory)
    if listed is None and not (directory / "run.py").exists():
        listed = {"run.py": ""}
    remedy = "copy the whole directory again or compile again; a run continues with --resume auto"
    for name, digest in sorted((listed or {}).items()):
        if not name.endswith(".py"):
            continue
        try:
            found = hashlib.sha256((directory / name).read_bytes()).hexdigest()
        except FileNotFoundError:
            raise UserError(f"the plan has no {name}", str(directory), remedy) from None
        except OSError as error:
            raise UserError(
                f"cannot read a file of the plan: {error.strerror}", str(directory / name), remedy
            ) from None
        if found != digest:
            raise UserError(
                "the file was changed after the plan was compiled",
                str(directory / name),
                f"{remedy}. To run your own change, delete the file's line in {COMPILED_FILES}",
            )
