"""Predicates over the optional inputs of a sample: what they hold for, and what they are called."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secc.passes.annotate_patterns import find_predicate
from secc.runtime.plan.sample_predicates import describe_predicate, inputs_of, is_active

KEYS = ("audio", "image", "sizes")
PATTERNS = [frozenset(some) for size in range(4) for some in combinations(KEYS, size)]


@pytest.mark.parametrize(
    ("when", "holds", "text"),
    [
        ((), ["", "audio", "audio image"], "every sample"),
        (("image",), ["image", "audio image"], "samples with image"),
        (("audio", "image"), ["image", "audio"], "samples with audio or image"),
        (("audio&image",), ["audio image"], "samples with audio and image"),
        (("!audio&!image",), ["", "sizes"], "samples without audio and image"),
        (("image", "sizes&!audio"), ["sizes", "image"], "samples with image or with sizes and without audio"),
    ],
)
def test_a_sample_needs_one_of_the_terms(when: tuple[str, ...], holds: list[str], text: str) -> None:
    assert all(is_active(when, pattern.split()) for pattern in holds)
    assert describe_predicate(when) == text


def test_a_term_fails_for_what_a_sample_lacks_or_must_lack() -> None:
    assert not is_active(("audio&image",), {"audio"})
    assert not is_active(("!audio",), {"audio", "image"})
    assert inputs_of(["!audio&image", "image"]) == ["image", "audio"]


@given(st.dictionaries(st.sampled_from(PATTERNS), st.booleans(), min_size=1))
def test_a_predicate_tells_the_patterns_of_a_block_from_others(active: dict[frozenset[str], bool]) -> None:
    """For any patterns that cases have: the predicate holds where the block runs, and for no other case."""
    runs = {pattern for pattern, does in active.items() if does}
    if runs:
        when = find_predicate(runs, set(active) - runs, KEYS)
        assert {pattern for pattern in active if is_active(when, pattern)} == runs
