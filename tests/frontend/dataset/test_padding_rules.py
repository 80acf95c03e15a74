"""What rows of a batch show against those of its samples collated alone."""

from __future__ import annotations

import torch

from secc.frontend.dataset.padding_rules import PaddingEvidence


def _compare(samples: list[list[list[int]]], batch: list[list[int]]) -> PaddingEvidence:
    evidence = PaddingEvidence("places", 0, (), (1,))
    evidence.compare_batch({"places": torch.tensor(batch)}, [{"places": torch.tensor(s)} for s in samples])
    return evidence


def test_places_of_a_sample_are_its_own_plus_one_number() -> None:
    found = _compare([[[0, 1]], [[0, 1], [1, 2]]], [[0, 1], [3, 4], [4, 5]])
    assert found.shifted and found.shows_shift
    assert not _compare([[[0, 1]], [[0, 1]]], [[0, 1], [3, 5]]).shifted


def test_negative_places_that_stay_are_no_places() -> None:
    found = _compare([[[0, -1]], [[0, -1], [1, 2]]], [[0, -1], [3, -1], [4, 5]])
    assert found.shifted and found.shows_shift
    assert not _compare([[[0, -1]], [[0, -1]]], [[0, -1], [3, -2]]).shifted
    assert not _compare([[[0, 2]], [[0, 2]]], [[0, 2], [3, 2]]).shifted


def test_complex_numbers_are_padded_with_zeros_only() -> None:
    for fill, is_known in ((0, True), (1 + 1j, False)):
        evidence = PaddingEvidence("signal", 0, (1,), (2,))
        samples = [torch.ones(1, n, 2, dtype=torch.complex64) for n in (2, 3)]
        rows = [torch.cat([s, torch.full_like(s, fill)[:, : 3 - s.shape[1]]], 1) for s in samples]
        evidence.compare_batch({"signal": torch.cat(rows)}, [{"signal": s} for s in samples])
        assert evidence.choose_pads({}) == (((1, "right", 0.0),) if is_known else ())
