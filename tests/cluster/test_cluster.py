"""Descriptions of clusters: what they mean, and what is said where they mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from secc.cluster import GIB, parse
from secc.cluster.presets import DEVICES, LINKS
from secc.errors import UserError


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secc.cluster.description.local_gpus", list)


def test_shorthand() -> None:
    cluster = parse("4x8xH100")
    assert (cluster.nodes, cluster.per_node, cluster.ranks, cluster.device.kind) == (4, 8, 32, "H100")
    assert cluster.link(8) == cluster.inside and cluster.link(9) == cluster.between
    assert parse("8xa100").ranks == 8


def test_every_preset_has_links_and_sane_figures() -> None:
    assert DEVICES.keys() == LINKS.keys()
    for device in DEVICES.values():
        assert device.rate("bf16") > 0 and device.rate("c64") == device.rate("f32")
        assert 0 < device.usable < device.memory


@pytest.mark.usefixtures("no_gpus")
def test_local_without_gpus_is_cpu_processes() -> None:
    cluster = parse("local")
    assert cluster.device.backend == "cpu" and cluster.ranks >= 2
    assert parse("local:5").ranks == 5


def test_local_takes_the_gpus_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secc.cluster.description.local_gpus", lambda: [("NVIDIA H100 80GB HBM3", 79 * GIB)] * 2)
    cluster = parse("local")
    assert (cluster.ranks, cluster.device.kind, cluster.device.memory) == (2, "H100", 79 * GIB)
    with pytest.raises(UserError, match="2 GPUs"):
        parse("local:3")


def test_local_labels_a_gpu_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secc.cluster.description.local_gpus", lambda: [("Someone's X1", 16 * GIB)])
    assert (parse("local").device.kind, parse("local").device.label) == ("Someone's X1", "default")


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text('nodes = 2\ndevices = 4\nkind = "A100"\nmemory_gib = 40\nbf16_tflops = 300\nbetween = {gb_s = 12, latency_us = 20}\n')
    cluster = parse(str(path))
    assert (cluster.name, cluster.ranks, cluster.device.memory) == ("lab", 8, 40 * GIB)
    assert dict(cluster.device.gflops)["bf16"] == 300_000
    assert (cluster.between.bytes_per_s, cluster.between.latency_ns) == (12 * 10**9, 20_000)
    assert cluster.inside == parse("8xA100").inside


def test_json_has_what_a_launcher_needs() -> None:
    data = json.loads(parse("2x8xH100").to_json())
    assert (data["nodes"], data["per_node"], data["device"]["backend"], data["ranks"]) == (2, 8, "cuda", 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8", "cannot read the cluster"),
        ("", "cannot read the cluster"),
        ("4x8xTPU", "unknown device kind 'TPU'"),
        ("0x8xH100", "no devices"),
        ("local:0", "cannot read the cluster"),
        ("local:many", "cannot read the cluster"),
        ("nowhere.toml", "cannot read the cluster file"),
    ],
)
def test_bad_descriptions(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse(text)
    assert error.value.remedy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices = ", "not TOML"),
        ("devices = 8", "lacks 'kind'"),
        ('kind = "H100"', "lacks 'devices'"),
        ('kind = "H100"\ndevices = 0', "'devices' is 0"),
        ('kind = "H100"\ndevices = 8\ncolour = 1', "unknown key 'colour'"),
        ('kind = "H100"\ndevices = 8\ninside = 3', "'inside' is not a link"),
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        parse(str(path))
