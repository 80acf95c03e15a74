"""The expected error that a plan shows with its predicted step."""

from __future__ import annotations

import pytest

from secc.report import expected_error
from secc.report.expected_error import find_expected_error, layout_traits


@pytest.fixture
def ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten layouts of A100 in one piece, off by 1% to 10%, and ten in stages, off by half; one of H100."""
    whole, staged = (layout_traits("A100", 2, pp, "zero1", "none") for pp in (1, 2))
    layouts = [(whole, 1 + i / 100) for i in range(1, 11)] + [(staged, 0.5)] * 10
    layouts.append((layout_traits("H100", 1, 1, "zero3", "none"), 2.0))
    monkeypatch.setattr(expected_error, "_published_ratios", lambda: tuple(layouts))


@pytest.mark.usefixtures("ratios")
def test_the_error_is_that_of_layouts_with_the_same_parallelism() -> None:
    whole = find_expected_error(layout_traits("A100", 8, 1, "zero1", "none"))
    staged = find_expected_error(layout_traits("A100", 2, 4, "none", "none"))
    assert whole is not None and whole.layouts == 10
    # All ten were predicted too long, by 1 to 10%.
    assert (whole.lowest, whole.highest) == (pytest.approx(-0.1 / 1.1), pytest.approx(-0.01 / 1.01))
    assert staged is not None and (staged.lowest, staged.highest) == (1.0, 1.0)


@pytest.mark.usefixtures("ratios")
def test_without_enough_layouts_like_it_all_of_the_chip_count() -> None:
    error = find_expected_error(layout_traits("A800", 1, 1, "zero3", "full"))
    assert error is not None and (error.layouts, error.traits) == (20, "A100")


@pytest.mark.usefixtures("ratios")
def test_one_layout_says_too_little() -> None:
    assert find_expected_error(layout_traits("H200", 1, 1, "zero3", "none")) is None


def test_the_file_has_layouts_of_both_chips() -> None:
    for kind in ("A100", "H100"):
        error = find_expected_error(layout_traits(kind, 1, 1, "zero3", "none"))
        assert error is not None and -0.5 < error.lowest < error.highest < 1
