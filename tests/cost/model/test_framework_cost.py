"""Steps as other frameworks run them (`secc.cluster.Framework`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from secc.alloc.problem.candidates import price_candidate
from secc.alloc.problem.types import ReplicaShape
from secc.alloc.problem.workload import build_workload
from secc.cluster import Cluster, Framework, parse_cluster
from secc.ir.dialect.ops import GraphOp, graph_of
from secc.ir.text_io.module_text import parse_module

TEXT = """
sec.graph "g" attributes {samples = ["B S", " | 1,2048"], mean = "S = 2.048e3"} {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.symbol "S" kind "width" key "x" dim 1
  sec.block "layers" class "L" params 8000000000 trainable 8000000000 component "" layers 32 when [] at ""
  sec.section "s" mode "train" when [] blocks ["layers"]
  sec.case "c" when [] {
    %x = sec.input "x" : !sec.tensor<[B, S, 4096], bf16, grad>
    %h = sec.call "layers" (%x) args "$0" outs [""] in @s {flops = "16000000000*B*S",
      work = "16000000000*B*S", saved = "4000000*B*S", moved = "10000000*B*S", ops = 900 : i64,
      cost = "counted", layers = 32 : i64, units = 32 : i64, kept = "262144*B*S", working = "100000*B*S",
      again = "16000000000*B*S",
      again_moved = "10000000*B*S", mode = "train"} : !sec.tensor<[B, S, 4096], bf16, grad>
    sec.return constant "0.0"
  }
}
"""


@pytest.fixture(scope="module")
def graph() -> GraphOp:
    return graph_of(parse_module(TEXT))


def step_ns(
    graph: GraphOp, habits: Framework, shape: ReplicaShape, sharding: str = "zero1", recompute: str = "none"
) -> int:
    cluster = parse_cluster("4x8xA100")
    cluster = replace(cluster, device=replace(cluster.device, framework=habits))
    work = build_workload(graph, cluster, 256)
    load = work.rank_load(work.loads["s"], shape)
    return price_candidate(work, load, 32 // shape.ranks, 1, sharding, recompute).time_ns


TP, STAGES = ReplicaShape(tp=4), ReplicaShape(pp=2)


@pytest.mark.parametrize(
    ("habits", "shape", "sharding", "recompute"),
    [
        (Framework(layer_passes=200), ReplicaShape(), "zero1", "none"),
        (Framework(lost_rows=500), ReplicaShape(), "zero1", "none"),
        (Framework(recompute_percent=130), ReplicaShape(), "zero1", "full"),
        (Framework(tp_recompute_percent=130), TP, "zero1", "full"),
        (Framework(tp_percent=130), TP, "zero1", "none"),
        (Framework(zero3_open_percent=50), ReplicaShape(), "zero3", "none"),
        (Framework(waits_of_two_stages=4), STAGES, "zero1", "none"),
    ],
)
def test_habits_that_cost_time(
    graph: GraphOp, habits: Framework, shape: ReplicaShape, sharding: str, recompute: str
) -> None:
    own = step_ns(graph, Framework(), shape, sharding, recompute)
    assert own < step_ns(graph, habits, shape, sharding, recompute) < 2 * own


@pytest.mark.parametrize(
    ("habits", "shape"),
    [
        (Framework(tp_hidden_percent=80), TP),
        (Framework(hides_gathers=True), TP),
        (Framework(virtual_stages=3), STAGES),
    ],
)
def test_habits_that_save_time(graph: GraphOp, habits: Framework, shape: ReplicaShape) -> None:
    other = Framework(name="other")  # secc's own runtime hides gathers
    assert step_ns(graph, habits, shape) < step_ns(graph, other, shape)


def test_a_second_forward_sums_over_tp_again(graph: GraphOp) -> None:
    """Twice the links' rate saves half of the all-reduces: two directions without recomputation, and a
    forward more with it."""

    def saved_by_faster_links(recompute: str) -> int:
        other, faster = (Framework(name="other", tp_percent=percent) for percent in (100, 50))
        return step_ns(graph, other, TP, recompute=recompute) - step_ns(
            graph, faster, TP, recompute=recompute
        )

    assert saved_by_faster_links("full") == pytest.approx(1.5 * saved_by_faster_links("none"), rel=0.01)


def test_plans_carry_no_framework() -> None:
    cluster = parse_cluster("8xH100")
    text = replace(cluster, device=replace(cluster.device, framework=Framework(lost_rows=9))).to_json()
    assert text == cluster.to_json() and "framework" not in text
    assert isinstance(cluster, Cluster)


def test_memory_left_to_fragmentation_is_set_in_cluster_files(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("devices: 8\nkind: H100\nmemory_margin: 10\n")
    device = parse_cluster(str(path)).device
    assert device.usable_memory == (device.memory - device.reserved) * 90 // 100
    assert device.usable_memory < parse_cluster("8xH100").device.usable_memory
