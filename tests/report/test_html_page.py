"""The HTML page of a plan: what it says in words and bars, and what may stand in it."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from secc.driver.step_preview import add_simulated_step
from secc.report import html_page
from secc.report.bar_rows import baseline_chart, memory_chart, time_chart
from secc.report.html_page import ReportExtras, report_page
from secc.report.run_figures import make_run_figures
from secc.report.run_log import MAX_POINTS, make_curve, read_run_log
from secc.report.section_graph_figure import section_graph_figure
from secc.report.step_figures import COMPUTATION_KINDS, FIRST_COMPUTATION_CODE
from secc.report.text_table import TextTable
from secc.runtime.plan.schema import LossTerm, Plan
from secc.runtime.schedule.scheduler import schedule_batch
from secc.simulate.events import SimulatedStep
from secc.simulate.simulator import simulate
from secc.simulate.step_figures import make_step_figures
from tests.runtime.schedule.plan_strategies import (
    make_edge,
    make_plan,
    make_sample,
    make_section,
    make_stages,
    stage_edges,
)

IMAGES = ("images",)
PAGE_FILES = Path(html_page.__file__).parent / "page"
MAX_PAGE_BYTES = 2_000_000


def make_vlm(ranks: int = 4, samples: int = 8) -> tuple[Plan, SimulatedStep]:
    """An image encoder on a quarter of the ranks, and a language model in two stages on the others."""
    first = ranks // 4
    rest = (ranks - first) // 2
    stages = make_stages("lm", [range(first, first + rest), range(first + rest, first + 2 * rest)])
    vision = make_section("vision", range(first), when=IMAGES, forward="300*I", backward="500*I")
    edges = [make_edge("vision", "lm_0"), *stage_edges(stages)]
    plan = make_plan(
        [vision, *stages], [dataclasses.replace(e, bytes_per_sample=1024.0) for e in edges], ranks
    )
    plan = dataclasses.replace(plan, global_batch=samples, terms=(LossTerm("loss", "lm_1", "1"),))
    batch = [make_sample(i, *(IMAGES if i % 2 else ()), length=8 + i % 5) for i in range(samples)]
    step = simulate(plan, batch, schedule_batch(plan, batch))
    return add_simulated_step(plan, step), step


PLAN, STEP = make_vlm()
PAGE = report_page(PLAN, ReportExtras(make_step_figures(STEP)))


class _Texts(HTMLParser):
    """Texts of elements with a class, and all headings."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.by_class: dict[str, list[str]] = {}
        self._open: list[tuple[str, list[str]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = (dict(attrs).get("class") or "").split()
        for name in classes:
            self.by_class.setdefault(name, []).append("")
        if tag not in ("meta", "br", "input"):
            self._open.append((tag, classes))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        for _, classes in self._open:
            for name in classes:
                self.by_class[name][-1] += data


def read_page_data(page: str) -> dict[str, Any]:
    return json.loads(re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.S)[0])


def test_ranks_with_equal_sections_share_a_bar() -> None:
    some = [
        make_section("vision", [6]),
        *make_stages("lm", [[0, 1, 4], [2, 3, 5]]),
        make_section("head", [4, 5]),
    ]
    plan = make_plan(some, [*stage_edges(some[1:3])], 9)
    batch = [make_sample(i) for i in range(3)]
    figures = make_step_figures(simulate(plan, batch, schedule_batch(plan, batch)))
    chart = time_chart(plan, figures)
    assert [(row.name, row.about) for row in chart.folded] == [
        ("vision", "rank 6"),
        ("lm_0", "ranks 0-1"),
        ("lm, head", "rank 4"),
        ("lm_1", "ranks 2-3"),
        ("lm, head", "rank 5"),
        ("idle", "ranks 7-8"),
    ]
    assert [(row.name, row.about) for row in chart.rows] == [
        ("vision", "rank 6"),
        ("lm", "ranks 0-3"),
        ("lm, head", "ranks 4-5"),
        ("idle", "ranks 7-8"),
    ]


def test_parts_of_the_time_add_up_to_the_step() -> None:
    figures = make_step_figures(STEP)
    assert figures.seconds == STEP.end / 1e9
    for times in figures.times:
        assert sum(part.seconds for part in times.parts) == pytest.approx(figures.seconds)
    for row in time_chart(PLAN, figures).rows:
        assert sum(part.share for part in row.parts) == pytest.approx(1.0)
        assert row.parts[0].name == (
            f"{row.name} forward" if row.name != "idle" else "waiting for other ranks"
        )
    assert "waiting for other ranks" in time_chart(PLAN, figures).rows[1].summary


def test_timeline_has_every_computation_with_its_samples() -> None:
    timeline = make_step_figures(STEP).timeline
    found = set[tuple[str, str, int, tuple[int, ...]]]()
    for row in timeline["rows"]:
        at = 0
        for gap, length, code in zip(*[iter(row["bars"])] * 3, strict=True):
            start, at = at + gap, at + gap + length
            if code >= FIRST_COMPUTATION_CODE:
                micro, kind = divmod(code - FIRST_COMPUTATION_CODE, len(COMPUTATION_KINDS))
                section, _, _, samples = timeline["micros"][micro]
                name = timeline["sections"][section][0]
                found.add((name, COMPUTATION_KINDS[kind], start * timeline["ns_per_tick"], tuple(samples)))
    micros = STEP.schedule.micro_batches
    assert found == {
        (c.section, c.kind, c.start, tuple(STEP.samples[p].id for p in micros[c.section][c.micro].samples))
        for c in STEP.compute
    }
    assert timeline["samples"][:2] == [[0, ""], [1, "images"]] and timeline["left_out"] == 0


def test_graph_says_what_travels_and_what_switches_sections_on() -> None:
    figure = section_graph_figure(PLAN)
    assert [(c.name, c.mode_text, c.active_for) for c in figure.cards] == [
        ("vision", "trained", "images"),
        ("lm", "trained", "every sample"),
    ]
    assert [(e.source_name, e.target_name, e.text) for e in figure.edges] == [
        ("vision", "lm", "8 KiB a step, 8 KiB back"),
        ("lm", "loss", ""),
    ]
    texts = _Texts(PAGE).by_class
    assert texts["when"] == ["on for images · 4 of 8 samples"]
    assert len(texts["section-card"]) == 3 and "ranks 1-2" in texts["card-ranks"][1]


def test_page_starts_with_a_verdict_and_warnings() -> None:
    headline = re.findall(r"<h1>(.*?)</h1>", PAGE)
    assert headline and headline[0].startswith("A step of 8 samples is predicted to take ")
    assert PAGE.index("<h1>") < PAGE.index("Know before you run") < PAGE.index('id="sections"')
    assert "What to do" in PAGE and "secc profile MODEL.py" in PAGE
    headings = [unescape(h) for h in re.findall(r"<h2[^>]*>(.*?)<", PAGE)]
    assert [h.strip() for h in headings] == [
        "Know before you run",
        "What runs where",
        "Where the time of a step goes",
        "One step, rank by rank",
        "Memory of the fullest rank",
        "What else was considered",
        "Published schemes on the same ranks",
        "How sure the figures are",
        "All decisions",
    ]


def test_memory_is_shown_by_kind() -> None:
    held = {"weights": 4096, "gradients of an operation": 1024, "other sections on these ranks": 512}
    reasons = {"vision": {"memory": {"parts": held, "used": 5632, "usable": 1 << 33}}}
    plan = dataclasses.replace(make_plan([make_section("vision", [0])], [], 1), reasons=reasons)
    (row,) = memory_chart(plan).rows
    assert [(part.name, part.amount) for part in row.parts] == [
        ("weights", "4 KiB"),
        ("buffers and messages", "1 KiB"),
    ]
    assert row.value == "5 KiB" and sum(part.share for part in row.parts) == 1.0


def test_baselines_are_sorted_and_may_not_fit() -> None:
    chart = baseline_chart(1.0, {"uniform": (2.0, "dp 4"), "mimo": (None, "no layout fits")})
    assert [(row.name, row.value, row.marked) for row in chart.rows] == [
        ("this plan", "1 s", True),
        ("uniform", "2 s · 2.00×", False),
        ("mimo", "does not fit", False),
    ]


def test_a_run_is_compared_with_its_plan(tmp_path: Path) -> None:
    steps = [
        {"step": i, "loss": 4.0 / i, "grad_norm": 1.0, "samples": 8, "tokens": 8, "step_time_s": 2.0}
        for i in range(1, 6)
    ]
    lines = [*steps, {"step": 5, "eval": "eval", "loss": 1.5, "step_time_s": 1.0}, {**steps[4], "loss": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 6, "lo')
    times = {"forward_s": 1.0, "backward_s": 2.0, "predicted_forward_s": 0.5, "predicted_backward_s": 1.0}
    entry = {"sections": {"lm": times | {"wait_s": 1.0, "exposed_s": 0.5}}, "mix": []}
    (tmp_path / "times.jsonl").write_text(
        "".join(json.dumps({"step": i} | entry) + "\n" for i in range(1, 6))
    )
    log = read_run_log(PLAN, tmp_path)
    assert (log.steps, log.first_loss, log.last_loss, log.median_s) == (5, 4.0, 0.5, 2.0)
    assert log.evaluations == {"eval": ((5.0, 1.5, 1.5, 1.5),)}
    (section,) = log.sections
    ranks = len(PLAN.user_sections[1].mesh.ranks)
    assert (section.measured_s, section.predicted_s) == (3.0, 1.5)
    assert section.wait_share == pytest.approx(1.0 / (ranks * 2.0))
    assert section.exposed_share == pytest.approx(0.5 / (ranks * 2.0))
    run = make_run_figures(PLAN, log, TextTable("Drift", (), ()), ["nothing drifted"])
    assert "3 s · 2.00×" in {row.value for row in run.times.rows}
    assert len(run.waits.rows) == 2
    page = report_page(PLAN, ReportExtras(run=run))
    assert "nothing drifted" in page and read_page_data(page)["run"]["losses"][0] == [1.0, 4.0, 4.0, 4.0]


def test_long_curves_are_thinned_and_keep_their_extremes() -> None:
    curve = make_curve([(i, float(i % 10)) for i in range(10 * MAX_POINTS)] + [(10**6, float("nan"))])
    assert len(curve) == MAX_POINTS and all(low == 0.0 and high == 9.0 for _, _, low, high in curve)


def test_pages_of_a_thousand_ranks_are_below_two_megabytes() -> None:
    plan, step = make_vlm(ranks=1024, samples=2048)
    page = report_page(plan, ReportExtras(make_step_figures(step)))
    rows = read_page_data(page)["timeline"]["rows"]
    assert len(rows) == 1024 and len(page.encode()) < MAX_PAGE_BYTES


def test_page_refers_to_no_network() -> None:
    library = (PAGE_FILES / "libraries.js").read_text()
    rest = PAGE.replace(library, "")
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", rest)
    assert "@import" not in PAGE and not re.findall(r"url\((?!#)", rest)
    assert not re.findall(r"\b(fetch|XMLHttpRequest|WebSocket|sendBeacon)\(|\bimport\(|\beval\(", PAGE)


def test_libraries_are_those_that_are_declared_and_carry_their_licences(root: Path) -> None:
    text = (PAGE_FILES / "libraries.js").read_text()
    declared = json.loads((root / "tools/report_libraries/package.json").read_text())["dependencies"]
    assert all(f"{name} {version}" in text for name, version in declared.items())
    assert "Chris Pettitt" in text and "Mike Bostock" in text and text.count("Copyright") >= 3
    assert all(name in (root / "NOTICE").read_text() for name in declared)


@pytest.mark.skipif(which("node") is None, reason="needs node to parse JavaScript")
@pytest.mark.parametrize("name", sorted(path.name for path in PAGE_FILES.glob("*.js")))
def test_scripts_are_well_formed(name: str) -> None:
    found = subprocess.run(["node", "--check", PAGE_FILES / name], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
