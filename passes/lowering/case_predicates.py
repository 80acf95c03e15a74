"""Merges equal paths through a section, and finds what tells the others apart: optional keys and guards.

A path is the code that a section runs in one case. Paths with the same code are merged where a boolean guard
is the only difference and both outcomes were captured, and where optional keys that differ change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations

from secc.ir.dialect.ops import CaseOp

InputPattern = frozenset[str]


@dataclass(frozen=True)
class CasePath:
    """The code of a section in a case, as canonical text, with the guards it holds under: (canonical text of
    the value read, outcome)."""

    pattern: InputPattern
    text: str
    guards: frozenset[tuple[str, str]]
    case: CaseOp

    @property
    def identity(self) -> tuple[str, frozenset[tuple[str, str]]]:
        """Equal for equal paths of different cases."""
        return self.text, self.guards


@dataclass(frozen=True)
class CasePredicate:
    """A path and the patterns under which it is taken, restricted to the keys that matter
    (`distinguishing_keys`)."""

    path: CasePath
    patterns: tuple[InputPattern, ...]
    distinguishing_keys: InputPattern


def merge_paths(ways: Iterable[CasePath]) -> list[CasePredicate]:
    """The distinct paths, each with its patterns, in order of first occurrence."""
    by_pattern: dict[InputPattern, list[CasePath]] = {}
    for way in ways:
        by_pattern.setdefault(way.pattern, []).append(way)
    reduced = {pattern: _drop_covered_guards(found) for pattern, found in by_pattern.items()}
    telling = _distinguishing_keys(reduced)
    patterns: dict[tuple[str, frozenset[tuple[str, str]]], list[InputPattern]] = {}
    first: dict[tuple[str, frozenset[tuple[str, str]]], CasePath] = {}
    for pattern, found in reduced.items():
        for way in found:
            first.setdefault(way.identity, way)
            known = patterns.setdefault(way.identity, [])
            if pattern & telling not in known:
                known.append(pattern & telling)
    return [CasePredicate(way, tuple(patterns[code]), telling) for code, way in first.items()]


def _drop_covered_guards(ways: list[CasePath]) -> list[CasePath]:
    """Merge ways of one pattern that differ in one boolean guard alone, until none do: both its outcomes lead
    to the same code."""
    ways = list({way.identity: way for way in reversed(ways)}.values())[::-1]
    while pair := next(((a, b) for a, b in combinations(ways, 2) if _differ_in_one_guard(a, b)), None):
        a, b = pair
        merged = replace(a, guards=a.guards & b.guards)
        ways = [
            merged if way is a else way
            for way in ways
            if way is not b and (way is a or way.identity != merged.identity)
        ]
    return ways


def _differ_in_one_guard(a: CasePath, b: CasePath) -> bool:
    only_a, only_b = a.guards - b.guards, b.guards - a.guards
    if a.text != b.text or len(only_a) != 1 or len(only_b) != 1:
        return False
    (read_a, outcome_a), (read_b, outcome_b) = *only_a, *only_b
    return read_a == read_b and {outcome_a, outcome_b} == {"True", "False"}


def _distinguishing_keys(ways: dict[InputPattern, list[CasePath]]) -> InputPattern:
    """The fewest optional keys, taken away one by one in alphabetic order, that still tell the patterns' ways
    apart."""
    telling = frozenset[str]().union(*ways)
    for key in sorted(telling):
        fewer, seen = telling - {key}, dict[InputPattern, set[tuple[str, frozenset[tuple[str, str]]]]]()
        if all(
            seen.setdefault(pattern & fewer, codes) == codes
            for pattern, found in ways.items()
            for codes in [{w.identity for w in found}]
        ):
            telling = fewer
    return telling
