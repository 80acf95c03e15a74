"""Tables of text, and formatting of numbers, paths and ranks in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TextTable:
    """A table with a title; `note` explains its columns."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


MAX_RANKS_WIDTH = 30  # characters of a list of ranks; the ranks of longer ones are counted
_MAX_DIGITS = 9  # of a layer's number; longer ones are no numbers of layers


def blocks_text(paths: Sequence[str]) -> str:
    """Module paths in one line, with consecutive layers as a range and a common prefix written once:
    `model.{embed, layers.0-31, norm}`."""
    # (path up to a trailing number, first number, last number); -1 for paths without one
    spans: list[tuple[str, int, int]] = []
    for path in paths:
        head, dot, number = path.rpartition(".")
        if not number.isdecimal() or len(number) > _MAX_DIGITS:
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


def join_parts_of_layers(paths: Sequence[str], others: Sequence[str] = ()) -> list[str]:
    """Module paths with a layer in place of its parts (`layers.3` for `layers.3.attention` and
    `layers.3.mlp`), unless `others` have parts of it, too."""

    def layer_of(path: str) -> str:
        around = path.rpartition(".")[0]
        numbered = around.rpartition(".")[2].isdecimal() and not path.rpartition(".")[2].isdecimal()
        return around if numbered else ""

    parts = Counter(map(layer_of, paths))
    divided = {layer_of(path) for path in others} | {""}
    whole = {layer for layer, count in parts.items() if count > 1} - divided
    return [*dict.fromkeys(layer_of(path) if layer_of(path) in whole else path for path in paths)]


def paths_text(paths: Sequence[str]) -> str:
    """Dotted paths in one line with a common prefix written once: `a.{b, c.d}` for `a.b` and `a.c.d`."""
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
    """Ranks as ranges: `0-2, 5` for (0, 1, 2, 5)."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def short_ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as ranges, `ranks 0-2, 5`, or their number where the ranges are many: `144 ranks`."""
    text = ranks_text(ranks)
    if len(ranks) == 1:
        return f"rank {text}"
    return f"ranks {text}" if len(text) <= MAX_RANKS_WIDTH else amount_text(len(ranks), "rank")


def bytes_text(count: float) -> str:
    """A number of bytes with a binary unit: `3.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError


def amount_text(count: int, noun: str) -> str:
    """A number with a noun in its plural form where that is due: `1 rank`, `2 ranks`."""
    return f"{count} {noun}{'s' if count != 1 else ''}"


def count_text(count: int) -> str:
    """A number of weights with a decimal unit: `3.5M`."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def seconds_text(seconds: float) -> str:
    """A time with a unit: `3.5 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"
