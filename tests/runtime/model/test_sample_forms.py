"""Samples that are no dicts reach `collate` as the dataset gave them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from secc.runtime.model.sample_forms import has_names, original_sample, sample_as_dict


@dataclass
class Graph:
    nodes: int


@pytest.mark.parametrize("item", [{"x": 1}, (3, "a"), Graph(4), ((), None)])
def test_samples_come_back_as_they_were(item: object) -> None:
    sample = sample_as_dict(item)
    assert sample is not None
    assert has_names(sample) == isinstance(item, dict)
    assert original_sample(dict(sample)) == item


@pytest.mark.parametrize("item", [None, "text", 3, ()])
def test_what_holds_nothing_is_no_sample(item: object) -> None:
    assert sample_as_dict(item) is None
