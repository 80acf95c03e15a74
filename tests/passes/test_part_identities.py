"""Parts of the loss are one term in all cases, also where some cases have more blocks behind them."""

from __future__ import annotations

from secc.passes.loss.term_names import CaseParts, PartIdentity, match_identities


def make_case(keys: str, called: str, *parts: tuple[str, str]) -> CaseParts:
    """Returns a case with parts (op, blocks behind it), all on one line."""
    made = [PartIdentity(True, "model.py:9", op, tuple(sorted(blocks.split()))) for op, blocks in parts]
    return CaseParts(frozenset(keys.split()), frozenset(called.split()), made)


def number_parts(*cases: CaseParts) -> list[list[int]]:
    """Numbers identities in the order in which they first come; returns the numbers of each case's parts."""
    matched = match_identities(cases)
    order = list(dict.fromkeys(part for parts in matched for part in parts))
    return [[order.index(part) for part in parts] for parts in matched]


def test_a_modality_that_some_samples_have_adds_to_the_scores() -> None:
    text = make_case("", "text", ("nll", "text"))
    seen = make_case("image", "text image", ("nll", "text image"))
    heard = make_case("sound", "text sound", ("nll", "text sound"))
    both = make_case("image sound", "text image sound", ("nll", "text image sound"))
    assert number_parts(text, seen, heard, both) == [[0], [0], [0], [0]]


def test_sums_of_one_line_are_told_apart_by_blocks_that_both_cases_call() -> None:
    text = make_case("", "text teacher", ("sum", "text"), ("sum", "teacher text"))
    seen = make_case("image", "text image teacher", ("sum", "text image"), ("sum", "teacher text image"))
    assert number_parts(text, seen) == [[0, 1], [0, 1]]


def test_heads_of_a_loop_stay_apart() -> None:
    one = make_case("", "a", ("nll", "a"))
    two = make_case("image", "a b", ("nll", "a"), ("nll", "b"))
    assert number_parts(one, two) == [[0], [0, 1]]


def test_a_part_that_could_be_one_of_several_stays_apart() -> None:
    text = make_case("", "text", ("nll", "text"))
    seen = make_case("image", "text left right", ("nll", "text left"), ("nll", "text right"))
    assert number_parts(text, seen) == [[0], [1, 2]]


def test_other_modules_in_place_of_the_same_are_another_part() -> None:
    assert number_parts(
        make_case("", "plain", ("nll", "plain")), make_case("image", "fused", ("nll", "fused"))
    ) == [
        [0],
        [1],
    ]
