"""The checks for a machine with a GPU run here on the CPU at small sizes: the same code."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tools.gpu_day.checks import CHECKS
from tools.gpu_day.kernel_checks import _judge_speed
from tools.gpu_day.outcome import Outcome

ROOT = Path(__file__).parents[2]


def run_dry(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "tools" / "gpu_day.sh"), "--dry", "--out", str(out), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COMMIT": "abc"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_check_writes_its_result_and_a_page(tmp_path: Path) -> None:
    found = run_dry(tmp_path, "--only", "card")
    assert found.returncode == 0, found.stdout + found.stderr
    assert json.loads((tmp_path / "card.json").read_text())["failures"] == []
    assert "| card |" in (tmp_path / "page.md").read_text()


@pytest.mark.slow
def test_a_call_keeps_results_and_goes_on(tmp_path: Path) -> None:
    first = run_dry(tmp_path, "--only", "card", "kernels-exact")
    assert first.returncode == 0, first.stdout + first.stderr
    found = json.loads((tmp_path / "kernels-exact.json").read_text())
    assert found["failures"] == [] and found["figures"]["shapes"] == 30 and found["commit"] == "abc"
    assert "| kernels-exact |" in (tmp_path / "page.md").read_text()
    written = (tmp_path / "kernels-exact.json").stat().st_mtime_ns
    second = run_dry(tmp_path, "--only", "kernels-exact", "links", "--minutes", "0")
    assert second.returncode == 1 and "links: left for the next call" in second.stdout
    assert (tmp_path / "kernels-exact.json").stat().st_mtime_ns == written


def test_a_machine_without_a_gpu_is_told(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "tools" / "gpu_day.sh"), "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    refused = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert refused.returncode == 2 and "error: no GPU found" in refused.stderr


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(1800)
def test_every_check_runs_dry(tmp_path: Path) -> None:
    result = run_dry(tmp_path, "--minutes", "29")
    assert result.returncode == 0, result.stdout + result.stderr
    assert all((tmp_path / f"{check.name}.json").exists() for check in CHECKS)


def test_speed_is_judged_launched_and_on_the_device(tmp_path: Path) -> None:
    def row(way: str, ms: float, graph_ms: float, share: float) -> dict[str, object]:
        sizes = {"case": "rms_norm", "model": "m", "rows": 8, "way": way, "failure": "", "memory_mib": 1.0}
        return sizes | {"ms": ms, "graph_ms": graph_ms, "of_bandwidth": share, "of_flops": 0.0}

    rows = [row("secc", 0.5, 0.1, 0.9), row("liger", 0.4, 0.2, 0.5), row("compile", 0.6, 0.0, 0.2)]
    (tmp_path / "results.json").write_text(json.dumps({"results": rows}))
    assert _judge_speed(tmp_path / "results.json", Outcome()).failures == [
        "rms_norm m: slower than liger (launched)"
    ]
    rows = [row("secc", 0.3, 0.3, 0.3), rows[1]]
    (tmp_path / "results.json").write_text(json.dumps({"results": rows}))
    assert _judge_speed(tmp_path / "results.json", Outcome()).failures == [
        "rms_norm m: 0.30 of what the card reaches, aim 0.85",
        "rms_norm m: slower than liger (replayed)",
    ]
