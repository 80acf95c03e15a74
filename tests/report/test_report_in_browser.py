"""The report in a real browser: Debian's Chromium, without a window, driven by Playwright.

Needs `pip install -e '.[browser]'` and a Chromium (`apt-get install chromium`, or its path in CHROMIUM). With
SECC_PICTURES=FOLDER the pictures of the pages are kept there, to be looked at.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from secc.cli import main
from secc.report.html_page import ReportExtras, report_page
from secc.runtime.schedule.scheduler import schedule_batch
from secc.simulate.simulator import simulate
from secc.simulate.step_figures import make_step_figures
from tests.report.test_html_page import make_vlm
from tests.runtime.schedule.plan_strategies import make_plan, make_sample, make_section

CHROMIUM = os.environ.get("CHROMIUM") or which("chromium") or which("chromium-browser")
MISSING = (
    "needs Playwright and axe: pip install -e '.[browser]'"
    if not all(map(importlib.util.find_spec, ("playwright", "axe_playwright_python")))
    else "needs Chromium: apt-get install chromium, or its path in CHROMIUM"
    if CHROMIUM is None
    else ""
)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
PHONE, WIDE = (390, 844), (1360, 900)


def run_command(*arguments: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code in (0, None)


@pytest.fixture(scope="module")
def pages(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports: of a compiled plan, of its run with baselines, and of a plan for 1,024 ranks."""
    folder = tmp_path_factory.mktemp("report")
    plan, logs = folder / "plan", folder / "logs"
    run_command(
        "compile", str(root / "examples/captions.py"), "-o", str(plan), "--cluster", "local:3",
        "--global-batch", "8", "--strategy", "apart",
    )  # fmt: skip
    run_command("run", str(plan), "--steps", "6", "--log-dir", str(logs))
    run_command("report", str(plan), str(logs), "--baselines", "uniform,colocate")
    large, step = make_vlm(ranks=1024, samples=1024)
    (folder / "large.html").write_text(report_page(large, ReportExtras(make_step_figures(step))))
    return {"plan": plan / "report.html", "run": logs / "report.html", "large": folder / "large.html"}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class _OpenedPage:
    """A page in the browser, and what its console said."""

    def __init__(
        self,
        browser: Any,
        path: Path,
        size: tuple[int, int] = WIDE,
        scheme: str = "light",
        bypass_csp: bool = False,
    ) -> None:
        view = {"width": size[0], "height": size[1]}
        self.context = browser.new_context(
            viewport=view, color_scheme=scheme, offline=True, bypass_csp=bypass_csp
        )
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_timeout(300)

    def __enter__(self) -> _OpenedPage:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def keep_picture(self, name: str) -> None:
        """Keep a picture of the whole page in the folder SECC_PICTURES, if it is given."""
        if folder := os.environ.get("SECC_PICTURES"):
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


@pytest.mark.parametrize("size", [PHONE, WIDE], ids=["phone", "wide"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["plan", "run", "large"])
def test_pages_show_without_errors(
    name: str, scheme: str, size: tuple[int, int], pages: dict[str, Path], chromium: Any
) -> None:
    with _OpenedPage(chromium, pages[name], size, scheme) as opened:
        page = opened.page
        assert opened.said == [] and opened.requests == [pages[name].as_uri()]
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0], "scrolls to the side"
        assert page.get_by_role("heading", level=1).inner_text().startswith("A step of ")
        for part in ("What runs where", "One step, rank by rank", "How sure the figures are"):
            assert page.get_by_role("region", name=part).is_visible()
        painted = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(int(part) for part in painted.removeprefix("rgb(").removesuffix(")").split(","))
        assert (brightness < 128) == (scheme == "dark")
        opened.keep_picture(f"{name}-{scheme}-{size[0]}")


