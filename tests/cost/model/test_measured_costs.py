"""Measured costs: prices as expression and number, rejected files, and costs of sections."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from secc.cluster import Overheads, parse_cluster
from secc.cost.counting.annotate_calls import annotate_calls
from secc.cost.model import roofline
from secc.cost.model.measured_costs import (
    CallPrices,
    Hardware,
    MeasuredBlock,
    MeasuredCosts,
    call_digest,
    local_hardware,
    read_measured_costs,
)
from secc.cost.model.section_cost import section_cost
from secc.cost.model.step_overheads import cluster_with_overheads
from secc.errors import UserError
from secc.ir.dialect.ops import CallOp, graph_of
from secc.profile.time_blocks import SizedBatch, time_blocks
from secc.runtime.plan.expr_eval import evaluate_expr
from tests.cost.call_graphs import call_graph

CALL = '    %y = sec.call "f" (%x) args "$0" outs [""] in @s : !sec.tensor<[B, S, 8], f32, grad>\n'
SECTION = '  sec.section "s" mode "train" blocks ["f"]\n'
CPU = torch.device("cpu")
MEASURED = Overheads(1, 2, 3, 4, 5, "measured")


def module_of(model: nn.Module) -> Any:
    module = call_graph(model, CALL, SECTION)
    annotate_calls(module, model)
    return module


def measured_costs(model: nn.Module, module: Any, hardware: Hardware | None = None) -> MeasuredCosts:
    call = next(op for case in graph_of(module).cases for op in case.ops if isinstance(op, CallOp))
    prices = CallPrices((1000.0, 0.5, 0.0, 0.25), 0.01)
    return MeasuredCosts(
        hardware or local_hardware(CPU),
        {call_digest(call, model["f"]): MeasuredBlock("Linear", prices, prices)},
    )


def test_section_of_timed_blocks_is_labelled_measured() -> None:
    model = nn.ModuleDict({"f": nn.Linear(8, 8)})
    module = module_of(model)
    measured_costs(model, module).annotate_module(module, model)
    cost = section_cost(graph_of(module), next(iter(graph_of(module).sections)))
    device = parse_cluster("local:2").device
    assert roofline.time_label(cost, device) == "measured" and (cost.work, cost.flops) == ("0", "128*B*S")
    sizes = {"B": 2, "S": 16}
    counted = 6400 * 32 * 0.5 + 0.25 * 0  # work counts fifty times over 8 features; nothing else moves bytes
    assert evaluate_expr(roofline.forward_ns_expression(cost, device), sizes) == pytest.approx(
        device.overheads.job + 1000 + counted, rel=1e-6
    )


def test_scaled_block_takes_longer() -> None:
    entry = MeasuredBlock("Linear", CallPrices((1000.0, 0.5, 0.0, 0.25), 0.01), None).scale_times(2.0)
    assert entry == MeasuredBlock("Linear", CallPrices((2000.0, 1.0, 0.0, 0.5), 0.01), None)


def test_file_round_trip(tmp_path: Path) -> None:
    model = nn.ModuleDict({"f": nn.Linear(8, 8)})
    made = measured_costs(model, module_of(model))
    path = tmp_path / "costs.json"
    for table_ in (made, replace(made, overheads=MEASURED)):
        path.write_text(table_.to_json())
        assert read_measured_costs(path) == table_


def test_measured_overheads_replace_those_of_presets() -> None:
    model = nn.ModuleDict({"f": nn.Linear(8, 8)})
    module = module_of(model)
    MeasuredCosts(local_hardware(CPU), {}, MEASURED).annotate_module(module, model)
    cpus, gpus = (
        cluster_with_overheads(graph_of(module), parse_cluster(text)).device
        for text in ("1x2xcpu", "1x8xH100")
    )
    assert cpus.overheads == MEASURED and gpus.overheads.label == "default"


@pytest.mark.parametrize(("hardware", "cluster"), [
    (Hardware("cpu", "Another CPU", 1), "local:2"),
    (Hardware("cuda", "NVIDIA A100-SXM4-80GB", 0), "2x8xH100"),
    (Hardware("cuda", "NVIDIA H100 80GB HBM3", 0), "1x2xcpu"),
])  # fmt: skip
def test_costs_of_other_hardware_are_rejected(hardware: Hardware, cluster: str) -> None:
    with pytest.raises(UserError, match="measured on"):
        MeasuredCosts(hardware, {}).check_hardware(parse_cluster(cluster))


def test_costs_of_the_clusters_hardware_are_accepted() -> None:
    MeasuredCosts(Hardware("cuda", "NVIDIA H100 80GB HBM3", 0), {}).check_hardware(parse_cluster("2x8xH100"))
    MeasuredCosts(local_hardware(CPU), {}).check_hardware(parse_cluster("1x2xcpu"))


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", json.dumps({"version": 2, "hardware": {"backend": "cpu"}, "blocks": {}})]
)
def test_other_files_are_rejected(text: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(UserError, match="expected a file of measured costs"):
        read_measured_costs(path)


def test_real_blocks_are_timed_and_fitted() -> None:
    model = nn.ModuleDict({"f": nn.Linear(8, 8)})
    module = module_of(model)
    sizes = [{"B": b, "S": s} for b in (1, 2) for s in (64, 256, 1024, 4096)]
    batches = [SizedBatch({"x": torch.zeros(n["B"], n["S"], 8)}, n) for n in sizes]
    found, (report,) = time_blocks(module, model, batches, {}, CPU, 2, lambda _: None, ranks=2)
    assert not multiprocessing.active_children()
    assert len(found.entries) == 1 and len(report.timings) == 8 and report.measured is not None
    assert all(v >= 0 for v in report.measured.forward.values) and report.measured.backward is not None
