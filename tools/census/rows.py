"""All rows of the census by name, as model files that a user could have written."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from tools.census.catalog import Row, RowEntry, model_rows
from tools.census.compounds import compound_rows

_SOURCE = '''"""{name}: a row of the census."""

from tools.census.rows import entry

_ENTRY = entry("{name}"){variant}
model, dataset = _ENTRY.model, _ENTRY.dataset
{collate}'''


@functools.cache
def rows() -> Mapping[str, Row]:
    """All rows, family by family."""
    return {**model_rows(), **compound_rows()}


@functools.cache
def entry(name: str) -> RowEntry:
    """The model file of a row. Raises what plain PyTorch raises if it cannot train the row."""
    return rows()[name].entry()


def model_file(name: str, double: bool = False) -> str:
    """The text of a row's model file; with `double`, weights and samples are in float64."""
    collate = "collate = _ENTRY.collate\n" if entry(name).collate else ""
    return _SOURCE.format(name=name, variant=".in_float64()" if double else "", collate=collate)
