"""The samples that memory is counted for: those that no other one exceeds in every size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from secc.alloc.problem.workload import _drop_smaller

ROWS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=40)


def exceeds(larger: tuple[int, ...], row: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(larger, row, strict=True))


@given(ROWS)
def test_each_sample_is_kept_or_smaller_than_one_that_is(rows: list[tuple[int, int, int]]) -> None:
    names = ("n", "S", "B")
    kept = _drop_smaller({name: [row[i] for row in rows] for i, name in enumerate(names)})
    largest = list(zip(*(kept[name] for name in names), strict=True))
    assert {*largest} <= {*rows} and len({*largest}) == len(largest)
    assert all(any(exceeds(larger, row) for larger in largest) for row in rows)
    assert not any(a != b and exceeds(a, b) for a in largest for b in largest)
