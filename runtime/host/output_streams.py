"""Standard output and error of a run. They may be files on a full disk, or pipes with a reader that has
ended. Lines that cannot be written there are dropped, and never end the run."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_DESCRIPTORS = {"stdin": 0, "stdout": 1, "stderr": 2}


def open_closed_streams() -> None:
    """Opens /dev/null for standard streams that this process was started without. Their descriptors would
    otherwise be taken by the next files that are opened, and messages be written into these."""
    for name, descriptor in _DESCRIPTORS.items():
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor: this one
            os.set_inheritable(descriptor, True)
            stream = open(descriptor, "r" if name == "stdin" else "w", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def replace_unencodable_output() -> None:
    """Lets standard output print a question mark for each character that its encoding lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def drop_unwritable_output(names: Iterable[str]) -> None:
    """Replaces standard streams by ones that drop what cannot be written; leaves streams alone that are not
    the process's own, such as a notebook's."""
    for name in names:
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            stream.flush()
            buffer = io.BufferedWriter(_LossyFile(_DESCRIPTORS[name], "w", closefd=False))
            lossy = io.TextIOWrapper(
                buffer, stream.encoding, "backslashreplace", line_buffering=True, write_through=True
            )
            setattr(sys, name, lossy)
            setattr(sys, f"__{name}__", lossy)


class _LossyFile(io.FileIO):
    def write(self, b: ReadableBuffer, /) -> int:
        try:
            written = super().write(b)
        except OSError:
            written = None
        return memoryview(b).nbytes if written is None else written
