"""What a rank may hold in flight, divided among its stages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from secc.alloc.problem.in_flight import divide_in_flight_room
from secc.alloc.problem.types import ReplicaShape
from secc.runtime.plan.schema import PLACEMENTS, rank_position

ROOM = 7_000


def test_one_stage_on_a_rank_has_all_of_it() -> None:
    assert divide_in_flight_room(ReplicaShape(pp=4), 2, ROOM, largest=9 * ROOM) == ROOM


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("chunks", [2, 3])
def test_stages_on_a_rank_share_it_and_earlier_ones_hold_more(chunks: int, placement: str) -> None:
    shape = ReplicaShape(pp=4, chunks=chunks, placement=placement)
    for parts in _parts_by_rank(shape, largest=0):
        assert sum(parts) == ROOM
        assert parts == sorted(parts, reverse=True)
        assert parts[0] > parts[-1] > 0


def test_the_ends_of_a_v_are_the_most_unequal() -> None:
    first, *_, last = _parts_by_rank(ReplicaShape(pp=4, chunks=2, placement="v"), largest=0)
    assert first == [5_000, 2_000]  # eight stages: the first one holds five at least, the last one two
    assert last[0] - last[1] <= ROOM // 7


@pytest.mark.parametrize(("largest", "parts"), [(2_500, [4_500, 2_500]), (ROOM, [5_000, 2_000])])
def test_each_stage_has_room_for_the_largest_sample_where_all_have(largest: int, parts: list[int]) -> None:
    assert next(_parts_by_rank(ReplicaShape(pp=4, chunks=2, placement="v"), largest)) == parts


def _parts_by_rank(shape: ReplicaShape, largest: int) -> Iterator[list[int]]:
    """Yields what the stages of each rank get, the earliest stage first."""
    for rank in range(shape.pp):
        stages = [s for s in range(shape.stages) if rank_position(s, shape.pp, shape.placement) == rank]
        yield [divide_in_flight_room(shape, s, ROOM, largest) for s in stages]
