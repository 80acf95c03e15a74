"""Runs report to experiment trackers under the names that other tools use; trackers that fail do not end a
run."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from secc.errors import UserError
from secc.runtime.monitoring.trackers import TrackedRun, check_installed, open_trackers, parse_tracker_names
from secc.runtime.plan.plan_file import load_plan
from tests.e2e.harness import compile_and_write, run_plan_ranks
from tests.runtime.captioner_plans import ALONE, FIXTURE, write_plan
from tests.runtime.run_processes import start_run

MODEL = Path(__file__).parents[2] / "models" / "evaluated.py"


@pytest.mark.gloo
def test_tensorboard_has_what_the_run_measured(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingTypeStubs, reportMissingImports]
        EventAccumulator,
    )

    compile_and_write(
        MODEL, tmp_path / "plan", check=False, cluster="local:2", global_batch=8, strategy="apart"
    )
    arguments = ["--steps", "3", "--eval-every", "3", "--report-to", "tensorboard", "--workers", "0"]
    run_plan_ranks(tmp_path / "plan", 2, [*arguments, "--log-dir", str(tmp_path / "logs")])
    lines = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    (folder,) = (tmp_path / "logs" / "tensorboard").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()

    def read(name: str) -> list[tuple[int, float]]:
        return [(e.step, e.value) for e in events.Scalars(name)]

    steps = [line for line in lines if "eval" not in line]
    for name, key in (("train/loss", "loss"), ("train/grad_norm", "grad_norm"), ("train/ce", "ce")):
        assert read(name) == [(m["step"], pytest.approx(m[key], rel=1e-6)) for m in steps]
    assert read("train/learning_rate") == [(s, pytest.approx(1e-4)) for s in (1, 2, 3)]
    rates = [m["tokens"] / m["step_time_s"] / 2 for m in steps]
    assert [value for _, value in read("throughput(tps)")] == pytest.approx(rates, rel=1e-5)
    for line in (line for line in lines if "eval" in line):
        assert read(f"eval/{line['eval']}_loss") == [(3, pytest.approx(line["loss"], rel=1e-6))]
        assert read(f"eval/{line['eval']}_perplexity") == [(3, pytest.approx(line["perplexity"], rel=1e-6))]
    for name in (s.name for s in load_plan(tmp_path / "plan").user_sections):
        busy, wait = (read(f"section/{name}/{kind}") for kind in ("busy", "wait"))
        assert all(0 < b < 1 and 0 <= w < 1 for (_, b), (_, w) in zip(busy, wait, strict=True))
        assert read(f"section/{name}/exposed_communication") == [(s, 0.0) for s in (1, 2, 3)]  # one rank each
    with pytest.raises(KeyError):
        events.Scalars("mfu(%)")  # the plan knows no peak of a CPU


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_tracker_runs_offline(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(name) is None:  # importing trackio here would settle its folder
        pytest.skip(f"{name} is not installed")
    for key in ("WANDB_API_KEY", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_DIR"):
        monkeypatch.delenv(key, raising=False)
    (tmp_path / "plan.json").write_text("{}")
    (tracker,) = open_trackers([name], tmp_path / "logs", "secc-test", {"plan/hash": "abc"})
    for step in (1, 2):
        tracker.log({"train/loss": 1.0 / step, "mfu(%)": 40.0}, step)
    tracker.log_texts({"samples/poem": "roses are red"}, 1)  # of a step before the present one
    tracker.add_files([tmp_path / "plan.json"])
    tracker.close()
    files = [p for p in (tmp_path / "logs").rglob("*") if p.is_file()]
    match name:
        case "wandb":
            assert [p.suffix for p in files].count(".wandb") == 1
            (table,) = [json.loads(p.read_text()) for p in files if p.name.endswith(".table.json")]
            assert table["columns"] == ["step", "name", "text"]
            assert table["data"] == [[1, "samples/poem", "roses are red"]]
        case "trackio":
            (database,) = [p for p in files if p.suffix == ".db"]
            with closing(sqlite3.connect(database)) as connection:
                rows = connection.execute("SELECT metrics FROM metrics ORDER BY id").fetchall()
            losses = [json.loads(row[0])["train/loss"] for row in rows if b"train/loss" in row[0]]
            assert losses == [1.0, 0.5]
            (table,) = [json.loads(row[0])["samples"] for row in rows if b"samples" in row[0]]
            assert table["_value"] == [{"step": 1, "name": "samples/poem", "text": "roses are red"}]
        case _:
            client = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{tmp_path}/logs/mlflow.db")
            (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
            history = client.get_metric_history(run.info.run_id, "train/loss")
            assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 0.5)]
            assert run.data.metrics["mfu___"] == 40.0
            assert [a.path for a in client.list_artifacts(run.info.run_id, "plan")] == ["plan/plan.json"]
            assert any(p.name == "plan.json" for p in files)
            (sample,) = [p for p in files if p.name == "step_00000001.txt"]
            assert sample.parts[-3:-1] == ("samples", "poem") and sample.read_text() == "roses are red"


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_generated_texts_are_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingTypeStubs, reportMissingImports]
        EventAccumulator,
    )

    own = """

def generate_samples(model):
    return {"sum": str(float(model.embed.weight.sum())), "ticks": "```"}
"""
    write_plan(tmp_path / "plan", ALONE, source=(FIXTURE / "model.py").read_text() + own)
    arguments = ["--steps", "3", "--save", str(tmp_path / "saved"), "--workers", "0", "--no-first-check"]
    process = start_run(tmp_path / "plan", *arguments, "--report-to", "tensorboard")
    _, said = process.communicate(timeout=400)
    assert process.returncode == 0, said
    written = [json.loads(line) for line in (tmp_path / "plan/logs/samples.jsonl").read_text().splitlines()]
    (folder,) = (tmp_path / "plan" / "logs" / "tensorboard").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    assert {(s["step"], s["name"]) for s in written} == {(3, "sum"), (3, "ticks")}
    for sample in written:
        (event,) = events.Tensors(f"samples/{sample['name']}/text_summary")
        _, *lines, _ = event.tensor_proto.string_val[0].decode().splitlines()
        assert event.step == 3 and lines == [sample["text"]]


class FailingTracker:
    def __init__(self) -> None:
        self.calls = 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.calls += 1
        raise ConnectionError("no route to host")

    def log_texts(self, texts: Mapping[str, str], step: int) -> None:
        raise AssertionError("a tracker that failed is left out")

    def add_files(self, files: Sequence[Path]) -> None:
        raise AssertionError("a tracker that failed is left out")

    def close(self) -> None:
        raise AssertionError("a tracker that failed is left out")


def test_a_failing_tracker_is_named_once_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = FailingTracker()
    run = TrackedRun({"far": tracker})
    run.log({"train/loss": 1.0}, 1)
    run.log({"train/loss": 1.0}, 2)
    run.log_texts({"samples": "once"}, 2)
    run.close()
    assert tracker.calls == 1 and capsys.readouterr().err.count("far fails") == 1


def test_unknown_and_missing_trackers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_tracker_names("wandb, tensorboard,wandb") == ("wandb", "tensorboard")
    with pytest.raises(UserError, match="unknown tracker 'comet'"):
        parse_tracker_names("comet")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError) as refused:
        check_installed(["wandb"])
    assert "secc[wandb]" in refused.value.remedy
