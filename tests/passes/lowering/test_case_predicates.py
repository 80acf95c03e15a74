"""Merging paths loses none: every capture still takes its own code, and no code runs under guards it was not
captured with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from secc.ir.dialect.ops import CaseOp
from secc.passes.lowering.case_predicates import CasePath, InputPattern, merge_paths

CASE = CaseOp.create()
PATTERNS = st.frozensets(st.sampled_from(["audio", "hint", "px"]))
FLAGS, NUMBERS = st.sampled_from(["True", "False"]), st.sampled_from(["3", "4"])
CAPTURES = st.dictionaries(st.tuples(PATTERNS, FLAGS, FLAGS, NUMBERS), st.sampled_from("abc"), min_size=1)


def way(pattern: InputPattern, text: str, **guards: str) -> CasePath:
    return CasePath(pattern, text, frozenset(guards.items()), CASE)


@given(CAPTURES)
def test_each_capture_takes_its_own_code_and_no_other(
    captures: dict[tuple[InputPattern, str, str, str], str],
) -> None:
    ways = merge_paths(way(p, text, first=a, second=b, third=c) for (p, a, b, c), text in captures.items())
    for (pattern, a, b, c), text in captures.items():
        holds = {("first", a), ("second", b), ("third", c)}
        holding = [
            f for f in ways if pattern & f.distinguishing_keys in f.patterns and f.path.guards <= holds
        ]
        assert {f.path.text for f in holding} == {text}


def test_a_boolean_guard_is_dropped_where_both_outcomes_lead_to_the_same_code() -> None:
    (found,) = merge_paths([way(frozenset(), "a", mask="True"), way(frozenset(), "a", mask="False")])
    assert found.path.guards == frozenset()


def test_a_number_keeps_its_guard_since_others_were_not_seen() -> None:
    assert len(merge_paths([way(frozenset(), "a", count="3"), way(frozenset(), "a", count="4")])) == 2


def test_an_outcome_that_was_not_captured_keeps_its_guard() -> None:
    (found,) = merge_paths([way(frozenset(), "a", mask="True")])
    assert found.path.guards == {("mask", "True")}


def test_keys_that_change_nothing_do_not_distinguish_paths() -> None:
    ways = merge_paths(
        [way(frozenset(), "a"), way(frozenset({"px"}), "b"), way(frozenset({"px", "hint"}), "b")]
    )
    assert [(f.path.text, f.patterns) for f in ways] == [("a", (frozenset(),)), ("b", (frozenset({"px"}),))]
