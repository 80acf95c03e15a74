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
