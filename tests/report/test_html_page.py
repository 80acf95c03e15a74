"""The HTML page of a plan."""

from __future__ import annotations

from secc.report.html_page import report_page
from tests.runtime.schedule.plan_strategies import make_plan, make_section, make_stages


def test_ranks_with_equal_sections_share_a_card() -> None:
    some = [
        make_section("vision", [6]),
        *make_stages("lm", [[0, 1, 4], [2, 3, 5]]),
        make_section("head", [4, 5]),
    ]
    text = report_page(make_plan(some, [], 9))
    cards = [
        line.split("<b>")[1].removesuffix("</div>").split("</b>")
        for line in text.splitlines()
        if 'class="lane"' in line
    ]
    assert cards == [
        ["rank 6", "vision"],
        ["2 ranks: 0-1", "lm_0"],
        ["rank 4", "lm_0, head"],
        ["2 ranks: 2-3", "lm_1"],
        ["rank 5", "lm_1, head"],
        ["2 ranks: 7-8", "idle"],
    ]
