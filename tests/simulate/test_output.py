"""What people and other tools get of a simulated step: trace, drawings and the command."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from secc.cli import main
from secc.runtime.schedule.scheduler import schedule_batch
from secc.simulate.chrome_trace import make_chrome_trace
from secc.simulate.drawing import render_html_page, render_svg, render_terminal
from secc.simulate.drawing_rows import MESSAGE_WAIT, build_rows
from secc.simulate.global_batches import load_global_batches
from secc.simulate.simulator import simulate
from secc.simulate.step_measures import measure_step
from tests.runtime.captioner_plans import APART, UNEVEN, write_plan
from tests.runtime.schedule.plan_strategies import (
    make_edge,
    make_plan,
    make_sample,
    make_section,
    make_stages,
    stage_edges,
)
from tests.simulate.test_simulator import IMAGE, cluster, run, trained, vlm

STEP = run(
    trained(vlm(replicas=2, cluster=cluster()), lm=10),
    [make_sample(7, *IMAGE), make_sample(8), make_sample(9)],
)


def test_a_trace_has_an_event_for_each_computation_and_both_ends_of_each_message():
    events = make_chrome_trace([STEP])["traceEvents"]
    compute = [e["args"] for e in events if e["ph"] == "X" and e["args"]["kind"] in "FB"]
    assert {
        "kind": "F",
        "section": "vision",
        "replica": 0,
        "stage": 0,
        "microbatch": 0,
        "samples": [7],
    } in compute
    assert len(compute) == 8
    sends = [e for e in events if e.get("cat") == "SEND"]
    assert sends[0]["args"].keys() == {"kind", "edge", "direction", "src", "dst", "samples", "bytes"}
    assert [(e["pid"], e["args"]["samples"]) for e in sends] == [(0, [7]), (sends[0]["args"]["dst"], [7])]
    assert len([e for e in events if e.get("cat") == "RECV"]) == len(sends)
    assert {e["pid"] for e in events} == {0, 1, 2}


def test_steps_follow_each_other_in_a_trace():
    one, two = (make_chrome_trace([STEP] * n)["traceEvents"] for n in (1, 2))
    ends = [max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") for events in (one, two)]
    assert ends == [pytest.approx(STEP.end / 1e3), pytest.approx(2 * STEP.end / 1e3)]


def test_a_terminal_shows_a_line_for_each_rank_and_what_is_idle():
    lines = ["".join(part for part, _ in line) for line in render_terminal(STEP, 60)]
    assert len(lines) == 5 and all(len(line) <= 60 for line in lines[:4])
    assert lines[0].startswith("0 vision") and "█" in lines[0] and "▒" in lines[0] and "·" in lines[0]
    assert lines[3].split() == ["0", *f"{STEP.end / 2e6:.4g} ms".split(), *f"{STEP.end / 1e6:.4g} ms".split()]


def test_the_ranks_of_a_replica_share_a_row_and_stages_stand_below_each_other():
    vision = make_section("vision", [8, 9], when=IMAGE)
    made = make_plan(
        [vision, *make_stages("lm", [[0, 1, 4, 5], [2, 3, 6, 7]], tp=2)],
        [make_edge("vision", "lm_0"), *stage_edges(make_stages("lm", [[0], [1]]))],
        11,
    )
    found = build_rows(
        simulate(made, some := [make_sample(i, *IMAGE) for i in range(4)], schedule_batch(made, some)), 64
    )
    assert [r.label for r in found.rows] == [
        "8 vision",
        "9 vision",
        "0-1 lm_0",
        "2-3 lm_1",
        "4-5 lm_0",
        "6-7 lm_1",
        "10 idle",
    ]
    assert found.left_out == 0 and all(r.bars for r in found.rows[:6])
    numbers = [{b.section for b in r.bars} for r in found.rows]
    assert numbers[0] == {0} and numbers[2] == numbers[3] == {1}


def test_of_many_ranks_every_section_keeps_some_rows():
    made = make_plan(
        [make_section("vision", [0], when=IMAGE), make_section("lm", range(1, 40))],
        [make_edge("vision", "lm")],
        40,
    )
    step = simulate(made, some := [make_sample(i, *IMAGE) for i in range(40)], schedule_batch(made, some))
    found = build_rows(step, 8)
    assert [r.label for r in found.rows] == [
        "0 vision",
        *(f"{1 + k * 38 // 6} lm" for k in range(7)),
    ] and found.left_out == 32
    assert "(8 more ranks" in "".join(part for line in render_terminal(step, 80) for part, _ in line)


def test_waits_for_messages_are_drawn_unlike_idle_time():
    kinds = [(b.kind, b.end - b.start) for b in build_rows(STEP, 8).rows[0].bars]
    assert kinds[:3] == [("F", 100), (MESSAGE_WAIT, 10 + 32 + 4), ("B", 200)]


def test_a_drawing_is_well_formed_and_names_samples():
    root = ET.fromstring(render_svg(STEP))
    titles = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any(re.fullmatch(r"F vision 0: samples 7, 0\.000 ms", t) for t in titles)
    html = render_html_page(STEP, measure_step(STEP))
    assert (
        html.startswith("<!doctype html>")
        and "language" not in html
        and "vision (busy" in html
        and "<svg" in html
    )


def test_batches_are_those_that_ranks_train_on(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan", APART)
    first, second = load_global_batches(tmp_path / "plan", plan, steps=2)
    assert [s.id for s in first] == list(range(8))
    assert [s.id for s in second][:2] == [8, 9]
    assert all((s.sizes["n_images"] > 0) == bool(s.pattern) for s in second) and any(
        s.pattern for s in second
    )
    shuffled = next(load_global_batches(tmp_path / "plan", plan, seed=1, shuffle=True))
    assert [s.id for s in shuffled] != [s.id for s in first]


def test_the_command_prints_stable_keys_and_writes_what_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(tmp_path / "plan", UNEVEN)
    files = [tmp_path / name for name in ("trace.json", "step.html", "step.svg")]
    main_(
        [
            "simulate",
            str(tmp_path / "plan"),
            "--trust-model",
            "--json",
            "--steps",
            "2",
            "--trace",
            str(files[0]),
            "--draw",
            str(files[1]),
        ]
    )
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= {
        "step_time_s",
        "schedule_bound_s",
        "plan_bound_s",
        "gpus",
        "mfu",
        "sections",
        "baselines",
    }
    assert found["step_time_s"] >= found["schedule_bound_s"] >= found["plan_bound_s"] > 0
    assert found["gpus"] == 3 and found["sections"]["decoder"]["gpus"] == 2
    assert json.loads(files[0].read_text())["traceEvents"]
    main_(["simulate", str(tmp_path / "plan"), "--trust-model", "--draw", str(files[2])])
    assert "schedule bound" in capsys.readouterr().out
    assert all(f.exists() for f in files)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--order", "random"], "unknown --order"),
        (["--draw", "step.png"], "an .svg or .html file"),
        (["--trace", "no/t.json"], "cannot write"),
    ],
)
def test_bad_input_is_one_message(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    write_plan(tmp_path / "plan", APART)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "plan", "--trust-model", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def main_(arguments: list[str]) -> None:
    """Run a command that must end well."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code in (0, None)


def test_a_changed_model_file_is_refused(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan", APART)
    model = tmp_path / "plan" / "model.py"
    model.write_text(model.read_text() + "\n# changed\n")
    with pytest.raises(Exception, match="has changed"):
        next(load_global_batches(tmp_path / "plan", plan))


def test_a_plan_of_the_fixture_simulates_with_every_section_busy(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan", UNEVEN)
    _, samples = load_global_batches(tmp_path / "plan", plan, steps=2)
    m = measure_step(simulate(plan, samples, schedule_batch(plan, samples)))
    assert all(0 < share.busy <= 1 for share in m.sections.values())
