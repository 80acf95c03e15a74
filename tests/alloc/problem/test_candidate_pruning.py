"""Which replica counts are considered, and which candidates are left to the solver."""

from __future__ import annotations

from secc.alloc.problem.candidate_pruning import (
    powers_of_two,
    prune_dominated,
    replica_counts,
    stage_counts,
)
from secc.alloc.problem.types import Candidate


def test_replica_counts() -> None:
    assert powers_of_two(1) == [1] and powers_of_two(80) == [1, 2, 4, 8, 16, 32, 64]
    assert list(replica_counts(2, 16, 8, 5)) == [1, 2, 3, 4, 5]  # small clusters rank by rank
    assert [4 * n for n in replica_counts(4, 64, 8, 64)] == [
        4,
        8,
        16,
        24,
        32,
        40,
        48,
        56,
        64,
    ]  # large ones node by node


def test_dominated_candidates_are_removed() -> None:
    fast = Candidate(dp=1, micro_batch=4, time_ns=100, fill_ns=40, memory=100)
    waits_less = Candidate(dp=1, micro_batch=1, time_ns=120, fill_ns=10, memory=100)
    smaller = Candidate(dp=1, micro_batch=1, time_ns=130, fill_ns=40, memory=10)
    beaten = Candidate(dp=1, micro_batch=2, time_ns=140, fill_ns=40, memory=100)
    elsewhere = Candidate(dp=2, micro_batch=2, time_ns=140, fill_ns=40, memory=100)
    assert set(prune_dominated([fast, waits_less, smaller, beaten, elsewhere], 1000)) == {
        fast,
        waits_less,
        smaller,
        elsewhere,
    }
    assert beaten in prune_dominated(
        [fast, smaller, beaten], 1000, by_micro_batch=True
    )  # where sections must have one micro-batch size


def test_of_equal_candidates_the_plainest_stays() -> None:
    plain, again = (Candidate(dp=2, micro_batch=1, time_ns=5, recompute=way) for way in ("none", "full"))
    assert prune_dominated([again, plain], 1000) == (plain,)
    wide = Candidate(dp=1, tp=2, micro_batch=1, time_ns=5)
    assert prune_dominated([wide, plain], 1000) == (plain,)


def test_stages_dominate_stages_only() -> None:
    staged, slower = (Candidate(dp=1, pp=2, micro_batch=1, time_ns=ns) for ns in (5, 6))
    wide = Candidate(dp=1, tp=2, micro_batch=1, time_ns=6)
    assert set(prune_dominated([staged, slower, wide], 1000)) == {staged, wide}


def test_candidates_that_do_not_fit_stay_only_if_nothing_fits() -> None:
    large, larger = (Candidate(dp=1, micro_batch=1, time_ns=1, memory=size) for size in (2000, 3000))
    fits = Candidate(dp=1, micro_batch=1, time_ns=9, memory=900)
    assert prune_dominated([large, larger, fits], 1000) == (fits,)
    assert prune_dominated([large, larger], 1000) == (large,)


def test_numbers_of_stages_divide_layers_almost_evenly() -> None:
    assert stage_counts(1) == [1] and stage_counts(3) == [1, 2, 3]
    assert stage_counts(28) == [1, 2, 4, 7, 8, 14, 16, 28]
    assert stage_counts(64) == [1, 2, 3, 4, 5, 6, 8, 16, 32, 64]
    for layers in range(1, 130):
        counts = stage_counts(layers)
        assert counts == sorted(set(counts)) and {*powers_of_two(layers)} <= {*counts}
        assert all(1 <= n <= layers for n in counts)
        assert all(-(-layers // n) * n <= layers * 17 / 16 for n in {*counts} - {*powers_of_two(layers)})
