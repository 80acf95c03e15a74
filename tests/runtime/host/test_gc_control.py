"""Python's garbage collector is as before once work that slows it down has ended, whatever ended it."""

from __future__ import annotations

import gc

import pytest

from secc.runtime.host.gc_control import slow_gc


def test_collections_are_rare_inside_the_block_and_as_before_after_it() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), slow_gc():
        assert gc.get_threshold()[0] > before[0] and gc.get_freeze_count()
        raise KeyError
    assert gc.get_threshold() == before and not gc.get_freeze_count()
