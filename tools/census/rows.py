"""All rows of the census by name, as model files that a user could have written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import Dataset

from tools.census.catalog import Row, model_rows
from tools.zoo_models.entry import Sample, Samples

_SOURCE = '''"""{name}: a row of the census."""

from tools.census.rows import entry

_ENTRY = entry("{name}")
model, dataset, collate = _ENTRY.model, _ENTRY.dataset, _ENTRY.collate
'''


@dataclass(frozen=True)
class RowEntry:
    """The functions of a row's model file. `inputs` says what its samples are."""

    model: Callable[[], nn.Module]
    dataset: Callable[[], Dataset[Sample]]
    collate: Callable[[Sequence[Sample]], Sample]
    inputs: str


@functools.cache
def rows() -> dict[str, Row]:
    """All rows, family by family."""
    return {**model_rows()}


@functools.cache
def entry(name: str) -> RowEntry:
    """The model file of a row. Raises what plain PyTorch raises if it cannot train the row."""
    row = rows()[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        recipe = row.find_recipe()
    return RowEntry(row.build, lambda: Samples(recipe.draw), recipe.batching.collate, recipe.name)


def model_file(name: str) -> str:
    """The text of a row's model file."""
    return _SOURCE.format(name=name)
