"""Candidates with other fields are those that `dataclasses.replace` makes."""

from __future__ import annotations

from dataclasses import replace

from secc.alloc.problem.types import Candidate


def test_with_fields_changes_the_given_fields_of_a_copy() -> None:
    own = Candidate(4, 2, 100, memory=7, sharding="zero3")
    changed = own.with_fields(time_ns=5, excluded=True)
    assert changed == replace(own, time_ns=5, excluded=True)
    assert hash(changed) == hash(replace(own, time_ns=5, excluded=True))
    assert own == Candidate(4, 2, 100, memory=7, sharding="zero3")