@pytest.mark.parametrize("size", [PHONE, WIDE], ids=["phone", "wide"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_that_keeps_people_out(
    scheme: str, size: tuple[int, int], pages: dict[str, Path], chromium: Any
) -> None:
    """Contrast, names and roles, by the rules of axe-core, with all tables unfolded."""
    from axe_playwright_python.sync_playwright import Axe

    with _OpenedPage(chromium, pages["run"], size, scheme, bypass_csp=True) as opened:
        opened.page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        found = Axe().run(opened.page)
        assert found.violations_count == 0, found.generate_report()


def test_hostile_names_are_texts(tmp_path: Path, chromium: Any) -> None:
    name = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\x1b[31m'
    plan = make_plan([make_section(name, [0, 1])], [], 2)
    batch = [make_sample(i) for i in range(4)]
    step = simulate(plan, batch, schedule_batch(plan, batch))
    path = tmp_path / "page.html"
    path.write_text(report_page(plan, ReportExtras(make_step_figures(step))))
    with _OpenedPage(chromium, path) as opened:
        page = opened.page
        assert opened.said == [] and page.locator("img").count() == 0
        assert page.locator(".card-name").first.inner_text() == name.replace("\x1b", "\\x1b")
        page.get_by_label("Follow sample").select_option("0")
        assert name[:40] in page.locator("[data-journey]").inner_text()


def test_graph_is_arranged_with_a_wire_for_each_edge(pages: dict[str, Path], chromium: Any) -> None:
    with _OpenedPage(chromium, pages["plan"]) as opened:
        graph = opened.page.get_by_role("group", name="Graph of the sections")
        cards = graph.locator("[data-card]")
        boxes = [cards.nth(i).bounding_box() for i in range(cards.count())]
        assert len(boxes) == 3 and graph.locator(".wire").count() == 2
        assert all(a["x"] + a["width"] < b["x"] for a, b in pairwise(boxes))
        assert graph.get_by_text("on for picture").is_visible()


def test_a_sample_is_followed_by_mouse_and_by_keyboard(pages: dict[str, Path], chromium: Any) -> None:
    with _OpenedPage(chromium, pages["plan"]) as opened:
        page = opened.page
        follow = page.get_by_label("Follow sample")
        sample = follow.locator("option", has_text="(picture)").first
        follow.select_option(sample.get_attribute("value"))
        stops = page.locator("[data-journey] li").all_inner_texts()
        assert len(stops) == 4 and "encoder forward" in stops[0] and "encoder backward" in stops[3]
        canvas = page.locator("canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        page.mouse.move(box["x"] + 195, box["y"] + 36)
        tip = page.get_by_role("status")
        assert "micro-batch" in tip.inner_text() and "samples" in tip.inner_text()
        page.mouse.move(0, 0)
        assert not tip.is_visible()


def test_timeline_zooms_by_buttons_and_keys(pages: dict[str, Path], chromium: Any) -> None:
    with _OpenedPage(chromium, pages["plan"]) as opened:
        page = opened.page
        picture = "document.querySelector('canvas').toDataURL()"
        whole = page.evaluate(picture)
        page.get_by_role("button", name="Zoom in").click()
        page.wait_for_timeout(100)
        zoomed = page.evaluate(picture)
        timeline = page.get_by_role("application")
        timeline.focus()
        timeline.press("ArrowRight")
        page.wait_for_timeout(100)
        moved = page.evaluate(picture)
        timeline.press("0")
        page.wait_for_timeout(100)
        assert len({whole, zoomed, moved}) == 3 and page.evaluate(picture) == whole
        assert opened.said == []


def test_charts_are_read_with_arrow_keys(pages: dict[str, Path], chromium: Any) -> None:
    with _OpenedPage(chromium, pages["run"]) as opened:
        page = opened.page
        losses = page.get_by_role("group", name="Loss by step")
        losses.focus()
        losses.press("End")
        assert page.locator("[data-chart=losses] .readout").inner_text().startswith("step 6: loss ")
        chart = page.get_by_role("group", name="Step over memory of the alternatives")
        chart.focus()
        chart.press("Home")
        assert "step " in page.locator("[data-chart=alternatives] .readout").inner_text()
        points = chart.locator(".point").count()
        page.get_by_role("button", name="encoder", exact=True).click()
        assert 0 < chart.locator(".point").count() < points
        for heading in ("Measured against predicted", "Waits", "Drift"):
            assert page.get_by_role("heading", name=heading).is_visible()
        assert page.get_by_role("table", name="steps of published schemes").get_by_role("row").count() == 3
        assert opened.said == []


def test_parts_are_reached_by_keyboard(pages: dict[str, Path], chromium: Any) -> None:
    with _OpenedPage(chromium, pages["plan"]) as opened:
        page = opened.page
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "To the verdict"
        details = page.get_by_role("group").filter(has_text="Bottlenecks")
        summary = page.locator("summary", has_text="Bottlenecks")
        summary.focus()
        summary.press("Enter")
        assert page.get_by_role("region", name="Bottlenecks").is_visible() and details.count() > 0


def test_pages_of_a_thousand_ranks_open_and_draw_all_rows(pages: dict[str, Path], chromium: Any) -> None:
    with _OpenedPage(chromium, pages["large"]) as opened:
        page = opened.page
        page.get_by_role("button", name="Flatter rows").click()
        page.get_by_role("button", name="Taller rows").click()
        rows = page.evaluate(
            "JSON.parse(document.getElementById('page-data').textContent).timeline.rows.length"
        )
        assert rows == 1024 and opened.said == []
