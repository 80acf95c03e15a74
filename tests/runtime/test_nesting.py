"""Nested batches and their flat form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from secc.runtime.errors import UserError
from secc.runtime.nesting import argument, flat, nested

ONE, TWO = torch.ones(1), torch.ones(2)


def test_flat_and_nested_undo_each_other() -> None:
    batch = {"text": {"ids": ONE, "more": {"mask": TWO}}, "levels": [ONE, TWO], "labels": TWO, "names": ["a", "b"], "n": 3}
    found = flat(batch)
    assert list(found) == ["text.ids", "text.more.mask", "levels.0", "levels.1", "labels", "names", "n"]
    assert nested(found) == batch and {argument(key) for key in found} == batch.keys()


def test_what_is_none_is_missing() -> None:
    assert flat({"text": {"ids": ONE, "mask": None}, "images": None}) == {"text.ids": ONE}


@pytest.mark.parametrize("batch", [{"a.b": ONE}, {"a": {"b.c": ONE}}, {"a": {3: ONE}}, {"a": {"3": ONE}}])
def test_keys_that_cannot_be_told_from_nested_ones_are_refused(batch: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="a batch has the key") as error:
        flat(batch, "model.py:7")
    assert error.value.where == "model.py:7"
