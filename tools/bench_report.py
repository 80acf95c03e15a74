"""Measures report.html in a browser: its size, and how long it takes to open.

    python -m tools.bench_report PLAN ...      plan directories; writes their reports to a temporary folder

Needs Playwright (`pip install -e '.[browser]'`) and Chromium (`apt-get install chromium`, or its path in
CHROMIUM). A page is opened several times in a browser that runs already, and the shortest time counts: from
navigation until the graph, the charts and the first screen of the timeline are drawn. Prints Markdown;
`--json FILE` writes the table, which says what its columns mean.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from shutil import which
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

from secc.api.plan_report import write_report
from secc.runtime.plan.plan_file import load_plan
from tools.benchmark_table import BenchmarkTable, add_json_option

COLUMNS = ("plan", "ranks", "rows drawn", "bars", "kB", "written in, cpu s", "open, s", "open, cpu s")
ABOUT = (
    "The report of each plan with a simulated step, in headless Chromium of 1360 x 900 pixels: rows and bars"
    " of its timeline, its size, processor time of writing it (with simulating the step), the shortest of the"
    " openings until the page is drawn, and the least processor time of an opening in all of the browser."
)


def measure_openings(browser: Any, path: Path, repeats: int) -> tuple[float, float]:
    """Opens a page `repeats` times; returns the least seconds, and the least processor seconds."""
    seconds: list[float] = []
    spent: list[float] = []
    for _ in range(repeats):
        context = browser.new_context(viewport={"width": 1360, "height": 900})
        page = context.new_page()
        before = _browser_cpu_seconds()
        page.goto(path.as_uri())
        # Two frames after the load event, so that what it has drawn is on the screen.
        page.evaluate("new Promise((shown) => requestAnimationFrame(() => requestAnimationFrame(shown)))")
        seconds.append(page.evaluate("performance.now()") / 1e3)
        spent.append(_browser_cpu_seconds() - before)
        context.close()
    return min(seconds), min(spent)


def _browser_cpu_seconds() -> float:
    """Processor seconds of all processes below this one."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended in between
        children.setdefault(int(fields[1]), []).append(int(entry.name))
        ticks[int(entry.name)] = int(fields[11]) + int(fields[12])
    below, todo = 0, [*children.get(os.getpid(), [])]
    while todo:
        process = todo.pop()
        below += ticks.get(process, 0)
        todo += children.get(process, [])
    return below / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measures the reports of the plans that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plans", nargs="+", type=Path, metavar="PLAN")
    parser.add_argument("--repeats", type=int, default=5, help="openings of each page")
    add_json_option(parser)
    options = parser.parse_args()
    table = BenchmarkTable(COLUMNS, ABOUT, options.json)
    chromium = os.environ.get("CHROMIUM") or which("chromium") or which("chromium-browser")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for plan in options.plans:
            start = time.process_time()
            path = write_report(plan, output=Path(folder) / f"{plan.name}.html")
            written = time.process_time() - start
            seconds, spent = measure_openings(browser, path, options.repeats)
            rows, bars = _count_timeline(browser, path)
            size = round(path.stat().st_size / 1000)
            ranks = load_plan(plan).world_size
            table.add_row(
                plan.name, ranks, rows, bars, size, f"{written:.1f}", f"{seconds:.2f}", f"{spent:.2f}"
            )
        browser.close()


def _count_timeline(browser: Any, path: Path) -> tuple[int, int]:
    """(rows, bars) of a page's timeline."""
    page = browser.new_page()
    page.goto(path.as_uri())
    rows = "(JSON.parse(document.getElementById('page-data').textContent).timeline?.rows ?? [])"
    counts = page.evaluate(f"{rows}.map((row) => row.bars.length / 3)")
    page.close()
    return len(counts), sum(counts)


if __name__ == "__main__":
    main()
