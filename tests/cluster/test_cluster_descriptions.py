"""Cluster descriptions: parsed clusters, and messages for invalid ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from secc.cluster import GIB, Cluster, Link, parse_cluster
from secc.cluster.presets import DEVICE_PRESETS, FIGURE_SOURCES, LINK_PRESETS
from secc.errors import UserError


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secc.cluster.description.list_local_gpus", list)


def test_shorthand() -> None:
    cluster = parse_cluster("4x8xH100")
    assert (cluster.nodes, cluster.per_node, cluster.ranks, cluster.device.kind) == (4, 8, 32, "H100")
    assert cluster.slowest_link(8) == cluster.inside and cluster.slowest_link(9) == cluster.between
    assert parse_cluster("8xa100").ranks == 8


def test_every_preset_has_links_and_sane_figures() -> None:
    assert DEVICE_PRESETS.keys() == LINK_PRESETS.keys() == FIGURE_SOURCES.keys()
    figures = {"rates", "memory", "moved", "inside", "between", "host"}
    assert all(set(s) == figures for s in FIGURE_SOURCES.values())
    for device in DEVICE_PRESETS.values():
        assert device.flops_per_us("bf16") > 0 and device.flops_per_us("c64") == device.flops_per_us("f32")
        assert 0 < device.usable_memory < device.memory
        assert dict(device.gflops)["f64"] <= dict(device.gflops)["f32"] / 1.9  # Ada's is a 64-th


@pytest.mark.usefixtures("no_gpus")
def test_local_without_gpus_uses_cpu_processes() -> None:
    cluster = parse_cluster("local")
    assert cluster.device.backend == "cpu" and cluster.ranks >= 2
    assert parse_cluster("local:5").ranks == 5


def test_local_uses_the_gpus_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "secc.cluster.description.list_local_gpus", lambda: [("NVIDIA H100 80GB HBM3", 79 * GIB)] * 2
    )
    cluster = parse_cluster("local")
    assert (cluster.ranks, cluster.device.kind, cluster.device.memory) == (2, "H100", 79 * GIB)
    with pytest.raises(UserError, match="2 GPUs"):
        parse_cluster("local:3")


def test_unknown_local_gpu_is_labelled_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secc.cluster.description.list_local_gpus", lambda: [("Someone's X1", 16 * GIB)])
    assert (parse_cluster("local").device.kind, parse_cluster("local").device.label) == (
        "Someone's X1",
        "default",
    )


def test_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(
        "nodes: 2\ndevices: 4\nkind: A100\nmemory_gib: 40\nbf16_tflops: 300\nbetween: {gb_s: "
        "12.5, latency_us: 20}\n"
    )
    cluster = parse_cluster(str(path))
    assert (cluster.name, cluster.ranks, cluster.device.memory) == ("lab", 8, 40 * GIB)
    assert dict(cluster.device.gflops)["bf16"] == 300_000
    assert (cluster.between.bytes_per_s, cluster.between.latency_ns) == (125 * 10**8, 20_000)
    assert cluster.inside == parse_cluster("8xA100").inside


def test_measured_collectives_survive_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    entry = "{collective: all_reduce, ranks: 2, gb_s: 1.5, latency_us: 90}"
    path.write_text(f"kind: cpu\ndevices: 2\ninside: {{gb_s: 4, latency_us: 30, collectives: [{entry}]}}\n")
    cluster = parse_cluster(str(path))
    assert (
        cluster.inside.measured_link("all_reduce", 4) == Link(90_000, 15 * 10**8)
        and cluster.inside.measured_link("all_gather", 2) is None
    )
    assert Cluster.from_dict(json.loads(cluster.to_json())) == cluster


def test_parts_and_views_of_mixed_cluster() -> None:
    cluster = parse_cluster("1x8xH100+2x8xA800")
    assert [(p.name, p.ranks, p.device.kind) for p in cluster.parts_by_kind] == [
        ("1x8xH100", 8, "H100"),
        ("2x8xA800", 16, "A800"),
    ]
    assert (
        cluster.view_of_ranks(range(8)).device.kind == "H100"
        and cluster.view_of_ranks(range(8, 24)).device.kind == "A800"
    )
    assert cluster.view_of_ranks(range(24)) == cluster and parse_cluster("2x8xH100").view_of_ranks(
        [3]
    ) == parse_cluster("2x8xH100")
    assert [g.nodes for g in cluster.trim_to_ranks([8, 8]).node_groups] == [1, 1]
    alone = cluster.trim_to_ranks([0, 16])
    assert (alone.device.kind, alone.nodes, alone.groups, alone.name) == ("A800", 2, (), cluster.name)


def test_mixed_kinds(tmp_path: Path) -> None:
    cluster = parse_cluster("4x8xH100+4x8xA800")
    assert (cluster.ranks, cluster.nodes, [g.device.kind for g in cluster.groups]) == (
        64,
        8,
        ["H100", "A800"],
    )
    assert (cluster.device_of_rank(31).kind, cluster.device_of_rank(32).kind) == ("H100", "A800")
    slower = parse_cluster("1x8xA800").device
    assert cluster.device.flops_per_us("bf16") == slower.flops_per_us("bf16")  # and not H100's share of it
    assert dict(cluster.device.gflops)["bf16"] == 312_000 and cluster.between.bytes_per_s == 25 * 10**9
    path = tmp_path / "mixed.yaml"
    path.write_text("groups:\n- {nodes: 4, devices: 8, kind: H100}\n- {nodes: 4, devices: 8, kind: A800}\n")
    assert parse_cluster(str(path)).groups == cluster.groups


def test_figures_that_round_to_nothing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for figure in ("f32_tflops: 0.00001", "memory_gb_s: 1.0e-10", "inside: {gb_s: 5, latency_us: 0.0001}"):
        path.write_text(f"nodes: 1\ndevices: 2\nkind: H100\n{figure}\n")
        with pytest.raises(UserError, match=r"at least 0\.001"):
            parse_cluster(str(path))


def test_kind_without_preset(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("devices: 8\nkind: X1\nlike: H100\nbf16_tflops: 500.5\n")
    device = parse_cluster(str(path)).device
    assert (device.kind, dict(device.gflops)["bf16"], device.memory) == ("X1", 500_500, 80 * GIB)


@pytest.mark.parametrize("text", ["2x8xH100", "1x8xH100+1x8xA800"])
def test_json_round_trip(text: str) -> None:
    cluster = parse_cluster(text)
    assert Cluster.from_dict(json.loads(cluster.to_json())) == cluster


def test_json_has_what_a_launcher_needs() -> None:
    data = json.loads(parse_cluster("2x8xH100").to_json())
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
        ("nowhere.yaml", "cannot read the cluster file"),
    ],
)
def test_invalid_descriptions(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse_cluster(text)
    assert error.value.remedy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices: [", "not YAML"),
        ("8", "expected a mapping"),
        ("devices: 8", "lacks 'kind'"),
        ("kind: H100", "lacks 'devices'"),
        ("kind: H100\ndevices: 0", "for 'devices', got 0"),
        ("kind: H100\ndevices: 8\ncolour: 1", "unknown key 'colour'"),
        ("kind: H100\ndevices: 8\ninside: 3", "expected a link at 'inside', got 3"),
        ("kind: cpu\ndevices: 2\ninside: {collectives: 3}", "expected a measured collective"),
        (
            (
                "kind: cpu\ndevices: 2\ninside: {collectives: [{collective: sum, ranks: 2, gb_s: "
                "1, latency_us: 1}]}"
            ),
            "expected a measured collective",
        ),
        (
            (
                "kind: cpu\ndevices: 2\ninside: {collectives: [{collective: all_reduce, ranks: 1, "
                "gb_s: 1, latency_us: 1}]}"
            ),
            "expected at least 2 ranks",
        ),
        ("kind: H100\ndevices: 8\nmemory_gib: -1", "for 'memory_gib', got -1"),
        ("kind: TPU\ndevices: 8", "no preset for the device kind 'TPU'"),
        ("groups: 3", "'groups' must be a list"),
        ("groups: [{kind: H100, devices: 8}, {kind: A800, devices: 4}]", "nodes of 8 and 4 devices"),
        ("groups: [{kind: H100, devices: 2}, {kind: cpu, devices: 2}]", "mixes CPUs and GPUs"),
    ],
)
def test_invalid_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        parse_cluster(str(path))


def test_operations_reach_the_part_of_the_memory_rate_that_a_file_says(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("nodes: 1\ndevices: 2\nkind: H100\nmemory_gb_s: 4000\nmemory_percent: 50\n")
    device = parse_cluster(str(path)).device
    assert (device.memory_bytes_per_us, device.moved_bytes_per_us) == (4_000_000, 2_000_000)
    path.write_text("nodes: 1\ndevices: 2\nkind: H100\nmemory_percent: 101\n")
    with pytest.raises(UserError, match="up to 100 for 'memory_percent', got 101"):
        parse_cluster(str(path))
