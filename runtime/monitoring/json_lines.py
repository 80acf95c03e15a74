"""Files of one JSON object per line that a run appends to, and their reader. A file that cannot be written
never ends a run."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from secc.runtime.errors import UserError
from secc.runtime.host.regular_files import open_regular_file
from secc.runtime.plan.json_shapes import MalformedValue, Shape

_MAX_LINE_BYTES = 1 << 20
NOT_FINITE = "not_finite"  # the key under which a line lists its fields that JSON has no number for


class JsonLinesFile:
    """Appends lines to a file, and says once on `stream` if that fails; later lines are tried again."""

    def __init__(self, path: Path, stream: TextIO | None = None) -> None:
        self._path, self._stream = path, stream
        self._failed = False
        with suppress(OSError):
            _drop_torn_line(path)

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes a line of strict JSON: numbers that are not finite are null, and named under `NOT_FINITE`
        with what they are."""
        line = (encode_line(values) + "\n").encode()
        try:
            with self._path.open("ab", buffering=0) as file:
                start = file.seek(0, os.SEEK_END)
                if file.write(line) != len(line):  # a disk that is full in the middle of a line
                    file.truncate(start)
                    raise OSError(28, os.strerror(28))
        except OSError as error:
            if not self._failed:
                say(f"warning: cannot write {self._path}: {error.strerror}; training goes on", self._stream)
            self._failed = True
        else:
            self._failed = False


def read_lines(path: Path, shape: Shape, remedy: str) -> Iterator[Any]:
    """Yields the lines of a file, each checked by `shape`. Lines that are not JSON are left out: one may be
    cut off, or still be written.

    Raises UserError, with the line, for JSON of another shape, and if the file cannot be read.
    """
    try:
        with open_regular_file(path) as file:
            number = 0
            while line := file.readline(_MAX_LINE_BYTES):
                number += 1
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                try:
                    yield shape(value)
                except MalformedValue as error:
                    message = f"not a line of a run's log: {error}"
                    raise UserError(message, f"{path}:{number}", remedy) from None
    except OSError as error:
        raise UserError(f"cannot read the run's log: {error.strerror}", str(path), remedy) from None


def encode_line(values: Mapping[str, Any]) -> str:
    """Returns a line of strict JSON."""
    try:
        return json.dumps(values, allow_nan=False)
    except ValueError:
        odd = {k: str(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
        return json.dumps(_with_nulls(values) | ({NOT_FINITE: odd} if odd else {}), allow_nan=False)


def say(text: str, stream: TextIO | None = None) -> None:
    """Writes a line for people to a stream, by default stderr; a full or closed one never ends a run."""
    target = stream or sys.stderr
    with suppress(OSError, ValueError):
        target.write(text + "\n")
        target.flush()


def _with_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_nulls(child) for key, child in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_with_nulls(child) for child in value]  # pyright: ignore[reportUnknownVariableType]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_torn_line(path: Path) -> None:
    """Removes the beginning of a line that a killed run has left at the end of a file."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, end - _MAX_LINE_BYTES))
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(start + tail.rfind(b"\n") + 1)
