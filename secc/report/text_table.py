"""Tables of text, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TextTable:
    """A titled table; `note` says what its columns rest on."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def blocks_text(paths: Sequence[str]) -> str:
    """Module paths, layers in a row as one and what all begin with once: `model.{embed, layers.0-31,
    norm}`."""
    spans: list[
        tuple[str, int, int]
    ] = []  # what stands before a number, the first and the last one; -1 where there is none
    for path in paths:
        head, dot, number = path.rpartition(".")
        if not number.isdecimal():
            spans.append((path, -1, -1))
        elif spans and spans[-1][0] == head + dot and 0 <= spans[-1][2] == int(number) - 1:
            spans[-1] = (head + dot, spans[-1][1], int(number))
        else:
            spans.append((head + dot, int(number), int(number)))
    return paths_text(
        [
            head if first < 0 else f"{head}{first}" + (f"-{last}" if last > first else "")
            for head, first, last in spans
        ]
    )


def paths_text(paths: Sequence[str]) -> str:
    """Dotted paths in one line: `a.{b, c.d}` for `a.b` and `a.c.d`."""
    shared = 0
    if len(paths) > 1:
        parents = [path.split(".")[:-1] for path in paths]
        shared = next(
            (i for i, names in enumerate(zip(*parents, strict=False)) if len(set(names)) > 1),
            min(map(len, parents)),
        )
    if not shared:
        return ", ".join(paths)
    prefix = ".".join(paths[0].split(".")[:shared])
    return f"{prefix}.{{{', '.join(path.removeprefix(prefix + '.') for path in paths)}}}"


def ranks_text(ranks: Sequence[int]) -> str:
    """`0-2, 5` for (0, 1, 2, 5)."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def bytes_text(count: float) -> str:
    """`3.5 MiB` for a number of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError


def count_text(count: int) -> str:
    """`3.5M` for a number of weights."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def seconds_text(seconds: float) -> str:
    """`3.5 ms` for a time in seconds."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"
