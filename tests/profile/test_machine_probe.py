"""Collectives measured between real processes, and their cluster file."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.cluster import COLLECTIVES, MeasuredRing, parse_cluster
from secc.cluster.description import known_kind
from secc.profile.machine_probe import MachineProbe, fit_lost_rows, time_collectives_over, to_cluster_yaml
from secc.profile.time_collectives import fit_rings

PROBED = MachineProbe(
    "a processor", "cpu", 2, 8 << 30, {"f32": 100.0, "bf16": 50.0}, {}, 1e10, 30_000, 4e9, kind="cpu"
)


def test_cluster_file_without_collectives(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    path.write_text(to_cluster_yaml(PROBED))
    assert parse_cluster(str(path)).inside.rings == ()


def test_cluster_file_holds_measured_collectives(tmp_path: Path) -> None:
    path, ring = tmp_path / "here.yaml", MeasuredRing("all_reduce", 2, 120_000, 17 * 10**8)
    path.write_text(to_cluster_yaml(MachineProbe(**{**vars(PROBED), "rings": [ring]})))
    cluster = parse_cluster(str(path))
    assert cluster.inside.rings == cluster.between.rings == (ring,)


def test_lost_rows_are_where_a_line_through_the_times_meets_none(tmp_path: Path) -> None:
    assert fit_lost_rows({rows: 8 * (rows + 40) * 1500.0 for rows in (16, 64, 256)}) == 40
    assert fit_lost_rows({rows: 3000.0 * rows for rows in (16, 64, 256)}) == 0
    path = tmp_path / "here.yaml"
    path.write_text(to_cluster_yaml(MachineProbe(**{**vars(PROBED), "expert_lost_rows": 40})))
    assert parse_cluster(str(path)).device.expert_lost_rows == 40


def test_one_gpu_has_the_links_of_its_preset(tmp_path: Path) -> None:
    path, rates = tmp_path / "here.yaml", {"f32": 50_000.0, "bf16": 700_000.0}
    name = "NVIDIA H100 80GB HBM3"
    one = MachineProbe(name, "cuda", 1, 79 << 30, rates, {}, 3e12, None, None, kind=known_kind(name) or "")
    path.write_text(to_cluster_yaml(one))
    found, preset = parse_cluster(str(path)), parse_cluster("1x1xH100")
    assert (found.device.kind, found.inside, found.between) == ("H100", preset.inside, preset.between)
    assert found.device.memory_bytes_per_s == 3 * 10**12
    unknown = MachineProbe("some card", "cuda", 1, 79 << 30, rates, {}, 3e12, None, None)
    path.write_text(to_cluster_yaml(unknown))
    assert parse_cluster(str(path)).device.kind == "GPU"


@pytest.mark.slow
def test_collectives_of_real_processes() -> None:
    found = time_collectives_over(2, "gloo")
    assert [r.collective for r in fit_rings(2, found)] == list(COLLECTIVES)
    assert all(0 < times[min(times)] < times[max(times)] for times in found.values())
