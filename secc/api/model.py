"""A model for the Python interface: a model file, or functions of a script or notebook."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from secc.errors import UserError
from secc.runtime.model.user_file import ROLES


class Model:
    """What secc compiles: the functions that a model file may define (docs/guide/model-file.md).

    `Model(model=..., dataset=..., collate=..., optimizer=...)` takes functions of a module, of the running
    script or of a notebook; the last two are copied into a file that ranks import, `file` or one in a
    temporary folder of this machine. Raises UserError for functions that cannot be copied.
    """

    def __init__(self, *, file: str | Path | None = None, **functions: Callable[..., Any] | None) -> None:
        given = {role: f for role, f in functions.items() if f is not None}
        if unknown := sorted(given.keys() - set(ROLES)):
            raise UserError(f"unknown function {unknown[0]!r}", remedy=f"a model has {', '.join(ROLES)}")
        if not given:
            if file is None:
                raise UserError("a model needs functions", remedy="give at least model= and dataset=")
            self.path = Path(file)
            return
        _require_roles(given)
        from secc.api.extract_source import write_model_source

        text = write_model_source(given)
        if file is None:
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            folder = Path(tempfile.gettempdir()) / f"secc-models-{os.getuid()}"
            folder.mkdir(mode=0o700, exist_ok=True)
            file = folder / f"model_{digest}.py"
        self.path = Path(file)
        if not self.path.exists() or self.path.read_text(encoding="utf-8") != text:
            self.path.write_text(text, encoding="utf-8")

    def __repr__(self) -> str:
        return f"secc.load({str(self.path)!r})"


def _require_roles(given: Iterable[str]) -> None:
    for roles in (("model",), ("dataset", "datasets")):
        if not any(role in given for role in roles):
            raise UserError(f"a model needs the function {roles[0]}=", remedy="see docs/guide/model-file.md")


def load(path: str | Path) -> Model:
    """Returns the model of a model file. Raises UserError if the file does not exist."""
    if not Path(path).is_file():
        raise UserError("there is no such model file", str(path), "give the path of a Python file")
    return Model(file=path)
