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


def test_a_block_in_another_changes_nothing() -> None:
    before = gc.get_threshold()
    with slow_gc():
        slowed, frozen = gc.get_threshold(), gc.get_freeze_count()
        with slow_gc():
            pass
        # Frozen objects may have been deleted in the meantime, since nothing refers to them any more.
        assert gc.get_threshold() == slowed and 0 < gc.get_freeze_count() <= frozen
    assert gc.get_threshold() == before
