"""Python's garbage collector is as before once work that slows it down has ended, whatever ended it."""

from __future__ import annotations

import gc

import pytest

from secc.runtime.host.gc_control import pause_gc, slow_gc


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


def test_what_a_pause_exempts_is_never_collected_inside_slow_gc() -> None:
    with slow_gc():
        frozen = gc.get_freeze_count()
        with pause_gc(exempt=True):
            assert not gc.isenabled()
            kept = [[] for _ in range(10_000)]
        assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(kept)
    assert not gc.get_freeze_count()


def test_a_pause_exempts_nothing_outside_of_slow_gc() -> None:
    with pause_gc(exempt=True):
        pass
    assert gc.isenabled() and not gc.get_freeze_count()


def test_leaving_the_block_starts_no_collection_of_what_it_made() -> None:
    generations = list[int]()
    note = lambda phase, info: generations.append(info["generation"]) if phase == "start" else None  # noqa: E731
    gc.callbacks.append(note)
    try:
        with slow_gc():
            kept = [[] for _ in range(50_000)]
            generations.clear()
        assert not generations and len(kept) == 50_000
    finally:
        gc.callbacks.remove(note)
